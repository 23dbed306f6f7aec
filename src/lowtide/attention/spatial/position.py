"""Relative position encodings of window attention: biases, 2D rotary ones (RoPE), or none.

All depend on the distance alone, so that they mean the same in every window, at every image size
and in every band of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError

# Along one axis: the first key's distance from the first query, number of queries, of keys.
Shape = tuple[int, int, int]

PositionKind = Literal["none", "table", "decomposed", "rope"]


@dataclass(frozen=True)
class RotaryAngles:
    """Rotary factors of a row of windows, separable along rows and columns.

    Complex numbers per pair of a head's channels: ``down`` (rows, pairs) and ``right`` (columns,
    pairs), whose product is the rotation; both take little memory. ``product`` is the product as
    `PositionEncoding.rotate` takes it, cached where that is used.
    """

    down: Tensor
    right: Tensor
    product: Tensor | None = None

    def narrow(self, row: int, rows: int, column: int, columns: int) -> RotaryAngles:
        """Slice to some rows and columns."""
        whole = self.product
        if whole is not None:
            whole = whole.narrow(0, row, rows).narrow(1, column, columns)
        down, right = self.down.narrow(0, row, rows), self.right.narrow(0, column, columns)
        return RotaryAngles(down, right, whole)


class PositionEncoding(nn.Module):
    """Base class of relative position encodings: no position at all.

    ``rotates`` says whether query and key are rotated by their positions; encodings with equal
    ``rotation_key`` rotate equally. Subclasses override what they need.
    """

    rotates = False
    rotation_key: Hashable = None

    def bias(self, down: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of the scores, (windows, heads, queries, keys) in ``dtype``, or None.

        ``down`` (windows down, rows of queries, rows of keys) and ``right`` (windows right,
        columns, columns) are distances in pixels from the query to the key.
        """
        return None

    def window_bias(self, down: Shape, right: Shape, like: Tensor) -> Tensor | None:
        """Return `bias` of one window, (1, heads, queries, keys), pixels column by column.

        In the dtype of ``like``, whose shape does not matter.
        """
        return None

    def full_table(self) -> Tensor | None:
        """Return all biases, (heads, distance down, distance right), or None."""
        return None

    def rotary_factors(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the rotary factors of pixels for `rotate`, or None.

        Positions are (..., rows) and (..., columns), in pixels, whose leading dimensions are
        broadcast; the result is (..., rows, columns, ...).
        """
        return None

    def rotate(self, tensor: Tensor, factors: Tensor | None) -> Tensor:
        """Rotate query or key, (..., rows, columns, heads, head dim), by pixel positions."""
        return tensor

    def separable_factors(
        self, rows: Tensor, columns: Tensor, dtype: torch.dtype
    ) -> RotaryAngles | None:
        """Return the rotary factors of a row of windows for `rotate_heads_first`.

        Positions are (rows,) and (columns,); see `rotary_factors`.
        """
        return None

    def rotate_heads_first(self, tensor: Tensor, factors: RotaryAngles | None) -> Tensor:
        """Rotate, and permute to (B, heads, columns, rows, head dim).

        ``tensor`` is (B, rows, columns, heads, head dim).
        """
        return to_heads_first(tensor)


def to_heads_first(tensor: Tensor) -> Tensor:
    """Copy as contiguous (B, heads, columns, rows, head dim).

    ``tensor`` is (B, rows, columns, heads, head dim).
    """
    return heads_first_view(tensor).contiguous()


def heads_first_view(tensor: Tensor) -> Tensor:
    """View (B, rows, columns, heads, dim) as (B, heads, columns, rows, dim)."""
    return tensor.permute(0, 3, 2, 1, 4)


class RelativePositionBias(PositionEncoding):
    """Learned bias for each head and relative distance, as in Swin (arXiv 2103.14030).

    ``table`` is (heads, distances down, distances right) for distances from -``max_distance`` to
    ``max_distance`` pixels.
    """

    def __init__(self, heads: int, max_distance: int) -> None:
        super().__init__()
        side = 2 * max_distance + 1
        self.table = nn.Parameter(torch.zeros(heads, side, side))
        nn.init.trunc_normal_(self.table, std=0.02)
        self._max_distance = max_distance

    def bias(self, down: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather the table's entries for all distances: (windows, heads, queries, keys)."""
        down, right = down + self._max_distance, right + self._max_distance
        spread = self.table[:, down[:, None, :, None, :, None], right[None, :, None, :, None, :]]
        return _of_windows(spread).to(dtype)

    def full_table(self) -> Tensor:
        """Return the table (heads, distances down, distances right)."""
        return self.table

    def window_bias(self, down: Shape, right: Shape, like: Tensor) -> Tensor:
        """Return the bias of one window, (1, heads, queries, keys), by slices."""
        table = self.table.to(like.dtype).mT
        # (heads, query rows, distance right, key rows)
        by_row = _by_query(table, 2, down, self._max_distance)
        # Dimensions: both axes' queries, then both axes' keys.
        return _by_query(by_row, 2, right, self._max_distance).flatten(3, 4).flatten(1, 2)[None]


def _by_query(table: Tensor, dim: int, shape: Shape, farthest: int) -> Tensor:
    """Slice distances along ``dim`` to each query's keys; queries become dim 1."""
    offset, queries, keys = shape
    first = farthest + offset
    return torch.stack([table.narrow(dim, first - one, keys) for one in range(queries)], 1)


class FactorizedRelativePositionBias(PositionEncoding):
    """Learned bias for each head, as a sum of one per distance down and one right.

    It has rank 2 · window where a table has (2 · window)² elements (ViTDet, arXiv 2203.16527, whose
    terms depend on the query too; these do not).
    """

    def __init__(self, heads: int, max_distance: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(heads, 2 * max_distance + 1))
        self.right = nn.Parameter(torch.zeros(heads, 2 * max_distance + 1))
        for table in (self.down, self.right):
            nn.init.trunc_normal_(table, std=0.02)
        self._max_distance = max_distance

    def bias(self, down: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather the sums of both tables' entries: (windows, heads, queries, keys)."""
        rows = self.down[:, down + self._max_distance].to(dtype)
        columns = self.right[:, right + self._max_distance].to(dtype)
        spread = rows[:, :, None, :, None, :, None] + columns[:, None, :, None, :, None, :]
        return _of_windows(spread)

    def window_bias(self, down: Shape, right: Shape, like: Tensor) -> Tensor:
        """Return the bias of one window, (1, heads, queries, keys), by slices."""
        rows, columns = (
            _by_query(table.to(like.dtype), 1, shape, self._max_distance)
            for table, shape in ((self.down, down), (self.right, right))
        )
        spread = columns[:, :, None, :, None] + rows[:, None, :, None, :]
        return spread.flatten(3, 4).flatten(1, 2)[None]

    def full_table(self) -> Tensor:
        """Return the sums for all distances: (heads, distances down, distances right)."""
        return self.down[:, :, None] + self.right[:, None, :]


def _of_windows(spread: Tensor) -> Tensor:
    """Permute to (windows, heads, queries, keys).

    From (heads, windows down, windows right, query rows, query columns, key rows, key columns).
    """
    return spread.movedim(0, 2).flatten(5, 6).flatten(3, 4).flatten(0, 1)


class Rope2d(PositionEncoding):
    """2D rotary position embedding, axial: half of the channels per axis.

    One half of a head's channels rotates with the row, the other with the column (RoPE, arXiv
    2104.09864; two axes as in arXiv 2403.13298). Scores then depend on distances without a mask, so
    every kernel supports it. The slowest channel rotates by about one radian within ``period``
    pixels. Raises `UsageError` for a head dim that is no multiple of 4.
    """

    rotates = True

    def __init__(self, head_dim: int, period: float = 100.0) -> None:
        super().__init__()
        if head_dim % 4:
            raise UsageError(
                f"rotary position needs a head dimension that is a multiple of 4, not {head_dim}",
                hint="another number of heads, or position='decomposed'",
            )
        self.rotation_key = head_dim, period
        pairs = head_dim // 4
        self._frequencies = [period ** -(pair / pairs) for pair in range(pairs)]

    def rotary_factors(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """Return cosine and sine per pair of channels.

        (..., rows, columns, 1, head dim / 2, 2) for positions (..., rows) and (..., columns), in at
        least fp32.
        """
        down = self._angles(rows)[..., :, None, :]
        right = self._angles(columns)[..., None, :, :]
        down, right = (torch.stack([angle.cos(), angle.sin()], -1) for angle in (down, right))
        exact = torch.promote_types(dtype, torch.float32)
        both = torch.broadcast_tensors(down.to(exact), right.to(exact))
        return torch.cat(both, -2).unsqueeze(-3)

    def rotate(self, tensor: Tensor, factors: Tensor | None) -> Tensor:
        """Rotate (..., rows, columns, heads, head dim) in at least fp32.

        The result has the dtype and shape of ``tensor``.
        """
        assert factors is not None
        pairs = tensor.to(factors.dtype).unflatten(-1, (-1, 2))
        if torch.compiler.is_exporting():
            return self._rotate_real(pairs, factors).flatten(-2).to(tensor.dtype)
        # Complex multiplication is one pass over memory.
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(factors)
        return torch.view_as_real(turned).flatten(-2).to(tensor.dtype)

    def separable_factors(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Return the factors along each axis, for positions (rows,) and (columns,).

        Channels of the other axis have factor 1, which changes no value.
        """
        exact = torch.promote_types(dtype, torch.float32).to_complex()
        angles = self._angles(rows), self._angles(columns)
        down, right = (torch.polar(torch.ones_like(one), one).to(exact) for one in angles)
        # Autograd saves the factors, so that all rows of windows share one tensor.
        at_once = torch.is_grad_enabled() or dtype not in (torch.float32, torch.float64)
        return RotaryAngles(
            torch.cat([down, torch.ones_like(down)], -1),
            torch.cat([torch.ones_like(right), right], -1),
            self.rotary_factors(rows, columns, dtype) if at_once else None,
        )

    def rotate_heads_first(self, tensor: Tensor, factors: RotaryAngles | None) -> Tensor:
        """Rotate, and permute to (B, heads, columns, rows, head dim).

        Without gradients in two passes over memory, and no copy.
        """
        assert factors is not None
        if factors.product is not None:
            return to_heads_first(self.rotate(tensor, factors.product))
        ordered = heads_first_view(tensor)
        result = tensor.new_empty(ordered.shape)
        pairs, whole = (
            torch.view_as_complex(one.unflatten(-1, (-1, 2))) for one in (ordered, result)
        )
        torch.mul(pairs, factors.down, out=whole)
        whole.mul_(factors.right[:, None])
        return result

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each pair of channels at these positions, (..., pairs).

        In fp64: in fp32 an angle at pixel 8192 is off by 5e-4.
        """
        speeds = torch.tensor(self._frequencies, dtype=torch.float64, device=positions.device)
        return positions[..., None].double() * speeds

    @staticmethod
    def _rotate_real(pairs: Tensor, factors: Tensor) -> Tensor:
        """Rotate with real numbers, for runtimes without complex ones."""
        (first, second), (cosine, sine) = pairs.unbind(-1), factors.unbind(-1)
        return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)


def make_position(
    kind: PositionKind, heads: int, head_dim: int, max_distance: int
) -> PositionEncoding:
    """Create a relative position encoding by name.

    ``max_distance`` is the greatest distance in pixels along an axis, for the biases.

    Raises:
        UsageError: the name is unknown.
    """
    if kind == "none":
        return PositionEncoding()
    if kind == "rope":
        return Rope2d(head_dim)
    if kind == "table":
        return RelativePositionBias(heads, max_distance)
    if kind == "decomposed":
        return FactorizedRelativePositionBias(heads, max_distance)
    raise UsageError(f"position {kind!r} is not known", hint="none, table, decomposed or rope")
