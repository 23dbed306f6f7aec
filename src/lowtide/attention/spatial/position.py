"""How local attention tells where a key lies relative to its query.

All of it depends on the distance alone, so that it means the same in every window, at every size
of image, and in every band of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError

# Along one axis: the first key's distance from the first query, the queries, the keys.
Shape = tuple[int, int, int]
PositionKind = Literal["none", "table", "decomposed", "rope"]


class Position(nn.Module):
    """No position at all; the others override what they need.

    ``rotates`` tells whether query and key are changed by where they stand.
    """

    rotates = False

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

    def by_column(self, tensor: Tensor, turns: Tensor | None) -> Tensor:
        """`rotate` of (batch, rows, columns, ...), laid out as (batch, columns, rows, ...)."""
        return self.rotate(tensor, turns).transpose(1, 2).contiguous()


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
        spread = self.table[
            :, down[:, None, :, None, :, None], right[None, :, None, :, None, :]
        ]  # fmt: skip
        return _of_windows(spread).to(dtype)

    def whole_table(self) -> Tensor:
        """The table as it is."""
        return self.table

    def bias_between(self, down: Shape, right: Shape, like: Tensor) -> Tensor:
        """The same without an index: for each query its keys' entries lie side by side."""
        spread = self.table.to(like.dtype).mT
        for dim, shape in enumerate((right, down), 1):
            spread = _by_query(spread, dim, shape, self._farthest)
        return spread.flatten(3, 4).flatten(1, 2)[None]


def _by_query(table: Tensor, dim: int, shape: Shape, farthest: int) -> Tensor:
    """Distances along ``dim`` as queries there and keys at the end."""
    offset, queries, keys = shape
    # The last query's entries come first.
    first = farthest + offset - (queries - 1)
    return table.narrow(dim, first, queries + keys - 1).unfold(dim, keys, 1).flip(dim)


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
        # Its memory would follow that of the two, and fused kernels want keys side by side.
        spread = (columns[:, :, None, :, None] + rows[:, None, :, None, :]).contiguous()
        return spread.flatten(3, 4).flatten(1, 2)[None]

    def whole_table(self) -> Tensor:
        """All sums."""
        return self.down[:, :, None] + self.right[:, None, :]


def _of_windows(spread: Tensor) -> Tensor:
    """(windows, heads, queries, keys) of (heads, down, right, rows, columns, rows, columns)."""
    return spread.movedim(0, 2).flatten(5, 6).flatten(3, 4).flatten(0, 1)


class Rope2d(Position):
    """Rotary position: one half of a head's channels turns with the row, the other with the
    column (RoPE, arXiv 2104.09864; two axes as in arXiv 2403.13298).

    Scores then depend on distances without a mask, so every kernel takes it. The slowest channel
    turns by about one radian within ``period`` pixels.
    """

    rotates = True

    def __init__(self, head_dim: int, period: float = 100.0) -> None:
        super().__init__()
        if head_dim % 4:
            raise UsageError(
                f"rotary position needs heads of a multiple of 4 channels, not {head_dim}",
                hint="other heads, or position='decomposed'",
            )
        pairs = head_dim // 4
        self._speeds = [period ** -(pair / pairs) for pair in range(pairs)]

    def turns(self, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosine and sine of each pair of channels: (..., rows, columns, 1, dim / 2, 2)."""
        # In fp64: in fp32 an angle at pixel 8192 is off by 5e-4.
        speeds = torch.tensor(self._speeds, dtype=torch.float64, device=rows.device)
        down = (rows[..., None].double() * speeds)[..., :, None, :]
        right = (columns[..., None].double() * speeds)[..., None, :, :]
        down, right = (torch.stack([angle.cos(), angle.sin()], -1) for angle in (down, right))
        exact = torch.promote_types(dtype, torch.float32)
        both = torch.broadcast_tensors(down.to(exact), right.to(exact))
        return torch.cat(both, -2).unsqueeze(-3)

    def rotate(self, tensor: Tensor, turns: Tensor | None) -> Tensor:
        """The rotated tensor in its own precision; computed in fp32 at least."""
        assert turns is not None
        pairs = tensor.to(turns.dtype).unflatten(-1, (-1, 2))
        if torch.compiler.is_exporting():
            return self._turned(pairs, turns).flatten(-2).to(tensor.dtype)
        # As complex numbers it is one pass over memory.
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
        return torch.view_as_real(turned).flatten(-2).to(tensor.dtype)

    def by_column(self, tensor: Tensor, turns: Tensor | None) -> Tensor:
        """The same; in one pass over memory where no gradient is recorded."""
        assert turns is not None
        if torch.is_grad_enabled() or tensor.dtype != turns.dtype:
            return super().by_column(tensor, turns)
        batch, rows, columns, *inner = tensor.shape
        result = tensor.new_empty(batch, columns, rows, *inner)
        whole = torch.view_as_complex(result.unflatten(-1, (-1, 2)))
        pairs = torch.view_as_complex(tensor.unflatten(-1, (-1, 2))).transpose(1, 2)
        torch.mul(pairs, torch.view_as_complex(turns).transpose(0, 1), out=whole)
        return result

    @staticmethod
    def _turned(pairs: Tensor, turns: Tensor) -> Tensor:
        """The same with real numbers, for runtimes that have no others."""
        (first, second), (cosine, sine) = pairs.unbind(-1), turns.unbind(-1)
        return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)


def make_position(kind: PositionKind, heads: int, head_dim: int, farthest: int) -> Position:
    """The module for a kind of position. Raises `UsageError` for one that is not known."""
    if kind == "none":
        return Position()
    if kind == "rope":
        return Rope2d(head_dim)
    if kind == "table":
        return TableBias(heads, farthest)
    if kind == "decomposed":
        return DecomposedBias(heads, farthest)
    raise UsageError(f"position {kind!r} is not known", hint="none, table, decomposed or rope")
