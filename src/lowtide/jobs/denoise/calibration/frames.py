"""Frames that noise is calibrated from: files by ISO, read as planes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lowtide.core.errors import ImageError, InputError
from lowtide.core.input_file import is_folder
from lowtide.media import inspect_image, open_image
from lowtide.media.discover import list_files

_ISO = re.compile(r"(?<![a-z])iso[ _-]?(\d{2,7})(?!\d)", re.IGNORECASE)
Groups = dict[int | None, list[Path]]


def frames_by_iso(folder: Path, iso: int | None) -> Groups:
    """Return the images of a folder by ISO: ``iso``, or what names of files or subfolders say.

    Raises:
        InputError: There is no image, or only some names tell an ISO.
    """
    if not is_folder(folder):
        raise InputError(f"{folder}: no such folder")
    groups: Groups = {}
    for path, relative in list_files(folder):
        groups.setdefault(_iso_of(relative) if iso is None else iso, []).append(path)
    if None in groups and len(groups) > 1:
        raise InputError(
            f"{groups[None][0]}: neither its name nor its folder's tells an ISO, as others do",
            hint="put frames into subfolders such as iso800, or give --iso for all",
        )
    return groups


def _iso_of(relative: Path) -> int | None:
    found = [one for part in reversed(relative.parts) for one in _ISO.findall(part)]
    return int(found[0]) if found and int(found[0]) > 0 else None


def require_equal_sizes(paths: list[Path]) -> None:
    """Raise `InputError` where frames differ in size, channels or sample type."""
    first = inspect_image(paths[0]).info
    for path in paths[1:]:
        info = inspect_image(path).info
        if info != first:
            raise InputError(
                f"{paths[0]} and {path} differ: {_shown(first.shape)} {first.sample_type} and"
                f" {_shown(info.shape)} {info.sample_type}",
                hint="use frames of one camera and one setting",
            )


def _shown(shape: tuple[int, int, int]) -> str:
    height, width, channels = shape
    return f"{width} × {height}, {channels} channels,"


def full_scale(path: Path) -> int:
    """Return the largest level of an image of whole levels.

    Raises `ImageError` for one of floats, whose levels are unknown.
    """
    info = inspect_image(path).info
    if info.sample_type == "float32":
        raise ImageError(
            f"{path}: floats have no levels to count in",
            hint="use 16-bit TIFF or PNG, or --pairs or --images",
        )
    return info.full_scale


def read_planes(path: Path) -> np.ndarray:
    """Read an image as float32 planes (C, H, W) of its own levels, without alpha."""
    with open_image(path) as source:
        rows = source.read(0, source.info.height)
        color = rows[..., : source.info.color_channels]
    planes = color.transpose(2, 0, 1).astype(np.float32)
    if not np.isfinite(planes).all():
        raise ImageError(f"{path}: has values that are not finite")
    return planes


def read_unit_planes(path: Path) -> np.ndarray:
    """Read an image as float32 planes (C, H, W) in 0..1."""
    return read_planes(path) / np.float32(inspect_image(path).info.full_scale)


def matching_pairs(folder: Path, iso: int | None) -> dict[int | None, list[tuple[Path, Path]]]:
    """Return pairs of ``folder/noisy`` and ``folder/clean`` with the same name, by ISO.

    Raises:
        InputError: A folder is missing, or an image has no partner.
    """
    noisy, clean = folder / "noisy", folder / "clean"
    for one in (folder, noisy, clean):
        if not is_folder(one):
            raise InputError(
                f"{one}: no such folder",
                hint="--pairs DIR takes DIR/noisy and DIR/clean with files of the same names",
            )
    names = {relative.with_suffix(""): path for path, relative in list_files(clean)}
    pairs: dict[int | None, list[tuple[Path, Path]]] = {}
    for key, path in _flat(frames_by_iso(noisy, iso)):
        name = path.relative_to(noisy).with_suffix("")
        if name not in names:
            raise InputError(f"{path}: has no clean image {clean / name}")
        pairs.setdefault(key, []).append((path, names.pop(name)))
    if names:
        left = next(iter(names.values()))
        raise InputError(f"{left}: has no noisy image in {noisy}")
    return pairs


def _flat(groups: Groups) -> Iterator[tuple[int | None, Path]]:
    for iso, paths in groups.items():
        for path in paths:
            yield iso, path
