"""Pages and windows of network input, read from a source on demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import InputError
from lowtide.core.signal import Adapter, Source
from lowtide.streaming.spans import Spans

READ_ROWS = 16


def read_values(source: Source, first: int, last: int) -> np.ndarray:
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


class SourceRows:
    """Row buffer over a source, read once from the top, reflection-padded to ``size``.

    ``size`` is that of all axes but the channels, and rows are along the first of them. They are
    read at first use and freed when no page and no writer needs them.
    """

    def __init__(self, source: Source, size: Sequence[int]) -> None:
        self._source, self._length, self._height = source, source.shape[0], size[0]
        self._padding = [
            (axis, [reflect_index(place, real) for place in range(padded)])
            for axis, (real, padded) in enumerate(zip(source.shape[:-1], size, strict=True))
            if axis and padded > real
        ]
        # The last rows, which the bottom padding reflects, stay until the end.
        self._tail = min(
            (reflect_index(y, self._length) for y in range(self._length, size[0])), default=size[0]
        )
        self._pieces: list[tuple[int, np.ndarray]] = []
        self._next_row = 0
        self._retained: dict[object, Spans] = {}

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the padded rows ``first`` to ``last``, (last - first, ..., C)."""
        while self._next_row < min(last, self._length):
            self._read_next()
        whole = [self._gather(start, stop) for start, stop in self._source_spans(first, last)]
        found = whole[0] if len(whole) == 1 else np.concatenate(whole)
        for axis, places in self._padding:
            found = found.take(places, axis)
        return found

    def retain(self, reader: object, spans: Spans) -> None:
        """Declare that ``reader`` reads only these rows from now on, and free the others."""
        self._retained[reader] = spans
        wanted = [
            *(span for spans in self._retained.values() for span in spans),
            (self._tail, self._height),
        ]
        self._pieces = [
            (first, rows)
            for first, rows in self._pieces
            if any(low < first + len(rows) and first < high for low, high in wanted)
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return sum(rows.nbytes for _, rows in self._pieces)

    def _source_spans(self, first: int, last: int) -> Spans:
        """Return the runs of source rows that padded rows ``first`` to ``last`` show."""
        real = self._length
        runs = [(first, min(last, real))] if first < real else []
        for y in range(max(first, real), last):
            shown = reflect_index(y, real)
            runs.append((shown, shown + 1))
        return runs

    def _gather(self, first: int, last: int) -> np.ndarray:
        parts = []
        for start, rows in self._pieces:
            low, high = max(first, start), min(last, start + len(rows))
            if low < high:
                parts.append(rows[low - start : high - start])
        if sum(map(len, parts)) != last - first:
            raise AssertionError(f"rows {first} to {last} of the source are not all in memory")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_next(self) -> None:
        rows = read_values(self._source, self._next_row, self._next_row + READ_ROWS)
        self._pieces.append((self._next_row, np.array(rows)))
        self._next_row += len(rows)


class SourcePage:
    """Read-only page of one network input of a source, such as color or opacity."""

    def __init__(
        self,
        source_rows: SourceRows,
        adapter: Adapter,
        index: int,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self._source_rows, self._adapter, self._index = source_rows, adapter, index
        self.device, self._memory_format = device, memory_format

    def read(self, spans: Spans) -> Tensor:
        """Return rows of the input on the network's device, (1, C, N, ...)."""
        parts = [self._source_rows.rows(*span) for span in spans]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        inputs = torch.from_numpy(self._adapter.to_network(rows[None]))
        one = inputs[self._index : self._index + 1]
        return one.to(self.device).contiguous(memory_format=self._memory_format)

    def prefetch(self, spans: Spans) -> None:
        """Do nothing: a source is read when its rows are needed, without prefetch."""

    def retain(self, spans: Spans) -> None:
        """Declare that only these rows are read from now on."""
        self._source_rows.retain(self, spans)

    def close(self) -> None:
        """Release all rows of this page."""
        self.retain([])

    def write(self, first: int, rows: Tensor) -> None:
        """Raise `AssertionError`: a source is read-only."""
        raise AssertionError("a source page is read-only")


class RowWindow:
    """Window that slides down a source (H, W, C); rows above it are dropped.

    Shows the source padded at the right and the bottom to (``height``, ``width``), by reflection.
    One buffer of ``capacity`` rows is reused.
    """

    def __init__(self, source: Source, height: int, width: int, capacity: int) -> None:
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
