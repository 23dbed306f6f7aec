"""Attention that is global for small images and windowed for large ones."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lowtide.attention.backends import get_backend
from lowtide.attention.dispatch import Policy
from lowtide.attention.functional import describe_tensors, resolve_cached
from lowtide.attention.spatial.image_layout import channels_first, check_image, gather_rows
from lowtide.attention.spatial.local_window import LocalWindowAttention
from lowtide.attention.spatial.position import PositionKind
from lowtide.attention.spatial.window_grid import Boundary, Form
from lowtide.attention.spec import AttentionSpec, LocalDevice
from lowtide.core.errors import UsageError

Stage = Literal["full", "chunked", "windows"]


class HierarchicalAttention(LocalWindowAttention):
    """Global attention for small images, window attention for large ones.

    Takes (B, ``channels``, H, W) of any size and returns the same shape, without a residual. Up to
    ``full_tokens`` pixels attention is global and computed at once. Up to ``chunked_tokens`` it is
    global too, in chunks of ``chunk`` queries where the backend would hold all scores (fused ones
    do not). Above, it is that of `LocalWindowAttention` with the same weights. The first two give
    the same values up to rounding; the third is another function, so results change where an image
    passes that size. Costs, for N pixels and C channels, in addition to those of
    `LocalWindowAttention`:

    - FLOPs: 8·N·C² for the projections and 4·C·N² for global attention;
    - memory in addition to input and result: 4·N·C elements, and heads · chunk · N scores.

    It is exported for a range of sizes within one stage only.

    Args:
        channels: of input and result.
        full_tokens, chunked_tokens: the most pixels of the first two stages.
        chunk: queries at a time; halved above half of ``chunked_tokens``, as rows of scores are
            longer.
        position: ``"rope"`` or ``"none"``: a bias table cannot cover distances in a whole image.
        heads, window, shared, form, boundary, phase, bias, backend, policy: see
            `LocalWindowAttention`.

    Raises:
        UsageError: options contradict each other, or an input of another shape.
    """

    def __init__(
        self,
        channels: int,
        *,
        full_tokens: int = 2048,
        chunked_tokens: int = 16384,
        chunk: int = 256,
        heads: int | None = None,
        window: int = 32,
        shared: int = 8,
        form: Form = "halo",
        boundary: Boundary = "mask",
        phase: tuple[int, int] = (0, 0),
        position: PositionKind = "rope",
        bias: bool = True,
        backend: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        if position not in ("rope", "none"):
            raise UsageError(f"position {position!r} is not supported by global attention")
        if chunk < 1 or not 0 <= full_tokens <= chunked_tokens:
            raise UsageError(
                f"full_tokens {full_tokens}, chunked_tokens {chunked_tokens} and chunk {chunk}"
                " do not fit together",
                hint="0 <= full_tokens <= chunked_tokens and chunk >= 1",
            )
        super().__init__(
            channels,
            heads=heads,
            window=window,
            shared=shared,
            form=form,
            boundary=boundary,
            phase=phase,
            position=position,
            bias=bias,
            backend=backend,
            policy=policy,
        )
        self.full_tokens, self.chunked_tokens, self.chunk = full_tokens, chunked_tokens, chunk

    def stage(self, height: int, width: int) -> Stage:
        """Return the stage for an image size: ``"full"``, ``"chunked"`` or ``"windows"``."""
        if height * width > self.chunked_tokens:
            return "windows"
        return "full" if height * width <= self.full_tokens else "chunked"

    def forward(self, image: Tensor) -> Tensor:
        """Attend within a whole image: (B, C, H, W) to (B, C, H, W)."""
        check_image(image, self.channels)
        height, width = image.shape[2:]
        if height * width > self.chunked_tokens:
            return super().forward(image)
        return self._global(image, 0, height)

    def rows_needed(self, first: int, last: int, height: int, width: int) -> tuple[int, int]:
        """Return the input rows that rows ``first`` to ``last`` of the result need.

        All rows in the first two stages.
        """
        if self.stage(height, width) != "windows":
            return 0, height
        return super().rows_needed(first, last, height, width)

    def row_multiple(self, height: int, width: int) -> int:
        """Return the number of result rows that are computed together."""
        windows = self.stage(height, width) == "windows"
        return super().row_multiple(height, width) if windows else 1

    def forward_rows(self, image: Tensor, first: int, last: int, height: int) -> Tensor:
        """Return rows ``first`` to ``last`` of the result for an image of ``height`` rows.

        ``image`` is (B, C, rows, W) with exactly the rows that `rows_needed` returns; the result,
        (B, C, result rows, W), equals those rows of `forward`.
        """
        check_image(image, self.channels)
        if self.stage(height, image.shape[3]) == "windows":
            return super().forward_rows(image, first, last, height)
        if image.shape[2] != height:
            raise UsageError(f"global attention needs all {height} rows, not {image.shape[2]}")
        return self._global(image, first, last)

    def _global(self, image: Tensor, first: int, last: int) -> Tensor:
        """Return rows of the result of attention over the whole image."""
        query, key, value = self._project(image)
        down, right = (torch.arange(size, device=image.device) for size in image.shape[2:])
        turns = self.position.rotary_factors(down, right, key.dtype)
        key = self.position.rotate(key, turns)
        turns = None if turns is None else turns[first:last]
        query = self.position.rotate(query[:, first:last], turns)
        query, key, value = (t.flatten(1, 2).transpose(1, 2) for t in (query, key, value))
        if torch.compiler.is_exporting():
            found = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        else:
            found = torch.cat(
                [
                    self._attend(part, key, value, None)
                    for part in query.split(self._queries_per_chunk(query, key, value), 2)
                ],
                2,
            )
        found = self.out(found.transpose(1, 2).flatten(2))
        found = found.unflatten(1, (last - first, image.shape[3]))
        if torch.compiler.is_exporting():
            return channels_first(found, image)
        return gather_rows(image, last - first, [(0, found)])

    def _queries_per_chunk(self, query: Tensor, key: Tensor, value: Tensor) -> int:
        """Return the number of queries per chunk.

        Fewer than all in the second stage, if the backend would hold the scores of all.
        """
        tokens = key.shape[2]
        if tokens <= self.full_tokens:
            return tokens
        device = LocalDevice.of(query.device)
        call = describe_tensors(query, key, value, None, AttentionSpec())
        taken = resolve_cached(call, device, self.backend, self.policy)
        if (
            get_backend(taken.backend).workspace_bytes(device, call)
            < call.score_count * call.dtype.itemsize
        ):
            return tokens
        return max(1, self.chunk // (2 if 2 * tokens > self.chunked_tokens else 1))
