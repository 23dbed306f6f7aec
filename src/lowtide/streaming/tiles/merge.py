"""Merging of tiles into rows, one strip of output at a time.

Finished rows are written at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from lowtide.core.signal import Adapter, Sink
from lowtide.streaming.tiles.grid import TileAxis

_WRITE_ROWS = 16  # convert rows in blocks, so that no second strip exists
Retry = Callable[[Callable[[], np.ndarray]], np.ndarray]


def _no_retry(call: Callable[[], np.ndarray]) -> np.ndarray:
    return call()


class StripMerger:
    """Merges one row of tiles at a time and writes settled rows to the sink.

    Without blending, the strip holds values of the sink's own type and each tile is written to its
    own place; with blending, it holds float32 sums, and the rows shared with the next strip are
    carried over. ``size`` is the true (height, width) in input pixels: padding is cut. Conversions,
    which allocate memory but have no side effects, are called through ``retry``.
    """

    def __init__(
        self,
        rows: TileAxis,
        columns: TileAxis,
        adapter: Adapter,
        sink: Sink,
        size: tuple[int, int],
        scale: int,
        retry: Retry = _no_retry,
    ) -> None:
        self._retry = retry
        self._rows, self._columns, self._adapter, self._sink = rows, columns, adapter, sink
        self._scale, self._written = scale, 0
        self._size = tuple(side * scale for side in size)
        spans = [rows.span(index) for index in range(len(rows.starts))]
        most = max(high - low for low, high in spans) * scale
        self._blended = rows.blended or columns.blended
        self._strip = np.zeros(
            (min(most, self._size[0]), self._size[1], adapter.channels),
            np.float32 if self._blended else adapter.dtype,
        )

    def add(self, row: int, column: int, tile: np.ndarray) -> None:
        """Merge one tile, float32 (H·s, W·s, C)."""
        top, bottom = self._clip(self._rows.span(row), 0)
        left, right = self._clip(self._columns.span(column), 1)
        if top >= bottom or left >= right:
            return
        y, x = self._rows.starts[row] * self._scale, self._columns.starts[column] * self._scale
        part = tile[top - y : bottom - y, left - x : right - x]
        base = self._rows.span(row)[0] * self._scale
        target = self._strip[top - base : bottom - base, left:right]
        if not self._blended:
            for start in range(0, len(part), _WRITE_ROWS):
                block = slice(start, start + _WRITE_ROWS)
                target[block] = self._retry(partial(self._adapter.to_sink, part[block]))
            return
        down = self._rows.weights(row, self._scale)[: bottom - top, None]
        across = self._columns.weights(column, self._scale)[None, : right - left]
        weights = (down * across)[..., None]
        target += self._retry(lambda: part * weights)

    def finish_row(self, row: int) -> int:
        """Write the rows that no later tile changes, and return their number."""
        first = self._rows.span(row)[0] * self._scale
        last = min(self._rows.final_end(row) * self._scale, self._size[0])
        count = max(0, last - first)
        if self._blended:
            for start in range(0, count, _WRITE_ROWS):
                rows = self._strip[start : min(start + _WRITE_ROWS, count)]
                self._write(self._retry(partial(self._adapter.to_sink, rows)))
            self._carry_over(count, self._rows.span(row)[1] * self._scale - last)
        elif count:
            self._write(self._strip[:count])
        return count

    def _write(self, rows: np.ndarray) -> None:
        self._sink.write(self._written, rows)
        self._written += len(rows)

    def _carry_over(self, written_rows: int, shared_rows: int) -> None:
        """Move the sums shared with the next strip to its top, and clear the rest."""
        if shared_rows > 0:
            self._strip[:shared_rows] = self._strip[written_rows : written_rows + shared_rows]
        self._strip[max(shared_rows, 0) :] = 0

    def _clip(self, span: tuple[int, int], axis: int) -> tuple[int, int]:
        return span[0] * self._scale, min(span[1] * self._scale, self._size[axis])
