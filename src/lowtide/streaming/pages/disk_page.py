"""Pages that are spilled to disk between segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowtide.core.scratch import BLOCK, ScratchSpace
from lowtide.streaming.pages.row_major import RowMajorLayout
from lowtide.streaming.spans import Spans


class DiskPage:
    """A feature map in blocks of an unnamed file, stored row by row.

    Row-major storage keeps the bytes of any row contiguous. The file is gone when the process ends,
    in whatever way. Raises `OutputError` when the disk is full; the blocks written so far are freed
    then.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        dim: int,
        device: torch.device,
        space: ScratchSpace,
    ) -> None:
        self.device, self._form = device, RowMajorLayout(shape, dtype, dim)
        self._places: dict[int, int] = {}  # block index in the map to block of the file
        self._open(space)

    def _open(self, space: ScratchSpace) -> None:
        self._blocks = space.blocks()

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows to the file, from row ``first`` on."""
        self._put(self._form.place((first, first))[0], self._form.run(rows).cpu())

    def _put(self, at: int, run: Tensor) -> None:
        data = run.numpy().data
        for place, start, part in _by_block(at, len(data)):
            if place not in self._places:
                self._places[place] = self._blocks.take()
            self._blocks.put(self._places[place], start, data[part])

    def read(self, spans: Spans) -> Tensor:
        """Read rows into new memory."""
        buffer, at = torch.empty(self._form.bytes_of(spans), dtype=torch.uint8), 0
        for span in spans:
            first, last = self._form.place(span)
            self._get(first, buffer[at : at + last - first])
            at += last - first
        return self._form.rows(buffer.to(self.device))

    def _get(self, at: int, buffer: Tensor) -> None:
        data = buffer.numpy().data
        for place, start, part in _by_block(at, len(data)):
            self._blocks.get(self._places[place], start, data[part])

    def expect(self, spans: Spans) -> None:
        """Do nothing: the operating system prefetches."""

    def keep(self, spans: Spans) -> None:
        """Do nothing: all blocks are freed together by `close`."""

    def close(self) -> None:
        """Free the blocks; may be called more than once."""
        self._blocks.give_back(self._places.values())
        self._places = {}


def _by_block(at: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (block, first byte in it, slice of the data) for bytes from ``at`` on."""
    done = 0
    while done < size:
        place, start = divmod(at + done, BLOCK)
        end = min(size, done + BLOCK - start)
        yield place, start, slice(done, end)
        done = end
