"""Fused window attention of SwinIR, DRCT, HAT and CRAFT, and blocks of SwinIR and DRCT.

HAT's overlapping windows (OCAB) and CRAFT's rectangular ones included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.window_attention import MaskPattern, attend_windows, patterns_in_range
from lowtide.core.trace_cache import cached_in_trace
from lowtide.models.optimized.shift_mask import ShiftMask, WindowOrder
from lowtide.models.optimized.token_linear import OptimizedModule, is_recorded, linear_add

# Workspace of a chunk of windows in a block: in values for each channel, and at most in bytes, with
# more on a GPU, which needs many windows in flight.
_WORKSPACE_CHANNELS, _CHUNK_BYTES, _GPU_CHUNK_BYTES = 8, 32 << 20, 256 << 20

# The end of a block, from normalized pixels and the pixels themselves, both (N, C).
End = Callable[[Tensor, Tensor], Tensor]


class OptimizedWindowAttention(OptimizedModule):
    """Replacement for spandrel's ``WindowAttention`` of SwinIR, DRCT and HAT.

    Called as ``WindowAttention(x, mask)`` in SwinIR and DRCT, ``(x, rpi, mask)`` in HAT. ``x`` and
    the result are (windows, N, C). ``mask`` is None, a `ShiftMask`, or a tensor (windows, N, N) of
    one image's windows, for which the original module runs.
    """

    def forward(
        self, x: Tensor, rpi: Tensor | None = None, mask: Tensor | ShiftMask | None = None
    ) -> Tensor:
        """Attend in each window: (windows, N, C) to (windows, N, C)."""
        if torch.compiler.is_exporting() or isinstance(mask, Tensor):
            given = {} if rpi is None else {"rpi": rpi}
            return self.plain(x, **given, mask=mask)
        patterns = () if mask is None else mask.patterns(x)
        return self.attend(x, self.bias(rpi), patterns)

    def bias(self, rpi: Tensor | None = None) -> Tensor:
        """Return the relative position bias of all scores, (1, heads, N, N)."""
        plain = self.plain
        index = plain.relative_position_index if rpi is None else rpi
        return gather_bias(plain.relative_position_bias_table, index, len(index))

    def attend(
        self,
        x: Tensor,
        bias: Tensor,
        patterns: Sequence[MaskPattern],
        plus: Tensor | None = None,
    ) -> Tensor:
        """Attend in each window with ``bias``, adding ``plus`` where given.

        ``x``, ``plus`` and the result are (windows, N, C), ``bias`` is (1, heads, N, N).
        """
        query, key, value = split_heads(self.plain, x).permute(2, 0, 3, 1, 4)
        found = attend_windows(query, key, value, bias, patterns, self.plain.scale)
        return linear_add(self.plain.proj, found.transpose(1, 2).flatten(2), plus)


class OptimizedSwinBlock(OptimizedModule):
    """Replacement for spandrel's ``SwinTransformerBlock`` of SwinIR and DRCT.

    Called as ``SwinTransformerBlock(x, x_size)``. Windows go through attention and MLP in chunks,
    so that activations fit in caches and queries, keys and values never exist for the whole image.
    Masked windows, those along an edge, come last.

    With ``overwrites`` set, nothing else needs the input, and the output is written in place.
    """

    overwrites = False

    @staticmethod
    def supports(part: Any) -> bool:
        """Return whether the attention of ``part`` is an `OptimizedWindowAttention`."""
        return isinstance(part.attn, OptimizedWindowAttention)

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        plain = self.plain
        if torch.compiler.is_exporting() or plain.training or len(x) > 1:
            return plain(x, x_size)
        over = self.overwrites and not is_recorded()
        result = x if over else torch.empty_like(x)
        for places, _, found in self.parts(x[0], x_size, overwritten=over):
            scatter_rows(result[0], places, found)
        return result

    def parts(
        self,
        pixels: Tensor,
        x_size: tuple[int, int],
        *,
        overwritten: bool = False,
        end: End | None = None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Run the block on ``pixels`` (N, C) chunk by chunk.

        Args:
            overwritten: Whether ``pixels`` may change between chunks.
            end: Replaces the MLP after the attention.

        Yields indices of a chunk's pixels, their values, and the block's output for them.
        """
        plain = self.plain
        order = window_order(*x_size, plain.window_size, plain.shift_size, pixels.device)
        bias = plain.attn.bias()
        end = end or functools.partial(linear_add, plain.mlp)
        return self._iter_chunks(
            pixels, order.pixel_indices, bias, order.patterns(bias), end, overwritten
        )

    def _iter_chunks(
        self,
        pixels: Tensor,
        pixel_order: Tensor,
        bias: Tensor,
        patterns: Sequence[MaskPattern],
        end: End,
        overwritten: bool,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Run `parts` in the order ``pixel_order``; ``overwritten`` pixels may change."""
        plain = self.plain
        places = plain.window_size**2
        total = len(pixels) // places
        some = windows_per_chunk(pixels, total)
        # The last chunk may overlap the one before it.
        rest = pixel_order[(total - some) * places :]
        last = pixels.index_select(0, rest) if overwritten else None
        for first in range(0, total, some):
            first = min(first, total - some)
            chosen = pixel_order[first * places : (first + some) * places]
            kept = last if first == total - some else None
            given = pixels.index_select(0, chosen) if kept is None else kept
            windows = plain.norm1(given).view(some, places, -1)
            here = patterns_in_range(patterns, first, first + some)
            seen = plain.attn.attend(windows, bias, here, given.view_as(windows))
            seen = seen.view_as(given)
            yield chosen, given, end(plain.norm2(seen), seen)


def windows_per_chunk(x: Tensor, total: int) -> int:
    """Return how many of ``total`` windows of ``x`` (N, C) go through a block at once.

    All chunks have one size, and the last one overlaps where it would be smaller: oneDNN caches a
    kernel for each number of tokens, tens of megabytes for those of a deep model.
    """
    if torch.compiler.is_compiling():
        return total  # each chunk would be compiled separately
    limit = _CHUNK_BYTES if x.device.type == "cpu" else _GPU_CHUNK_BYTES
    window = _WORKSPACE_CHANNELS * (x.numel() // total) * x.element_size()
    most = min(total, max(1, limit // window))
    # The fewest windows run twice, and among those the largest chunk.
    return min(range((most + 1) // 2, most + 1), key=lambda size: (-total % size, -size))


def scatter_rows(pixels: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Write ``pixels[indices] = rows``, 16 bytes at a time on a CPU where aligned.

    ``pixels`` is (N, C), ``indices`` (n,) and ``rows`` (n, C). PyTorch's own index_copy_ copies
    element by element.
    """
    plain = is_recorded() or rows.device.type != "cpu"
    if not plain and _is_wide(pixels) and _is_wide(rows):
        pixels, rows = pixels.view(torch.complex128), rows.view(torch.complex128)
    pixels.index_copy_(0, indices, rows)


def _is_wide(rows: Tensor) -> bool:
    """Return whether each row (N, C) is whole 16-byte units, aligned to 16 bytes."""
    sides = rows.shape[1], rows.stride(0), rows.storage_offset()
    return rows.stride(1) == 1 and all(side * rows.element_size() % 16 == 0 for side in sides)


def window_order(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> WindowOrder:
    """Return the cached `WindowOrder` of an image size, shared by all blocks.

    What a trace on fake tensors makes is shared within that trace alone.
    """
    given = height, width, window, shift, device
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        return cached_in_trace(("window order", *given), lambda: _new_window_order(*given))
    return _window_order(*given)


def _new_window_order(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> WindowOrder:
    return WindowOrder.of(ShiftMask(height, width, window, shift), device)


_window_order = functools.lru_cache(maxsize=8)(_new_window_order)


class OptimizedOverlapAttention(OptimizedModule):
    """Replacement for HAT's ``OCAB(x, x_size, rpi)``: overlapping cross-attention.

    Windows attend to larger windows around them. Keys and values are views of the image, without
    ``nn.Unfold``.
    """

    def forward(self, x: Tensor, x_size: tuple[int, int], rpi: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        if torch.compiler.is_exporting():
            return self.plain(x, x_size, rpi)
        plain = self.plain
        height, width = x_size
        side, seen = plain.window_size, plain.overlap_win_size
        pixels = plain.norm1(x).unflatten(1, x_size)
        query, key, value = split_heads(plain, pixels).unbind(3)
        bias = gather_bias(plain.relative_position_bias_table, rpi, side * side)
        found = attend_windows(
            partition_windows(query, side, side),
            partition_windows(key, side, seen),
            partition_windows(value, side, seen),
            bias,
            (),
            plain.scale,
        )
        x = linear_add(plain.proj, merge_windows(found, height, width, (side, side)), x)
        return linear_add(plain.mlp, plain.norm2(x), x)


def split_heads(attention: Any, x: Tensor) -> Tensor:
    """Apply the ``qkv`` layer of an attention: (..., C) to (..., 3, heads, head dim)."""
    return attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1))


def gather_bias(table: Tensor, index: Tensor, queries: int) -> Tensor:
    """Gather the bias (1, heads, N, N') from a relative position table.

    ``table`` is (positions, heads), ``index`` (N, N') holds its row for each pair of pixels, N is
    ``queries``.
    """
    chosen = table.detach()[index.flatten()]
    return chosen.view(queries, -1, table.shape[1]).permute(2, 0, 1).contiguous()[None]


def partition_windows(image: Tensor, step: int, size: int) -> Tensor:
    """Partition (B, H, W, heads, head dim) into windows (windows, heads, N, head dim).

    One window of ``size`` for every ``step`` rows and columns, centered on them, zero-padded.
    """
    margin = (size - step) // 2
    if margin:
        image = F.pad(image, (0, 0, 0, 0, margin, margin, margin, margin))
    cut = image.unfold(1, size, step).unfold(2, size, step)
    # (B, rows, columns, heads, head dim, down, across)
    return cut.permute(0, 1, 2, 3, 5, 6, 4).flatten(4, 5).flatten(0, 2)


def merge_windows(windows: Tensor, height: int, width: int, window: tuple[int, int]) -> Tensor:
    """Merge windows (windows, heads, N, head dim) into (B, H · W, heads · head dim)."""
    rows, columns = height // window[0], width // window[1]
    found = windows.transpose(1, 2).flatten(2)
    found = found.view(-1, rows, columns, *window, found.shape[-1])
    return found.transpose(2, 3).reshape(len(found), height * width, -1)


class OptimizedRectangleAttention(OptimizedModule):
    """Replacement for spandrel CRAFT's ``Attention_regular``.

    Called as ``Attention_regular(qkv, H, W, mask, rpi, rpe_biases)``; with a mask the original
    runs.
    """

    def forward(
        self,
        qkv: Tensor,
        H: int,  # noqa: N803
        W: int,  # noqa: N803
        mask: Tensor | None = None,
        *,
        rpi: Tensor,
        rpe_biases: Tensor,
    ) -> Tensor:
        """Map ``qkv`` (3, B, N, C) to (B, H, W, C), N being H · W."""
        if torch.compiler.is_exporting() or mask is not None:
            return self.plain(qkv, H, W, mask=mask, rpi=rpi, rpe_biases=rpe_biases)
        plain = self.plain
        window = plain.H_sp, plain.W_sp
        places = window[0] * window[1]
        query, key, value = (self._windows(part, H, W, window) for part in qkv.unbind(0))
        bias = gather_bias(plain.pos(rpe_biases), rpi, places)
        found = attend_windows(query, key, value, bias, (), plain.scale)
        return merge_windows(found, H, W, window).view(qkv.shape[1], H, W, -1)

    def _windows(self, x: Tensor, height: int, width: int, window: tuple[int, int]) -> Tensor:
        """Partition (B, N, C) into windows (windows, heads, N, head dim)."""
        rows, columns = height // window[0], width // window[1]
        cut = x.reshape(len(x), rows, window[0], columns, window[1], self.plain.num_heads, -1)
        return cut.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5).flatten(0, 2)
