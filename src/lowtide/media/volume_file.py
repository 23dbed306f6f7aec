"""Voxels of a NIfTI file, read and written slice by slice.

The result begins with the input's own bytes up to the voxels: header and extensions are the same.
"""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from lowtide.core.atomic_file import new_part_name, prepare_part_file, sync, write_error
from lowtide.core.errors import InputError, OutputError
from lowtide.media.gradient_files import GradientFiles
from lowtide.media.volume_header import READ_ERRORS, VolumeFacts, open_bytes

_SKIPPED_BYTES = 1 << 20


class VolumeSource:
    """Slices of a NIfTI file as a `lowtide.core.signal.Source`; also a context manager.

    Slices are those of all volumes, in the file's order.
    """

    def __init__(self, facts: VolumeFacts) -> None:
        self.facts = facts
        self._file: BinaryIO | None = None
        self._next = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, H, W, 1): all slices, each an image of Y rows and X columns."""
        return self.facts.slices, *self.facts.slice_shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the stored values, in the file's byte order."""
        return self.facts.dtype

    def read(self, first: int, last: int) -> np.ndarray:
        """Return stored values of the slices from ``first`` to before ``last``, (N, H, W, 1).

        Raises:
            InputError: The file is damaged or cut short.
        """
        if first < self._next:
            raise ValueError(f"slice {first} after slice {self._next} was reached")
        facts, last = self.facts, min(last, self.facts.slices)
        try:
            if self._file is None:
                self._file = open_bytes(facts.path)
                self._file.seek(facts.head_bytes)
            self._file.seek(facts.head_bytes + first * facts.slice_bytes)
            data = self._file.read((last - first) * facts.slice_bytes)
            if last == facts.slices and len(data) == (last - first) * facts.slice_bytes:
                while self._file.read(_SKIPPED_BYTES):  # up to the checksum
                    pass
        except READ_ERRORS as error:
            raise InputError(f"{facts.path}: damaged or cut short: {error}") from error
        found = first + len(data) // facts.slice_bytes
        if found < last:
            raise InputError(
                f"{facts.path}: cut short: it ends after {found:,} of {facts.slices:,} slices"
            )
        self._next = last
        return np.frombuffer(data, facts.dtype).reshape(last - first, *facts.slice_shape)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> VolumeSource:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class VolumeSink:
    """NIfTI file as a `lowtide.core.signal.Sink` of slices, compressed where its name ends in .gz.

    Until `commit` the target is untouched: bytes go to the new, hidden file ``part`` next to it.
    Then ``gradients`` are copied next to it.

    Raises:
        OutputError: The folder cannot be made or written.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        path: Path,
        facts: VolumeFacts,
        gradients: GradientFiles | None = None,
        part: Path | None = None,
    ) -> None:
        self._path, self._facts, self._part = path, facts, part or new_part_name(path)
        self._gradients, self.info = gradients or GradientFiles(), facts.slice_info
        self._folders = prepare_part_file(path, self._part)
        self._next, self._done, self._committed = 0, False, False
        self._raw = self._part.open("wb")
        self._file: BinaryIO = self._raw
        if path.name.lower().endswith(".gz"):
            # Neither name nor time, so that equal voxels make equal files.
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._raw, mtime=0)
            self._file = cast(BinaryIO, packed)
        with open_bytes(facts.path) as source:
            self._put(source.read(facts.head_bytes))

    def write(self, first: int, values: np.ndarray) -> None:
        """Append slices (N, H, W, 1) of stored values; raises `OutputError` where that fails."""
        if first != self._next or values.dtype != self._facts.dtype:
            raise ValueError(f"slice {first} of {values.dtype} where {self._next} is next")
        self._put(values.tobytes())
        self._next += len(values)

    def close_rows(self) -> None:
        """Finish the file under its temporary name."""
        self.finish()

    def finish(self) -> None:
        """Write what is buffered and sync; does nothing if already done."""
        if self._done:
            return
        if self._next != self._facts.slices:
            raise ValueError(f"{self._next} of {self._facts.slices} slices were written")
        try:
            self._close()
            sync(self._part)
        except OSError as error:
            self.abort()
            raise write_error(self._path, error) from error
        self._done = True

    def commit(self) -> Path:
        """Finish the file, rename it to its target with its tables, and return the target."""
        self.finish()
        try:
            self._gradients.copy(self._path)
            self._part.replace(self._path)
            sync(self._path.parent)
        except OSError as error:
            self.abort()
            raise write_error(self._path, error) from error
        except OutputError:
            self.abort()
            raise
        self._committed = True
        return self._path

    def abort(self) -> None:
        """Remove the part file and new folders; does nothing after `commit`."""
        if self._committed:
            return
        with contextlib.suppress(OSError):  # of what is still buffered, on a full disk
            self._close()
        self._part.unlink(missing_ok=True)
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):  # another process may have put a file there
                folder.rmdir()

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.abort()
            raise write_error(self._path, error) from error

    def _close(self) -> None:
        try:
            self._file.close()
        finally:
            self._raw.close()
