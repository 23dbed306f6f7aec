"""Maps that are kept on disk between segments."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowtide.core.errors import OutputError
from lowtide.core.units import format_bytes
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
        try:
            # Open as long as the page lives; closed when it goes.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="lowtide-page-", dir=self._folder
            )
        except OSError as error:
            where = self._folder or "the scratch folder"
            raise OutputError(f"no page can be kept in {where}: {error}",
                              hint="name another folder for scratch files") from error  # fmt: skip

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        self._put(self._form.place((first, first))[0], self._form.run(rows).cpu())

    def _put(self, at: int, run: Tensor) -> None:
        try:
            self._file.seek(at)
            self._file.write(run.numpy().data)
            self._file.flush()
        except OSError as error:
            self._file.close()
            if error.errno != errno.ENOSPC:
                raise
            size = format_bytes(len(run))
            raise OutputError(
                f"the disk is full: {size} of a page could not be written",
                hint="free some space, name another folder for scratch files, or allow more memory",
            ) from error

    def read(self, spans: Spans) -> Tensor:
        """Rows, in memory of their own."""
        buffer, at = torch.empty(self._form.bytes_of(spans), dtype=torch.uint8), 0
        for span in spans:
            first, last = self._form.place(span)
            self._get(first, buffer[at : at + last - first])
            at += last - first
        return self._form.rows(buffer.to(self.device))

    def _get(self, at: int, buffer: Tensor) -> None:
        self._file.seek(at)
        size = self._file.readinto(buffer.numpy().data)  # type: ignore[attr-defined]
        if size != len(buffer):
            raise AssertionError(f"bytes {at} to {at + len(buffer)} of a page are not all there")

    def expect(self, spans: Spans) -> None:
        """Nothing is read ahead: the system does that."""

    def keep(self, spans: Spans) -> None:
        """The file goes as a whole, when the page does."""

    def close(self) -> None:
        """Give the space back now."""
        self._file.close()
