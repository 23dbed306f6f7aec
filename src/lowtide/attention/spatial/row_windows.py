"""Window attention one row of windows at a time, in memory independent of H.

Windows at the image's border are narrower instead of masked, so that no kernel needs a mask, and
equal windows of a row run at once. A row of windows is stored head by head and column by column: a
head's pixels of a window are then contiguous, and overlapping windows are views without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.attention.spatial.position import PositionEncoding, RotaryAngles, Shape, to_heads_first
from lowtide.attention.spatial.window_grid import (
    AxisWindow,
    WindowGeometry,
    WindowRun,
    blend_along,
    blend_shares,
    blend_sources,
    reflect_position,
    window_runs,
    windows_along,
)

# Loads rows of the image, (B, rows, W, heads, head dim): for a row of windows its keys, its values,
# then its queries, whose rows lie within those of the keys.
Part = Literal["query", "key", "value"]
Load = Callable[[Part, int, int], Tensor]
# Attention of (B, heads, N, head dim) with a bias or None.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

# Queries per call: enough to keep a CPU or GPU busy, and few enough for the windows of several
# images, which are copied, to take little memory.
_QUERIES = 1 << 13


class RowWindowAttention:
    """Window attention over an image of ``height`` × ``width``, row by row of windows.

    ``attend`` computes the attention within a batch of windows.
    """

    def __init__(
        self,
        windows: WindowGeometry,
        height: int,
        width: int,
        position: PositionEncoding,
        attend: Attend,
    ) -> None:
        down, right = windows.phase
        self._windows, self._position, self._attend = windows, position, attend
        self._height, self._width = height, width
        self._rows = windows_along(windows, height, down)
        self._columns = columns = windows_along(windows, width, right)
        self._pad = max(0, -columns[0].first_key), max(0, _end(columns[-1]) - width)
        self._runs = window_runs(columns, max(1, _QUERIES // windows.query_size**2))
        self._biases: dict[Shape, dict[Shape, Tensor | None]] = {}
        self._angles: RotaryAngles | None = None

    def rows_needed(self, first: int, last: int) -> tuple[int, int]:
        """Return the image rows that rows ``first`` to ``last`` of the result need."""
        spans = [self._input_rows(self._rows[place]) for place in self._window_rows(first, last)]
        return min(low for low, _ in spans), max(high for _, high in spans)

    def run(
        self, load: Load, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, (B, W, rows, heads, head dim)) of the result, from the top down.

        Halo windows yield all rows that they compute, which may extend beyond ``first`` and
        ``last``.
        """
        last = self._height if last is None else last
        if self._windows.form == "halo":
            for place in self._window_rows(first, last):
                yield self._rows[place].first_query, self._attend_row(load, self._rows[place])
            return
        pending: list[tuple[int, Tensor]] = []
        done = first
        for place in self._window_rows(first, last):
            pending.append((place, self._attend_row(load, self._rows[place])))
            following = self._rows[place + 1 :]
            ready = min(last, following[0].first_query if following else last)
            if ready > done:
                yield from self._blend_rows(pending, done, ready)
                done = ready
            pending = [one for one in pending if _last_query(self._rows[one[0]]) > done]

    def _window_rows(self, first: int, last: int) -> list[int]:
        """Return the indices of window rows that compute any of these image rows."""
        return [
            place
            for place, one in enumerate(self._rows)
            if one.first_query < last and _last_query(one) > first
        ]

    def _input_rows(self, row: AxisWindow) -> tuple[int, int]:
        """Return the image rows that a row of windows reads."""
        seen = [row.first_query, _last_query(row) - 1]
        if self._windows.boundary == "reflect":
            seen += [reflect_position(at, self._height) for at in range(row.first_key, _end(row))]
        else:
            seen += [max(row.first_key, 0), min(_end(row), self._height) - 1]
        return min(seen), max(seen) + 1

    def _attend_row(self, load: Load, row: AxisWindow) -> Tensor:
        """Compute a row of windows: (B, W, queries, heads, head dim)."""
        # Permute each before the next one is loaded, so that fewer are held at once.
        key = self._load_padded(load, "key", row)
        turns = self._row_angles(row, key)
        key = self._position.rotate_heads_first(key, turns)
        value = to_heads_first(self._load_padded(load, "value", row))
        if turns is not None:  # queries lie within the keys
            above = row.first_query - row.first_key
            turns = turns.narrow(above, row.queries, self._pad[0], self._width)
        query = load("query", row.first_query, _last_query(row))
        query = self._position.rotate_heads_first(query, turns)
        if torch.is_grad_enabled():
            parts = [self._run(query, key, value, row, run) for run in self._runs]
            return self._blend_runs(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        if len(self._runs) == 1 and self._windows.form == "halo":
            return self._run(query, key, value, row, self._runs[0])
        # Memory is row by row, as the image's, so that later operators need no copy.
        make = query.new_empty if self._windows.form == "halo" else query.new_zeros
        batch, heads, width, rows, dim = query.shape
        strip = make(batch, rows, width, heads, dim).transpose(1, 2)
        for place, run in enumerate(self._runs):
            self._accumulate(strip, self._run(query, key, value, row, run), place)
        return strip

    def _row_angles(self, row: AxisWindow, key: Tensor) -> RotaryAngles | None:
        """Return the rotary factors of a row's keys, cached for all rows of windows.

        Only distances count, so that positions start at 0 at the first row of keys.
        """
        if self._angles is None and self._position.rotates:
            most = max(one.keys for one in self._rows)
            columns = torch.arange(-self._pad[0], key.shape[2] - self._pad[0], device=key.device)
            rows = torch.arange(most, device=key.device)
            self._angles = self._position.separable_factors(rows, columns, key.dtype)
        return None if self._angles is None else self._angles.narrow(0, row.keys, 0, key.shape[2])

    def _load_padded(self, load: Load, part: Part, row: AxisWindow) -> Tensor:
        """Load keys or values of a row of windows, padded by the boundary mode."""
        above, below = max(0, -row.first_key), max(0, _end(row) - self._height)
        if self._windows.boundary != "reflect":
            tensor = load(part, row.first_key + above, _end(row) - below)
            pad = *self._pad, above, below
            return F.pad(tensor, (0, 0, 0, 0, *pad)) if any(pad) else tensor
        low, high = self._input_rows(row)
        tensor = load(part, low, high)
        for dim, first, count, start, length in (
            (1, row.first_key, row.keys, low, self._height),
            (2, -self._pad[0], self._width + sum(self._pad), 0, self._width),
        ):
            taken = [reflect_position(at, length) - start for at in range(first, first + count)]
            if taken != list(range(tensor.shape[dim])):
                index = torch.tensor(taken, device=tensor.device)
                tensor = tensor.index_select(dim, index)
        return tensor

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, row: AxisWindow, run: WindowRun
    ) -> Tensor:
        """Attend within equal windows at once.

        Returns (B, count · columns of queries, rows of queries, heads, head dim).
        """
        one = run.window
        query = _extract_windows(query, one.first_query, one.queries, run)
        key, value = (
            _extract_windows(tensor, one.first_key + self._pad[0], one.keys, run)
            for tensor in (key, value)
        )
        found = self._attend(query, key, value, self._bias(row, one, query))
        found = found.transpose(1, 2)
        return found.reshape(-1, run.count * one.queries, row.queries, *found.shape[2:])

    def _bias(self, row: AxisWindow, column: AxisWindow, like: Tensor) -> Tensor | None:
        """Return the position bias of windows of this shape, cached."""
        across, along_it = _shape(row), _shape(column)
        if across not in self._biases:
            self._biases = {across: {}}  # drop biases of earlier rows' shapes
        known = self._biases[across]
        if along_it not in known:
            known[along_it] = self._position.window_bias(across, along_it, like)
        return known[along_it]

    def _accumulate(self, strip: Tensor, found: Tensor, place: int) -> None:
        """Accumulate a run's results into their columns, in place."""
        run = self._runs[place]
        first, columns = run.window.first_query, run.window.queries
        if self._windows.form == "halo":
            strip.narrow(1, first, found.shape[1]).copy_(found)
            return
        found = found.unflatten(1, (run.count, columns))
        shares = self._run_shares[place].to(found)[:, :, None, None, None]
        # Every other window has no columns in common, so that they are added at once.
        for turn in range(min(2, run.count)):
            some = found[:, turn::2]
            start = first + turn * run.stride
            reach = (some.shape[1] - 1) * 2 * run.stride + columns
            where = strip.narrow(1, start, reach).unfold(1, columns, 2 * run.stride)
            where.movedim(-1, 2).addcmul_(some, shares[turn::2])

    # Only for blended windows, and so computed lazily.

    @cached_property
    def _row_shares(self) -> list[list[float]]:
        return blend_shares(self._windows, self._rows, self._height)

    @cached_property
    def _shares(self) -> list[list[float]]:
        return blend_shares(self._windows, self._columns, self._width)

    @cached_property
    def _run_shares(self) -> list[Tensor]:
        given = iter(self._shares)
        return [
            torch.tensor([next(given) for _ in range(run.count)], dtype=torch.float64)
            for run in self._runs
        ]

    @cached_property
    def _sources(self) -> list[tuple[Tensor, Tensor]]:
        """Blending indices and weights, only needed for gradients."""
        return blend_sources(self._columns, self._shares, self._width)

    def _blend_runs(self, strip: Tensor) -> Tensor:
        """Blend all runs as `_accumulate` does, differentiably."""
        return strip if self._windows.form == "halo" else blend_along(strip, 1, self._sources)

    def _blend_rows(
        self, pending: list[tuple[int, Tensor]], first: int, last: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield result rows ``first`` to ``last``, blended from pending rows of windows.

        In pieces that all come from the same rows of windows, so that most need no blending.
        """
        spans = [
            (self._rows[place].first_query, _last_query(self._rows[place])) for place, _ in pending
        ]
        cuts = sorted({first, last, *(at for span in spans for at in span if first < at < last)})
        for low, high in pairwise(cuts):
            total: Tensor | None = None
            for (place, strip), (start, end) in zip(pending, spans, strict=True):
                if start <= low and high <= end:
                    shares = self._row_shares[place][low - start : high - start]
                    part = strip.narrow(2, low - start, high - low)
                    if min(shares) == 1:
                        total = part  # the only row of windows here
                        continue
                    share = part.new_tensor(shares)[:, None, None]
                    total = part * share if total is None else torch.addcmul(total, part, share)
            assert total is not None
            yield low, total


def _extract_windows(tensor: Tensor, first: int, width: int, run: WindowRun) -> Tensor:
    """Cut windows from (B, heads, W, rows, head dim) as (B · count, heads, N, head dim).

    A view without a copy for a single image.
    """
    if run.count == 1:
        return tensor.narrow(2, first, width).flatten(2, 3)
    reach = (run.count - 1) * run.stride + width
    pieces = tensor.narrow(2, first, reach).unfold(2, width, run.stride).movedim((2, -1), (1, 3))
    return pieces.flatten(3, 4).flatten(0, 1)


def _shape(one: AxisWindow) -> Shape:
    return one.first_key - one.first_query, one.queries, one.keys


def _last_query(one: AxisWindow) -> int:
    return one.first_query + one.queries


def _end(one: AxisWindow) -> int:
    return one.first_key + one.keys
