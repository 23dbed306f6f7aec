"""Bytes on disk for the length of a run."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from lowtide.core.errors import OutputError
from lowtide.core.units import format_bytes

_HINT = "free some space, name another folder for scratch files, or allow more memory"


class ScratchFile:
    """A file without a name in ``folder``, by default the system's temporary one.

    It is gone when the process is, however that ends. Raises `OutputError` when there can be none,
    or the disk is full; what was written is given back then.
    """

    def __init__(self, folder: Path | None = None) -> None:
        try:
            # Open as long as this lives.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="lowtide-scratch-", dir=folder
            )
        except OSError as error:
            raise OutputError(
                f"nothing can be kept in {folder or 'the scratch folder'}: {error}",
                hint="name another folder for scratch files",
            ) from error

    def put(self, at: int, data: memoryview) -> None:
        """Write bytes from ``at`` on."""
        try:
            self._file.seek(at)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self._file.close()
            if error.errno != errno.ENOSPC:
                raise
            size = format_bytes(data.nbytes)
            raise OutputError(
                f"the disk is full: {size} of scratch could not be written", hint=_HINT
            ) from error

    def get(self, at: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``at`` on, which must have been written."""
        self._file.seek(at)
        size = self._file.readinto(buffer)  # type: ignore[attr-defined]
        if size != buffer.nbytes:
            raise AssertionError(f"bytes {at} to {at + buffer.nbytes} were not all written")

    def close(self) -> None:
        """Give the space back now; may be called more than once."""
        self._file.close()
