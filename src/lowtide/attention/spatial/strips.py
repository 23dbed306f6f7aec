"""Local attention one row of windows at a time: what is held grows with the width alone.

Windows at the image's border are narrower instead of masked, so that no kernel needs a mask, and
equal windows of a row run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.spatial.position import Position
from lowtide.attention.spatial.windows import Run, Window, Windows, along, fading, mirrored, runs

# (query, key, value) of the image's rows from first to last: (batch, rows, width, heads, dim).
Load = Callable[[int, int], tuple[Tensor, Tensor, Tensor]]
# Attention of (batch, heads, tokens, dim) with a bias or None.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class LocalAttention:
    """Attention in windows over an image of ``height`` × ``width``."""

    def __init__(
        self, windows: Windows, height: int, width: int, position: Position, attend: Attend
    ) -> None:
        down, right = windows.phase
        self._windows, self._position, self._attend = windows, position, attend
        self._height, self._width = height, width
        self._rows = along(windows, height, down)
        self._row_shares = fading(windows, self._rows, height)
        columns = along(windows, width, right)
        self._runs = runs(columns)
        self._pad = max(0, -columns[0].first_key), max(0, _end(columns[-1]) - width)
        self._merge = _sources(columns, fading(windows, columns, width), width)
        self._biases: dict[tuple[int, ...], Tensor | None] = {}

    def needed(self, first: int, last: int) -> tuple[int, int]:
        """Rows of the image that the result's rows from ``first`` to ``last`` depend on."""
        spans = [
            self._span(self._rows[place]) for place in self._places(first, last)
        ]  # fmt: skip
        return min(low for low, _ in spans), max(high for _, high in spans)

    def run(
        self, load: Load, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """(first row, (batch, rows, width, heads, dim)) of the result, from the top down."""
        last = self._height if last is None else last
        pending: list[tuple[int, Tensor]] = []
        done = first
        for place in self._places(first, last):
            pending.append((place, self._strip(load, self._rows[place])))
            following = self._rows[place + 1 :]
            ready = min(last, following[0].first_query if following else last)
            if ready > done:
                yield done, self._merged(pending, done, ready)
                done = ready
            pending = [one for one in pending if _last_query(self._rows[one[0]]) > done]

    def _places(self, first: int, last: int) -> list[int]:
        """Rows of windows that compute any of these rows."""
        return [
            place for place, one in enumerate(self._rows)
            if one.first_query < last and _last_query(one) > first
        ]  # fmt: skip

    def _span(self, row: Window) -> tuple[int, int]:
        """Rows of the image that a row of windows reads."""
        seen = [row.first_query, _last_query(row) - 1]
        if self._windows.boundary == "reflect":
            seen += [mirrored(at, self._height) for at in range(row.first_key, _end(row))]
        else:
            seen += [max(row.first_key, 0), min(_end(row), self._height) - 1]
        return min(seen), max(seen) + 1

    def _strip(self, load: Load, row: Window) -> Tensor:
        """A row of windows: (batch, queries, width, heads, dim)."""
        low, high = self._span(row)
        query, key, value = load(low, high)
        query = query.narrow(1, row.first_query - low, row.queries)
        key, value = (self._with_border(tensor, row, low) for tensor in (key, value))
        turns = self._position.turns(
            _positions(row.first_key, row.keys, key), _positions(-self._pad[0], key.shape[2], key),
            key.dtype,
        )  # fmt: skip
        key = self._position.rotate(key, turns)
        if turns is not None:  # queries lie within the keys
            turns = turns.narrow(0, row.first_query - row.first_key, row.queries)
            turns = turns.narrow(1, self._pad[0], self._width)
        query = self._position.rotate(query, turns)
        parts = [self._run(query, key, value, row, run) for run in self._runs]
        return self._merged_columns(torch.cat(parts, 2) if len(parts) > 1 else parts[0])

    def _with_border(self, tensor: Tensor, row: Window, low: int) -> Tensor:
        """The keys' rows of key or value, with what the boundary rule puts beyond the image."""
        if self._windows.boundary == "zero":
            above, below = max(0, -row.first_key), max(0, _end(row) - self._height)
            tensor = tensor.narrow(1, row.first_key + above - low, row.keys - above - below)
            pad = *self._pad, above, below
            return F.pad(tensor, (0, 0, 0, 0, *pad)) if any(pad) else tensor
        if self._windows.boundary != "reflect":
            return tensor.narrow(1, row.first_key - low, row.keys)
        for dim, first, count, start, length in (
            (1, row.first_key, row.keys, low, self._height),
            (2, -self._pad[0], self._width + sum(self._pad), 0, self._width),
        ):
            taken = [mirrored(at, length) - start for at in range(first, first + count)]
            if taken != list(range(tensor.shape[dim])):
                index = torch.tensor(taken, device=tensor.device)
                tensor = tensor.index_select(dim, index)
        return tensor

    def _run(self, query: Tensor, key: Tensor, value: Tensor, row: Window, run: Run) -> Tensor:
        """Equal windows at once: (batch, queries' rows, count · queries' columns, heads, dim)."""
        one = run.window
        query = _cut(query, one.first_query, one.queries, run)
        key, value = (
            _cut(tensor, one.first_key + self._pad[0], one.keys, run) for tensor in (key, value)
        )
        found = self._attend(query, key, value, self._bias(row, one, query))
        found = found.transpose(1, 2)
        found = found.reshape(-1, run.count, row.queries, one.queries, *found.shape[2:])
        return found.transpose(1, 2).flatten(2, 3)

    def _bias(self, row: Window, column: Window, like: Tensor) -> Tensor | None:
        """The position's bias for windows of this shape, made once."""
        shape = [
            (one.first_key - one.first_query, one.queries, one.keys) for one in (row, column)
        ]  # fmt: skip
        known = *shape[0], *shape[1]
        if known not in self._biases:
            down, right = (
                (_positions(offset, keys, like) - _positions(0, queries, like)[:, None])[None]
                for offset, queries, keys in shape
            )
            self._biases[known] = self._position.bias(down, right, like.dtype)
        return self._biases[known]

    def _merged_columns(self, strip: Tensor) -> Tensor:
        """The windows of a row faded into each other."""
        if self._windows.form == "halo":
            return strip
        merged = None
        for index, share in self._merge:
            part = strip.index_select(2, index.to(strip.device))
            part = part * share.to(strip)[:, None, None]
            merged = part if merged is None else merged + part
        assert merged is not None
        return merged

    def _merged(self, pending: list[tuple[int, Tensor]], first: int, last: int) -> Tensor:
        """Rows from ``first`` to ``last`` of what was computed, faded into each other."""
        parts = []
        for place, strip in pending:
            start = self._rows[place].first_query
            low, high = max(first, start), min(last, start + strip.shape[1])
            if low >= high:
                continue
            piece = strip.narrow(1, low - start, high - low)
            if self._windows.form == "blended":
                share = piece.new_tensor(self._row_shares[place][low - start : high - start])
                piece = piece * share[:, None, None, None]
            parts.append(F.pad(piece, (0, 0, 0, 0, 0, 0, low - first, last - high)))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _cut(tensor: Tensor, first: int, width: int, run: Run) -> Tensor:
    """Windows of (batch, rows, width, heads, dim) as (batch · count, heads, tokens, dim)."""
    reach = (run.count - 1) * run.apart + width
    pieces = tensor.narrow(2, first, reach).unfold(2, width, run.apart)
    pieces = pieces.permute(0, 2, 1, 5, 3, 4)  # batch, count, rows, columns, heads, dim
    return pieces.flatten(2, 3).flatten(0, 1).transpose(1, 2)


def _sources(
    columns: list[Window], shares: list[list[float]], width: int
) -> list[tuple[Tensor, Tensor]]:
    """Where each column's results stand among all windows' columns, and their shares.

    As many pairs of index and share as the most windows over one column; a share of 0 fills up.
    """
    found: list[list[tuple[int, float]]] = [[] for _ in range(width)]
    place = 0
    for one, share in zip(columns, shares, strict=True):
        for offset in range(one.queries):
            found[one.first_query + offset].append((place, share[offset]))
            place += 1
    most = max(map(len, found))
    full = [given + [(given[0][0], 0.0)] * (most - len(given)) for given in found]
    return [
        (
            torch.tensor([given[turn][0] for given in full]),
            torch.tensor([given[turn][1] for given in full], dtype=torch.float64),
        )
        for turn in range(most)
    ]


def _positions(first: int, count: int, like: Tensor) -> Tensor:
    return torch.arange(first, first + count, device=like.device)


def _last_query(one: Window) -> int:
    return one.first_query + one.queries


def _end(one: Window) -> int:
    return one.first_key + one.keys
