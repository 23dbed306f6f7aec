"""The rows of a file as what a network gets, held as long as something needs them."""

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
    """A source read once from the top down, padded to (``height``, ``width``) by reflection.

    Rows are read when they are first asked for, and forgotten when every page and the result are
    done with them.
    """

    def __init__(self, source: RowSource, height: int, width: int) -> None:
        info = source.info
        self._source, self._info = source, info
        self._height = height
        self._columns = [reflect_index(x, info.width) for x in range(width)]
        self._padded = width > info.width
        # What padding shows of the end stays to the end.
        self._tail = min(
            (reflect_index(y, info.height) for y in range(info.height, height)), default=height
        )
        self._pieces: list[tuple[int, np.ndarray]] = []
        self._read = 0
        self._kept: dict[object, Spans] = {}

    def rows(self, first: int, last: int) -> np.ndarray:
        """Samples (last - first, width, bands)."""
        while self._read < min(last, self._info.height):
            self._take()
        whole = [self._one(start, stop) for start, stop in self._real(first, last)]
        found = whole[0] if len(whole) == 1 else np.concatenate(whole)
        return found[:, self._columns] if self._padded else found

    def keep(self, reader: object, spans: Spans) -> None:
        """``reader`` wants only these rows from now on."""
        self._kept[reader] = spans
        wanted = [
            *(span for spans in self._kept.values() for span in spans),
            (self._tail, self._height),
        ]
        self._pieces = [
            (first, rows)
            for first, rows in self._pieces
            if any(low < first + len(rows) and first < high for low, high in wanted)
        ]

    @property
    def held_bytes(self) -> int:
        """What the rows held occupy."""
        return sum(rows.nbytes for _, rows in self._pieces)

    def _real(self, first: int, last: int) -> Spans:
        """The file's rows that the padded image shows, in runs."""
        real = self._info.height
        runs = [(first, min(last, real))] if first < real else []
        for y in range(max(first, real), last):
            shown = reflect_index(y, real)
            runs.append((shown, shown + 1))
        return runs

    def _one(self, first: int, last: int) -> np.ndarray:
        parts = []
        for start, rows in self._pieces:
            low, high = max(first, start), min(last, start + len(rows))
            if low < high:
                parts.append(rows[low - start : high - start])
        if sum(map(len, parts)) != last - first:
            raise AssertionError(f"rows {first} to {last} of the file are not all there")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _take(self) -> None:
        rows = read_rows(self._source, self._read, READ_ROWS)
        self._pieces.append((self._read, np.array(rows)))
        self._read += len(rows)


class SourcePage:
    """One of the images that a network gets of a file (its color, or its opacity), as a page."""

    def __init__(self, samples: SourceRows, step: TileStep, image: int, height: int) -> None:
        self._samples, self._step, self._image = samples, step, image
        self.device = torch.device(step.network.device)
        self.keep([(0, height)])

    def read(self, spans: Spans) -> Tensor:
        """Rows (1, channels, rows, width) in 0..1."""
        parts = [self._samples.rows(*span) for span in spans]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        network = self._step.network
        images = self._step.to_network([rows])
        one = images[self._image : self._image + 1]
        return one.to(network.device).contiguous(memory_format=network.memory_format)

    def expect(self, spans: Spans) -> None:
        """A file is read when its rows are wanted."""

    def keep(self, spans: Spans) -> None:
        """Only these rows will be read from now on."""
        self._samples.keep(self, spans)

    def close(self) -> None:
        """No row will be read."""
        self.keep([])

    def write(self, first: int, rows: Tensor) -> None:
        """A file's rows are not written to."""
        raise AssertionError("a source is only read")
