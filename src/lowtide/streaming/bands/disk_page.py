"""Maps that are kept on disk between segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowtide.core.scratch import ScratchFile
from lowtide.streaming.bands.rowwise import Rowwise
from lowtide.streaming.bands.spans import Spans


class DiskPage:
    """A map in a file without a name, row after row, so that any rows lie together.

    The file is gone when the process is, however that ends. Raises `OutputError` when the disk
    is full; what was written is given back then.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, device: torch.device,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.device, self._form = device, Rowwise(shape, dtype, dim)
        self._folder = folder
        self._open()

    def _open(self) -> None:
        self._file = ScratchFile(self._folder)

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        self._put(self._form.place((first, first))[0], self._form.run(rows).cpu())

    def _put(self, at: int, run: Tensor) -> None:
        self._file.put(at, run.numpy().data)

    def read(self, spans: Spans) -> Tensor:
        """Rows, in memory of their own."""
        buffer, at = torch.empty(self._form.bytes_of(spans), dtype=torch.uint8), 0
        for span in spans:
            first, last = self._form.place(span)
            self._get(first, buffer[at : at + last - first])
            at += last - first
        return self._form.rows(buffer.to(self.device))

    def _get(self, at: int, buffer: Tensor) -> None:
        self._file.get(at, buffer.numpy().data)

    def expect(self, spans: Spans) -> None:
        """Nothing is read ahead: the system does that."""

    def keep(self, spans: Spans) -> None:
        """The file goes as a whole, when the page does."""

    def close(self) -> None:
        """Give the space back now."""
        self._file.close()
