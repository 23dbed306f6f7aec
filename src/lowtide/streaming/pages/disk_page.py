"""Pages that are spilled to disk between segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowtide.core.scratch import BLOCK_BYTES, ScratchSpace
from lowtide.streaming.pages.page import RowMajorLayout
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
        self.device, self._layout = device, RowMajorLayout(shape, dtype, dim)
        self._block_numbers: dict[int, int] = {}  # block index in the map to block of the file
        self._open(space)

    def _open(self, space: ScratchSpace) -> None:
        self._blocks = space.blocks()

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows, such as (B, C, rows, W), to the file, from row ``first`` on."""
        self._write_bytes(
            self._layout.byte_range((first, first))[0], self._layout.to_bytes(rows).cpu()
        )

    def _write_bytes(self, at: int, raw: Tensor) -> None:
        data = raw.numpy().data
        for place, start, part in _block_ranges(at, len(data)):
            if place not in self._block_numbers:
                self._block_numbers[place] = self._blocks.allocate()
            self._blocks.write(self._block_numbers[place], start, data[part])

    def read(self, spans: Spans) -> Tensor:
        """Read rows, such as (B, C, rows, W), into new memory."""
        buffer, at = torch.empty(self._layout.bytes_of(spans), dtype=torch.uint8), 0
        for span in spans:
            first, last = self._layout.byte_range(span)
            self._read_bytes(first, buffer[at : at + last - first])
            at += last - first
        return self._layout.from_bytes(buffer.to(self.device))

    def _read_bytes(self, at: int, buffer: Tensor) -> None:
        data = buffer.numpy().data
        for place, start, part in _block_ranges(at, len(data)):
            self._blocks.read(self._block_numbers[place], start, data[part])

    def prefetch(self, spans: Spans) -> None:
        """Do nothing: the operating system prefetches."""

    def retain(self, spans: Spans) -> None:
        """Do nothing: all blocks are freed together by `close`."""

    def close(self) -> None:
        """Free the blocks; may be called more than once."""
        self._blocks.free(self._block_numbers.values())
        self._block_numbers = {}


def _block_ranges(at: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (block, first byte in it, slice of the data) for bytes from ``at`` on."""
    done = 0
    while done < size:
        place, start = divmod(at + done, BLOCK_BYTES)
        end = min(size, done + BLOCK_BYTES - start)
        yield place, start, slice(done, end)
        done = end
