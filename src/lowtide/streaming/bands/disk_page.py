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
from lowtide.streaming.bands.spans import Spans, count


class DiskPage:
    """A map in a file without a name, row after row, so that any rows lie together.

    The file is gone when the process is, however that ends. Raises `OutputError` when the disk
    is full; what was written is given back then.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, device: torch.device,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._dim, self._dtype, self.device = dim, dtype, device
        self._others = [side for place, side in enumerate(shape) if place != dim]
        self._row_bytes = torch.Size(self._others).numel() * dtype.itemsize
        try:
            # Open as long as the page lives; closed when it goes.
            self._file = tempfile.TemporaryFile(prefix="lowtide-page-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise OutputError(f"no page can be kept in {folder or 'the scratch folder'}: {error}",
                              hint="--scratch names another folder") from error  # fmt: skip

    def write(self, first: int, rows: Tensor) -> None:
        """Put rows from ``first`` on in their place."""
        plain = rows.movedim(self._dim, 0).contiguous().cpu()
        try:
            self._file.seek(first * self._row_bytes)
            self._file.write(plain.flatten().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            self._file.close()
            if error.errno != errno.ENOSPC:
                raise
            size = format_bytes(plain.numel() * plain.itemsize)
            raise OutputError(
                f"the disk is full: {size} of a page could not be written",
                hint="free some space, name another folder for scratch files, or allow more memory",
            ) from error

    def read(self, spans: Spans) -> Tensor:
        """Rows, in memory of their own."""
        buffer = torch.empty(count(spans) * self._row_bytes, dtype=torch.uint8)
        target, at = buffer.numpy().data, 0
        for first, last in spans:
            size = (last - first) * self._row_bytes
            self._file.seek(first * self._row_bytes)
            if self._file.readinto(target[at : at + size]) != size:  # type: ignore[attr-defined]
                raise AssertionError(f"rows {first} to {last} are not all there")
            at += size
        rows = buffer.view(self._dtype).view(count(spans), *self._others)
        return rows.movedim(0, self._dim).contiguous().to(self.device)

    def keep(self, spans: Spans) -> None:
        """The file goes as a whole, when the page does."""

    def close(self) -> None:
        """Give the space back now."""
        self._file.close()
