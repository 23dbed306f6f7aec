"""Local window attention over an image, as a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lowtide.attention.dispatch import Policy
from lowtide.attention.functional import attention
from lowtide.attention.spatial.dense_windows import dense_attention
from lowtide.attention.spatial.image_layout import (
    channels_first,
    check_heads,
    check_image,
    default_heads,
    gather_linear,
    gather_rows,
    layer_rows,
    linear_pixels,
    rows_as_pixels,
    supports_gather_linear,
)
from lowtide.attention.spatial.position import PositionKind, make_position
from lowtide.attention.spatial.row_windows import Part, RowWindowAttention
from lowtide.attention.spatial.window_grid import Boundary, Form, WindowGeometry
from lowtide.attention.spec import LocalDevice
from lowtide.core.errors import UsageError

Kernel = Literal["auto", "portable", "triton"]


class RowRegionModule(nn.Module):
    """Module from (B, C, H, W) to the same shape that can compute some rows alone.

    Band execution queries such a module for the input rows it needs, instead of probing its
    receptive field.
    """

    def rows_needed(self, first: int, last: int, height: int, width: int) -> tuple[int, int]:
        """Return the input rows that rows ``first`` to ``last`` of the result need.

        In an image of ``height`` × ``width``.
        """
        raise NotImplementedError

    def forward_rows(self, image: Tensor, first: int, last: int, height: int) -> Tensor:
        """Return rows ``first`` to ``last`` of the result for an image of ``height`` rows.

        ``image`` is (B, C, rows, W) with exactly the rows that `rows_needed` returns, the result
        (B, C, result rows, W).
        """
        raise NotImplementedError

    def row_multiple(self, height: int, width: int) -> int:
        """Return the number of result rows computed together, counted from the first.

        Bands that end between multiples of it compute some rows twice.
        """
        raise NotImplementedError


class LocalWindowAttention(RowRegionModule):
    """Window attention: each pixel attends to the pixels of a window around it.

    Takes (B, ``channels``, H, W) of any size, values of any range, and returns the same shape,
    without a residual. Costs, for windows of w pixels that share s, heads h, step t = w - s, q = t
    (halo) or w (blended), N pixels and C channels:

    - FLOPs: 8·N·C² for the projections, and 4·C·N·(q·w / t)² for attention, less at borders;
    - memory in addition to input and result: about 3·(C·w·W + C·q·(w / t)·W) elements for images W
      wide, independent of their height.

    Exact up to rounding: equal to the formula (halo, HaloNet, arXiv 2103.12731) for every size.
    Images smaller than a window get global attention. Pixels that are not finite make the results
    of all pixels that see them not finite, and no others.

    Args:
        channels: of input and result.
        heads: by default one for each 32 channels.
        window: side of a window in pixels.
        shared: overlap of neighboring windows in pixels.
        form: ``"halo"`` computes each pixel once; ``"blended"`` blends overlapping windows, at up
            to 3.2 times the work.
        boundary: what lies beyond the image; see `WindowGeometry`.
        phase: offset of the grid of windows, (rows, columns) before the image. Alternate it between
            layers to exchange information between windows.
        position: ``"rope"``, ``"decomposed"``, ``"table"`` or ``"none"``.
        bias: whether the projections have a bias.
        backend, policy: see `lowtide.attention.resolve`; by default the first that supports the
            call.
        kernel: ``"portable"`` runs rows of windows through a backend; ``"triton"`` runs one kernel
            that reads the image directly and holds query, key and value of all of it, or raises;
            ``"auto"`` takes ``"triton"`` for 16-bit dtypes on GPUs of compute capability 9.0, where
            this project has measured it, and ``"portable"`` elsewhere. `explain` says why.

    Raises:
        UsageError: options contradict each other, or an input of another shape.
    """

    def __init__(
        self,
        channels: int,
        *,
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
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__()
        if kernel not in get_args(Kernel):
            raise UsageError(f"kernel {kernel!r} is not known", hint="auto, portable or triton")
        self.kernel: Kernel = kernel
        self.channels = channels
        self.heads = default_heads(channels) if heads is None else heads
        head_dim = check_heads(channels, self.heads)
        self.windows = WindowGeometry(window, shared, form, boundary, phase)
        self.qkv = nn.Linear(channels, 3 * channels, bias=bias)
        self.out = nn.Linear(channels, channels, bias=bias)
        self.position = make_position(position, self.heads, head_dim, self.windows.max_distance)
        self.backend = backend
        self.policy: Policy | None = policy

    def forward(self, image: Tensor) -> Tensor:
        """Attend within the windows of a whole image: (B, C, H, W) to (B, C, H, W)."""
        check_image(image, self.channels)
        if torch.compiler.is_exporting():
            return self._exported(image)
        if self.kernel == "triton" or self._prefers_triton(image):
            return self._by_triton(image)
        return self.forward_rows(image, 0, image.shape[2], image.shape[2])

    def rows_needed(self, first: int, last: int, height: int, width: int) -> tuple[int, int]:
        """Return the input rows that rows ``first`` to ``last`` of the result need.

        In an image of ``height`` × ``width``.
        """
        return self._local(height, width).rows_needed(first, last)

    def forward_rows(self, image: Tensor, first: int, last: int, height: int) -> Tensor:
        """Return rows ``first`` to ``last`` of the result for an image of ``height`` rows.

        ``image`` is (B, C, rows, W) with exactly the rows that `rows_needed` returns; the result,
        (B, C, result rows, W), equals those rows of `forward`.
        """
        check_image(image, self.channels)
        local = self._local(height, image.shape[3])
        low, high = local.rows_needed(first, last)
        if image.shape[2] != high - low:
            raise UsageError(
                f"rows {first} to {last} depend on rows {low} to {high}: {high - low} rows,"
                f" not {image.shape[2]}"
            )

        def pieces() -> Iterator[tuple[int, Tensor]]:
            for row, piece in local.run(_ImageRows(self, image, low).load, first, last):
                found = piece.transpose(1, 2).flatten(3)
                del piece  # free the piece before the next one is computed
                yield row - first, found
                del found

        return self._project_out(image, last - first, pieces())

    def row_multiple(self, height: int, width: int) -> int:
        """Return the number of result rows computed together: the stride of windows."""
        return self.windows.stride if self.windows.phase[0] == 0 else 1

    def explain(self, image: Tensor) -> str:
        """Explain which kernel computes ``image`` (B, C, H, W), and why not the other one."""
        reason = self._triton_unsupported_reason(image)
        if self.kernel == "triton":
            return f"triton: {'requested' if reason is None else 'not supported: ' + reason}"
        if self._prefers_triton(image):
            return "triton: measured to be the fastest on this kind of GPU"
        why = reason or "not measured on this kind of device or with this dtype; used only by name"
        if self.kernel == "portable":
            why = "another kernel was requested"
        return f"portable: rows of windows\n  triton  {why}"

    def extra_repr(self) -> str:
        """Format the options for ``repr(module)``."""
        one = self.windows
        return (
            f"{self.channels}, heads={self.heads}, window={one.size}, shared={one.shared},"
            f" form={one.form!r}, boundary={one.boundary!r}, phase={one.phase}"
        )

    def _local(self, height: int, width: int) -> RowWindowAttention:
        return RowWindowAttention(self.windows, height, width, self.position, self._attend)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return attention(query, key, value, bias, backend=self.backend, policy=self.policy)

    def _project(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pixels = rows_as_pixels(image, self.qkv.weight)
        query, key, value = (self.project(pixels, part) for part in get_args(Part))
        return query, key, value

    def project(self, pixels: Tensor, part: Part) -> Tensor:
        """Project `rows_as_pixels` to queries, keys or values: (B, H, W, heads, head dim).

        Each part has its own memory, so that it can be freed on its own.
        """
        first = get_args(Part).index(part) * self.channels
        found = linear_pixels(pixels, *layer_rows(self.qkv, first, first + self.channels))
        return found.unflatten(-1, (self.heads, -1))

    def _project_out(
        self, image: Tensor, rows: int, pieces: Iterator[tuple[int, Tensor]]
    ) -> Tensor:
        """Apply the output projection to pieces, and crop them to ``rows`` rows.

        Pieces of halo windows are whole rows of windows, which may extend beyond ``rows``.
        """
        if self.windows.form == "halo" and supports_gather_linear(self.out, image):
            return gather_linear(self.out, rows, pieces)

        def products() -> Iterator[tuple[int, Tensor]]:
            for at, found in pieces:
                made = self.out(found)
                del found
                yield max(at, 0), made[:, max(-at, 0) : rows - at]
                del made

        return gather_rows(image, rows, products())

    def _prefers_triton(self, image: Tensor) -> bool:
        if self.kernel != "auto" or image.device.type != "cuda":
            return False
        from lowtide.attention.halo.autograd import is_preferred

        device = LocalDevice.of(image.device)
        return is_preferred(device, image.dtype) and self._triton_unsupported_reason(image) is None

    def _triton_unsupported_reason(self, image: Tensor) -> str | None:
        from lowtide.attention.halo.autograd import missing_requirement, unsupported_reason

        if (absent := missing_requirement(LocalDevice.of(image.device))) is not None:
            return f"{absent.reason}{f' ({absent.fix})' if absent.fix else ''}"
        if self.windows.boundary == "reflect" and self.position.rotates:
            return "a reflected key is rotated by the position where it is seen, not by its own"
        table = self.position.full_table()
        learning = [image, *self.parameters()] if torch.is_grad_enabled() else []
        shape = len(image), *image.shape[2:], self.heads, self.channels // self.heads
        return unsupported_reason(
            shape,
            image.dtype,
            self.windows,
            learned_bias=table is not None and table.requires_grad,
            needs_grad=any(tensor.requires_grad for tensor in learning),
        )

    def _by_triton(self, image: Tensor) -> Tensor:
        """Attend over the whole image in one launch; holds its query, key and value."""
        from lowtide.attention.halo.autograd import halo_attention

        if (reason := self._triton_unsupported_reason(image)) is not None:
            raise UsageError(f"the triton kernel does not support this call: {reason}")
        query, key, value = self._project(image)
        rows, columns = (torch.arange(side, device=image.device) for side in image.shape[2:])
        turns = self.position.rotary_factors(rows, columns, query.dtype)
        query, key = (self.position.rotate(tensor, turns) for tensor in (query, key))
        found = halo_attention(query, key, value, self.windows, self.position.full_table())
        return channels_first(self.out(found.flatten(3)), image)

    def _exported(self, image: Tensor) -> Tensor:
        """Compute the result as one graph for every image size, for export."""
        query, key, value = self._project(image)
        found = dense_attention(query, key, value, self.windows, self.position)
        return channels_first(self.out(found.flatten(3)), image)


class _ImageRows:
    """Loader of projected rows of an image whose first row is ``low``.

    The pixels are permuted once for each row of windows.
    """

    def __init__(self, module: LocalWindowAttention, image: Tensor, low: int) -> None:
        self._module, self._image, self._low = module, image, low
        self._pixels, self._first = image, low

    def load(self, part: Part, start: int, end: int) -> Tensor:
        """Load one part of rows ``start`` to ``end``: a `Load` of `row_windows`.

        Keys come first, with at least the rows of values and queries.
        """
        if part == "key":
            rows = self._image.narrow(2, start - self._low, end - start)
            self._pixels, self._first = rows_as_pixels(rows, self._module.qkv.weight), start
        pixels = self._pixels.narrow(1, start - self._first, end - start)
        if part == "query":
            self._pixels = self._image  # free the permuted copy before attention
        return self._module.project(pixels, part)
