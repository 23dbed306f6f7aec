"""Voxels of a NIfTI file, read and written slice by slice, and its gradient tables.

The result begins with the input's own bytes up to the voxels: header and extensions are the same.
Tables of diffusion MRI are the files .bval and .bvec next to it.
"""

from __future__ import annotations

import contextlib
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from lowtide.core.atomic_file import (
    atomic_output,
    new_part_name,
    prepare_part_file,
    put_in_place,
    require_output,
    sync_to_disk,
    write_error,
)
from lowtide.core.errors import InputError, OutputError, UsageError
from lowtide.core.signal import ClosedOnExit
from lowtide.media.volume_header import READ_ERRORS, VOLUME_SUFFIXES, VolumeFacts, open_bytes

_SKIPPED_BYTES = 1 << 20
_VALUES, _VECTORS = (".bval", ".bvals"), (".bvec", ".bvecs")
_HINT = "put the tables of this file next to it, or move these away"


class VolumeSource(ClosedOnExit):
    """Slices of a NIfTI file as a `lowtide.core.signal.RowSource`; also a context manager.

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


class VolumeSink:
    """NIfTI file as a `lowtide.core.signal.RowSink` of slices, compressed if its name ends in .gz.

    Until `commit` the target is untouched: bytes go to the new, hidden file ``part`` next to it.
    Then ``gradients`` are copied next to it. A file that is at ``path`` in the end is replaced only
    with ``replace``.

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
        *,
        replace: bool = True,
    ) -> None:
        self._replace = replace
        self._path, self._facts, self._part = path, facts, part or new_part_name(path)
        self._gradients, self.info = gradients or GradientFiles(), facts.slice_info
        self._folders = prepare_part_file(path, self._part)
        self._next, self._done, self._committed = 0, False, False
        self._raw = self._part.open("wb")
        self._file: BinaryIO = self._raw
        try:
            if path.name.lower().endswith(".gz"):
                # Neither name nor time, so that equal voxels make equal files.
                packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._raw, mtime=0)
                self._file = cast(BinaryIO, packed)
            with open_bytes(facts.path) as source:
                self._put(source.read(facts.head_bytes))
        except BaseException:  # a stop, too
            self.abort()
            raise

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
            sync_to_disk(self._part)
        except OSError as error:
            self.abort()
            raise write_error(self._path, error) from error
        self._done = True

    def commit(self) -> Path:
        """Finish the file, rename it to its target with its tables, and return the target."""
        self.finish()
        try:
            self._gradients.copy(self._path, replace=self._replace)
            put_in_place(self._part, self._path, replace=self._replace)
            sync_to_disk(self._path.parent)
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


@dataclass(frozen=True)
class GradientFiles:
    """Files of b-values and of their directions next to a volume, and notes about them."""

    paths: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def copies(self, target: Path) -> list[tuple[Path, Path]]:
        """Return each file with its place next to the volume ``target``."""
        name = _stem(target)
        return [(path, target.with_name(name + path.suffix)) for path in self.paths]

    def require_free(self, target: Path) -> None:
        """Raise `UsageError` where another table has the place of one next to a new ``target``."""
        for path, place in self.copies(target):
            require_output(place, force=True, makes_folder=True)
            if not target.exists() and not _is_free(place, path):
                raise UsageError(
                    f"{place} already exists, and is another table than {path}",
                    hint="move it away, or choose another name or folder for the result",
                )

    def copy(self, target: Path, *, replace: bool = True) -> None:
        """Copy them, byte by byte, next to the volume ``target``.

        Raises `OutputError` where that fails, and leaves no new one then.
        """
        new: list[Path] = []
        try:
            for path, place in self.copies(target):
                there = place.exists()
                if there and place.read_bytes() == path.read_bytes():
                    continue
                with atomic_output(place, replace=replace) as part:
                    part.write_bytes(path.read_bytes())
                new += [] if there else [place]
        except OutputError:
            for place in new:
                place.unlink(missing_ok=True)
            raise


def _is_free(place: Path, path: Path) -> bool:
    """Return whether nothing is at ``place``, or a copy of ``path``."""
    return not place.exists() or place.read_bytes() == path.read_bytes()


def find_gradients(volume: Path, count: int) -> GradientFiles:
    """Find and check the gradient tables next to a volume of ``count`` volumes.

    Raises:
        InputError: One is no table of numbers, or is for another number of volumes.
    """
    values, vectors = _find(volume, _VALUES), _find(volume, _VECTORS)
    notes = []
    if values is not None:
        table = _read(values)
        if min(table.shape) != 1 or table.size != count:
            raise _mismatch(values, f"{table.size:,} b-values", volume, count)
        if not (np.isfinite(table) & (table >= 0)).all():
            raise InputError(f"{values}: b-values have to be finite and at least 0", hint=_HINT)
    if vectors is not None:
        table = _read(vectors)
        if table.shape not in ((3, count), (count, 3)):
            rows, columns = table.shape
            raise _mismatch(vectors, f"{rows:,} × {columns:,} numbers", volume, count)
        if count <= 3:
            notes.append(_direction_note(vectors, table, count))
    if (values is None) != (vectors is None):
        found, missing = (vectors, "b-values") if values is None else (values, "directions")
        assert found is not None
        notes.append(f"{found.name} is copied; there are no {missing} next to it")
    paths = tuple(path for path in (values, vectors) if path is not None)
    return GradientFiles(paths, tuple(notes))


def _direction_note(path: Path, table: np.ndarray, count: int) -> str:
    """Return which way a small table reads: one of three volumes may be read either way."""
    if count == 3:
        lengths = [np.linalg.norm(np.nan_to_num(table), axis=axis) for axis in (0, 1)]
        fits = [bool(np.all((abs(one - 1) < 0.05) | (one < 0.05))) for one in lengths]
        if fits[0] == fits[1]:
            return f"{path.name}: rows and columns may both be directions; it is copied as it is"
        way = "columns" if fits[0] else "rows"
    else:
        way = "columns" if table.shape[0] == 3 else "rows"
    return f"{path.name}: directions are its {way}; it is copied as it is"


def _mismatch(table: Path, found: str, volume: Path, count: int) -> InputError:
    shown = "1 volume" if count == 1 else f"{count:,} volumes"
    return InputError(f"{table}: {found}, and {volume} has {shown}", hint=_HINT)


def _find(volume: Path, suffixes: tuple[str, ...]) -> Path | None:
    for suffix in suffixes:
        path = volume.with_name(_stem(volume) + suffix)
        if path.is_file():
            return path
    return None


def _stem(path: Path) -> str:
    ending = next((one for one in VOLUME_SUFFIXES if path.name.lower().endswith(one)), "")
    return path.name[: len(path.name) - len(ending)]


def _read(path: Path) -> np.ndarray:
    """Read rows of numbers, with commas or white space between them.

    NaN may stand for the direction of a volume without one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").replace(",", " ")
        rows = [[float(one) for one in line.split()] for line in text.splitlines() if line.split()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no table of numbers: {error}", hint=_HINT) from error
    if len({len(row) for row in rows}) != 1:
        lengths = " ".join(str(len(row)) for row in rows[:4]) or "none"
        raise InputError(
            f"{path}: no table of numbers in rows of one length (numbers a row: {lengths})",
            hint=_HINT,
        )
    return np.array(rows)
