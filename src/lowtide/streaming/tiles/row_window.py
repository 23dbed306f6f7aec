"""Sliding window of a source's rows, padded to the model's size."""

from __future__ import annotations

import numpy as np

from lowtide.core.errors import ImageError
from lowtide.core.signal import RowSource
from lowtide.streaming.tiles.grid import reflect_index

_READ_ROWS = 16  # decode in blocks, so that no second copy of a strip exists


def read_rows(source: RowSource, rows_read: int, count: int) -> np.ndarray:
    """Read the next ``count`` rows, or what is left after ``rows_read`` rows.

    Raises `ImageError` where a file ends before its image does.
    """
    height = source.info.height
    rows = source.read(min(count, height - rows_read))
    if not len(rows):
        raise ImageError(f"the image ended after {rows_read} of {height} rows")
    return rows


class RowWindow:
    """Window that slides down a source; rows above it are dropped.

    Shows the image padded at the right and the bottom to (``height``, ``width``), by reflection.
    One buffer of ``capacity`` rows is reused.
    """

    def __init__(self, source: RowSource, height: int, width: int, capacity: int) -> None:
        info = source.info
        self._source, self._info, self._height = source, info, height
        self._buffer = np.empty((capacity, width, info.channels), info.sample_type)
        self._columns = [reflect_index(x, info.width) for x in range(info.width, width)]
        self._first = self._filled = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop`` of the padded image as a view.

        The view is valid until the next call. ``start`` may not decrease, and a row above it may
        not be requested again.
        """
        keep = max(0, self._first + self._filled - start)
        if keep and start > self._first:
            shift = start - self._first
            self._buffer[:keep] = self._buffer[shift : shift + keep]
        if not keep:
            self._skip(start - self._first - self._filled)
        self._first, self._filled = start, keep
        real = min(stop, self._info.height)
        while self._first + self._filled < real:
            self._append_rows(min(_READ_ROWS, real - self._first - self._filled))
        for row in range(max(start + self._filled, real), stop):
            source = reflect_index(row, self._info.height) - start
            self._buffer[row - start] = self._buffer[source]
        return self._buffer[: stop - start]

    def _append_rows(self, count: int) -> None:
        rows = read_rows(self._source, self._first + self._filled, count)
        target = self._buffer[self._filled : self._filled + len(rows)]
        target[:, : self._info.width] = rows
        if self._columns:
            target[:, self._info.width :] = rows[:, self._columns]
        self._filled += len(rows)

    def _skip(self, count: int) -> None:
        while count > 0:
            count -= len(self._source.read(min(_READ_ROWS, count)))
