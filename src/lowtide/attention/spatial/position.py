"""How local attention tells where a key lies relative to its query.

All of it depends on the distance alone, so that it means the same in every window, at every size
of image, and in every band of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Along one axis: the first key's distance from the first query, the queries, the keys.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class RotaryAngles:
    """What turns the channels of a strip's pixels, as complex numbers for each pair of a head's:
    ``down`` (rows, pairs) and ``right`` (columns, pairs), whose product it is. The two hold next to
    nothing. ``whole`` is the same as `Position.rotate` takes it, made once where that is what turns
    them."""

    down: Tensor
    right: Tensor
    whole: Tensor | None = None

    def part(self, row: int, rows: int, column: int, columns: int) -> RotaryAngles:
        """Those of some rows and columns."""
        whole = self.whole
        if whole is not None:
            whole = whole.narrow(0, row, rows).narrow(1, column, columns)
        down, right = self.down.narrow(0, row, rows), self.right.narrow(0, column, columns)
        return RotaryAngles(down, right, whole)


class Position(nn.Module):
    """No position at all; the others override what they need.

    ``rotates`` tells whether query and key are changed by where they stand; those whose ``alike``
    are equal change them alike.
    """

    rotates = False
    alike: Hashable = None

    def bias(self, down: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores, (windows, heads, queries, keys) in ``dtype``; None for nothing.

        ``down`` (windows down, rows of queries, rows of keys) and ``right`` (windows right,
        columns, columns) are distances in pixels from the query to the key.
        """
        return None

    def bias_between(self, down: Shape, right: Shape, like: Tensor) -> Tensor | None:
        """`bias` of one window, (1, heads, queries, keys), with pixels column by column."""
        return None

    def whole_table(self) -> Tensor | None:
        """All biases by head, distance down and distance right; None if there are none."""
        return None

    def turns(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What `rotate` needs to know of pixels at these positions, (..., rows) and
        (..., columns), whose leading dimensions are broadcast: (..., rows, columns, ...)."""
        return None

    def rotate(self, tensor: Tensor, turns: Tensor | None) -> Tensor:
        """Query or key, (..., rows, columns, heads, dim), turned by its pixels' positions."""
        return tensor

    def strip_turns(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> RotaryAngles | None:
        """What `to_heads_first` needs to know of a strip with these positions; see `turns`."""
        return None

    def by_head(self, tensor: Tensor, turns: RotaryAngles | None) -> Tensor:
        """`rotate` of (batch, rows, columns, heads, dim), laid out as (batch, heads, columns,
        rows, dim)."""
        return to_heads_first(tensor)


def to_heads_first(tensor: Tensor) -> Tensor:
    """(batch, heads, columns, rows, dim), in order, of (batch, rows, columns, heads, dim)."""
    return heads_first_view(tensor).contiguous()


def heads_first_view(tensor: Tensor) -> Tensor:
    """The same as a view."""
    return tensor.permute(0, 3, 2, 1, 4)


class TableBias(Position):
    """A learned number for each head and each distance, as in Swin (arXiv 2103.14030)."""

    def __init__(self, heads: int, farthest: int) -> None:
        super().__init__()
        side = 2 * farthest + 1
        self.table = nn.Parameter(torch.zeros(heads, side, side))
        nn.init.trunc_normal_(self.table, std=0.02)
        self._farthest = farthest

    def bias(self, down: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """The table's entries, spread out."""
        down, right = down + self._farthest, right + self._farthest
        spread = self.table[:, down[:, None, :, None, :, None], right[None, :, None, :, None, :]]
        return _of_windows(spread).to(dtype)

    def whole_table(self) -> Tensor:
        """The table as it is."""
        return self.table

    def bias_between(self, down: Shape, right: Shape, like: Tensor) -> Tensor:
        """The same without an index: for each query its keys' entries lie side by side."""
        table = self.table.to(like.dtype).mT
        by_row = _by_query(table, 2, down, self._farthest)  # (heads, rows, right, rows)
        # Both axes' queries come first, then both axes' keys.
        return _by_query(by_row, 2, right, self._farthest).flatten(3, 4).flatten(1, 2)[None]


def _by_query(table: Tensor, dim: int, shape: Shape, farthest: int) -> Tensor:
    """Distances along ``dim`` as the keys that each query sees; queries follow the heads."""
    offset, queries, keys = shape
    first = farthest + offset
    return torch.stack([table.narrow(dim, first - one, keys) for one in range(queries)], 1)


class DecomposedBias(Position):
    """A learned number for each head and distance down, plus one for the distance right.

    Of rank 2 · window where a table has (2 · window)² numbers (ViTDet, arXiv 2203.16527, whose
    terms depend on the query too; these do not).
    """

    def __init__(self, heads: int, farthest: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(heads, 2 * farthest + 1))
        self.right = nn.Parameter(torch.zeros(heads, 2 * farthest + 1))
        for table in (self.down, self.right):
            nn.init.trunc_normal_(table, std=0.02)
        self._farthest = farthest

    def bias(self, down: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Both tables' entries, added up and spread out."""
        rows = self.down[:, down + self._farthest].to(dtype)
        columns = self.right[:, right + self._farthest].to(dtype)
        spread = rows[:, :, None, :, None, :, None] + columns[:, None, :, None, :, None, :]
        return _of_windows(spread)

    def bias_between(self, down: Shape, right: Shape, like: Tensor) -> Tensor:
        """The same without an index."""
        rows, columns = (
            _by_query(table.to(like.dtype), 1, shape, self._farthest)
            for table, shape in ((self.down, down), (self.right, right))
        )
        spread = columns[:, :, None, :, None] + rows[:, None, :, None, :]
        return spread.flatten(3, 4).flatten(1, 2)[None]

    def whole_table(self) -> Tensor:
        """All sums."""
        return self.down[:, :, None] + self.right[:, None, :]


def _of_windows(spread: Tensor) -> Tensor:
    """(windows, heads, queries, keys) of (heads, down, right, rows, columns, rows, columns)."""
    return spread.movedim(0, 2).flatten(5, 6).flatten(3, 4).flatten(0, 1)
