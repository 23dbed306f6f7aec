"""Rows of a source, read from the top down and padded by reflection at the right and the bottom."""

from __future__ import annotations

import numpy as np

from lowtide.core.errors import InputError
from lowtide.core.signal import RowSource

READ_ROWS = 16


def read_values(source: RowSource, first: int, last: int) -> np.ndarray:
    """Read from a source, no more than it has.

    Raises `InputError` where it ends before its shape does.
    """
    last = min(last, source.shape[0])
    values = source.read(first, last)
    if len(values) != last - first:
        raise InputError(f"the input ended after {first + len(values)} of {source.shape[0]} rows")
    return values


def reflect_index(position: int, length: int) -> int:
    """Return the place that padding shows at ``position`` past the end.

    Reflected up to length - 1, then the last reflected place is replicated: the rule of spandrel's
    descriptors, so that a padded stream equals their padded tensor.
    """
    if position < length:
        return position
    return max(2 * length - 2 - position, 0)


class SlidingRowWindow:
    """Window that slides down a source (H, W, C); rows above it are dropped.

    Shows the source padded at the right and the bottom to (``height``, ``width``), by reflection.
    One buffer of ``capacity`` rows is reused.
    """

    def __init__(self, source: RowSource, height: int, width: int, capacity: int) -> None:
        self._source, self._height = source, height
        self._real_height, self._real_width, channels = source.shape
        self._buffer = np.empty((capacity, width, channels), source.dtype)
        self._columns = [reflect_index(x, self._real_width) for x in range(self._real_width, width)]
        self._first = self._filled = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop`` of the padded source as a view.

        The view is valid until the next call. ``start`` may not decrease, and a row above it may
        not be requested again.
        """
        keep = max(0, self._first + self._filled - start)
        if keep and start > self._first:
            shift = start - self._first
            self._buffer[:keep] = self._buffer[shift : shift + keep]
        self._first, self._filled = start, keep
        real = min(stop, self._real_height)
        while self._first + self._filled < real:
            # Read in blocks, so that no second copy of a strip exists.
            self._append_rows(min(READ_ROWS, real - self._first - self._filled))
        for row in range(max(start + self._filled, real), stop):
            source = reflect_index(row, self._real_height) - start
            self._buffer[row - start] = self._buffer[source]
        return self._buffer[: stop - start]

    def _append_rows(self, count: int) -> None:
        first = self._first + self._filled
        rows = read_values(self._source, first, first + count)
        target = self._buffer[self._filled : self._filled + count]
        target[:, : self._real_width] = rows
        if self._columns:
            target[:, self._real_width :] = rows[:, self._columns]
        self._filled += count
