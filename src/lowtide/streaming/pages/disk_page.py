"""Maps that are kept on disk between segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowtide.core.scratch import BLOCK, ScratchSpace
from lowtide.streaming.pages.row_major import RowMajorLayout
from lowtide.streaming.spans import Spans


class DiskPage:
    """A map in blocks of a file without a name, row after row, so that any rows lie together.

    The file is gone when the process is, however that ends. Raises `OutputError` when the disk
    is full; what was written is given back then.
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
        self._places: dict[int, int] = {}  # by number within the map, which block of the file
        self._open(space)

    def _open(self, space: ScratchSpace) -> None:
        self._blocks = space.blocks()

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        self._put(self._form.place((first, first))[0], self._form.run(rows).cpu())

    def _put(self, at: int, run: Tensor) -> None:
        data = run.numpy().data
        for place, start, part in _by_block(at, len(data)):
            if place not in self._places:
                self._places[place] = self._blocks.take()
            self._blocks.put(self._places[place], start, data[part])

    def read(self, spans: Spans) -> Tensor:
        """Rows, in memory of their own."""
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
        """Nothing is read ahead: the system does that."""

    def keep(self, spans: Spans) -> None:
        """Blocks go all at once, when the page does."""

    def close(self) -> None:
        """Give the blocks back; may be called more than once."""
        self._blocks.give_back(self._places.values())
        self._places = {}


def _by_block(at: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """(block, first byte within it, part of the bytes) of ``size`` bytes from ``at`` on."""
    done = 0
    while done < size:
        place, start = divmod(at + done, BLOCK)
        end = min(size, done + BLOCK - start)
        yield place, start, slice(done, end)
        done = end
