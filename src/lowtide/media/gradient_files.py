"""Gradient tables of diffusion MRI, .bval and .bvec, next to a NIfTI file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide.core.atomic_file import atomic_output
from lowtide.core.errors import InputError, OutputError, UsageError
from lowtide.media.volume_header import VOLUME_SUFFIXES

_VALUES, _VECTORS = (".bval", ".bvals"), (".bvec", ".bvecs")
_HINT = "put the tables of this file next to it, or move these away"


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
            if not target.exists() and place.exists() and place.read_bytes() != path.read_bytes():
                raise UsageError(
                    f"{place} already exists, and is another table than {path}",
                    hint="move it away, or choose another name or folder for the result",
                )

    def copy(self, target: Path) -> None:
        """Copy them, byte by byte, next to the volume ``target``.

        Raises `OutputError` where that fails, and leaves no new one then.
        """
        new: list[Path] = []
        try:
            for path, place in self.copies(target):
                there = place.exists()
                with atomic_output(place) as part:
                    part.write_bytes(path.read_bytes())
                new += [] if there else [place]
        except OutputError:
            for place in new:
                place.unlink(missing_ok=True)
            raise


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
