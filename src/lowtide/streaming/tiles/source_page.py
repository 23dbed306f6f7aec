"""Page of network input read from an image file on demand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowtide.core.signal import RowSource
from lowtide.streaming.spans import Spans
from lowtide.streaming.tiles.grid import reflect_index
from lowtide.streaming.tiles.row_window import read_rows
from lowtide.streaming.tiles.tile_step import TileStep

READ_ROWS = 16


class SourceRows:
    """Row buffer over an image file, read once from the top, reflection-padded.

    Rows are padded to (``height``, ``width``). They are read at first use and freed when no page
    and no writer needs them.
    """

    def __init__(self, source: RowSource, height: int, width: int) -> None:
        info = source.info
        self._source, self._info = source, info
        self._height = height
        self._columns = [reflect_index(x, info.width) for x in range(width)]
        self._padded = width > info.width
        # The last rows, which the bottom padding reflects, stay until the end.
        self._tail = min(
            (reflect_index(y, info.height) for y in range(info.height, height)), default=height
        )
        self._pieces: list[tuple[int, np.ndarray]] = []
        self._next_row = 0
        self._retained: dict[object, Spans] = {}

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the samples of padded rows ``first`` to ``last`` as (last - first, W, C)."""
        while self._next_row < min(last, self._info.height):
            self._read_next()
        whole = [self._gather(start, stop) for start, stop in self._file_spans(first, last)]
        found = whole[0] if len(whole) == 1 else np.concatenate(whole)
        return found[:, self._columns] if self._padded else found

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

    def _file_spans(self, first: int, last: int) -> Spans:
        """Return the runs of file rows that padded rows ``first`` to ``last`` show."""
        real = self._info.height
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
            raise AssertionError(f"rows {first} to {last} of the file are not all in memory")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_next(self) -> None:
        rows = read_rows(self._source, self._next_row, READ_ROWS)
        self._pieces.append((self._next_row, np.array(rows)))
        self._next_row += len(rows)


class SourcePage:
    """Read-only page of one network input of a file: its color or its opacity."""

    def __init__(self, samples: SourceRows, step: TileStep, image_index: int, height: int) -> None:
        self._samples, self._step, self._image_index = samples, step, image_index
        self.device = torch.device(step.network.device)
        self.retain([(0, height)])

    def read(self, spans: Spans) -> Tensor:
        """Return rows of the image on the network's device: (1, C, H, W), in 0..1."""
        parts = [self._samples.rows(*span) for span in spans]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        network = self._step.network
        images = self._step.to_network([rows])
        one = images[self._image_index : self._image_index + 1]
        return one.to(network.device).contiguous(memory_format=network.memory_format)

    def prefetch(self, spans: Spans) -> None:
        """Do nothing: a file is read when its rows are needed, without prefetch."""

    def retain(self, spans: Spans) -> None:
        """Declare that only these rows are read from now on."""
        self._samples.retain(self, spans)

    def close(self) -> None:
        """Release all rows of this page."""
        self.retain([])

    def write(self, first: int, rows: Tensor) -> None:
        """Raise `AssertionError`: a source is read-only."""
        raise AssertionError("a source page is read-only")
