"""TIFF directory (IFD) parser, for tags that libvips does not expose."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

_TYPES = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}
_COMPRESSION, _STRIP_BYTE_COUNTS, _TILE_BYTE_COUNTS = 259, 279, 325
_SUBDIRECTORIES, _EXTRA_SAMPLES = 330, 338
_UNCOMPRESSED = 1
_PHOTOMETRIC, _CIELAB, _BITS = 262, 8, 258
_RESOLUTION, _UNIT, _NO_UNIT, _EXIF = 282, 296, 1, 34_665
_TRANSPARENCY = (1, 2)  # associated (premultiplied) and unassociated alpha
_MAX_VALUES, _MAX_ENTRIES, _MAX_DIRECTORIES = 4096, 65_535, 64
_BLOCK = 1 << 18  # values read at once


class _DamagedError(Exception):
    """Truncated directory, or one beyond the file's end; decoding reports the damage."""


@dataclass(frozen=True)
class TiffDirectory:
    """Tags of one TIFF directory; values not integers or not readable are ``()``."""

    _file: BinaryIO
    _order: str
    _offset: str
    _entries: dict[int, tuple[int, int, bytes]]

    def __contains__(self, tag: int) -> bool:
        return tag in self._entries

    def values(self, tag: int) -> tuple[int, ...]:
        """Return the values of a tag, the first 4096 at most."""
        blocks = self._blocks(tag, _MAX_VALUES)
        return tuple(int(number) for number in next(blocks, ()))

    def max_value(self, tag: int) -> int | None:
        """Return the largest of all values of a tag, or None if it has none."""
        return max((int(block.max()) for block in self._blocks(tag) if len(block)), default=None)

    def _blocks(self, tag: int, max_count: int | None = None) -> Iterator[np.ndarray]:
        kind, count, inline = self._entries.get(tag, (0, 0, b""))
        if kind not in _TYPES:
            return
        dtype = np.dtype(self._order + _TYPES[kind])
        count = count if max_count is None else min(count, max_count)
        if self._entries[tag][1] * dtype.itemsize <= len(inline):
            yield np.frombuffer(inline, dtype, count)
            return
        (at,) = struct.unpack(self._order + self._offset, inline)
        try:
            for start in range(0, count, _BLOCK):
                size = min(_BLOCK, count - start) * dtype.itemsize
                yield np.frombuffer(_read(self._file, at + start * dtype.itemsize, size), dtype)
        except _DamagedError:
            return

    def value(self, tag: int, default: int) -> int:
        """Return the first value of a tag, or ``default``."""
        return next(iter(self.values(tag)), default)


def tiff_directories(file: BinaryIO) -> Iterator[TiffDirectory]:
    """Yield the directories and subdirectories of an open TIFF, first page first.

    Ends at the end of the file or at damage, and after 64 directories.
    """
    try:
        yield from _walk(file)
    except _DamagedError:
        return


def _walk(file: BinaryIO) -> Iterator[TiffDirectory]:
    head = _read(file, 0, 8)
    order = "<" if head[:2] == b"II" else ">"
    big = head[2:4] in (b"+\0", b"\0+")
    offset, count = ("Q", "Q") if big else ("L", "H")
    (first,) = struct.unpack(order + offset, _read(file, 8, 8) if big else head[4:8])
    waiting, seen = [first], {0}
    while waiting and len(seen) <= _MAX_DIRECTORIES:
        at = waiting.pop(0)
        if at in seen:
            continue
        seen.add(at)
        # tag, type, count, then the values or their offset
        layout = f"{order}HH{offset}{struct.calcsize(order + offset)}s"
        size, start = struct.calcsize(layout), at + struct.calcsize(order + count)
        (entries,) = struct.unpack(order + count, _read(file, at, start - at))
        entries = min(entries, _MAX_ENTRIES)
        rows = struct.iter_unpack(layout, _read(file, start, size * entries))
        directory = TiffDirectory(file, order, offset, {row[0]: row[1:] for row in rows})
        yield directory
        waiting += directory.values(_SUBDIRECTORIES)[:_MAX_DIRECTORIES]
        end = start + size * entries
        waiting += struct.unpack(order + offset, _read(file, end, struct.calcsize(order + offset)))


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    if at + count > os.fstat(file.fileno()).st_size:
        raise _DamagedError
    file.seek(at)
    return file.read(count)


def largest_strip_bytes(path: Path) -> int:
    """Return the bytes of the first page's largest compressed strip or tile.

    It is 0 if the page is not compressed. If the header does not say, it is the size of the file,
    which bounds it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        page = next(tiff_directories(file), None)
        if page is None:
            return size
        if page.value(_COMPRESSION, 0) == _UNCOMPRESSED:
            return 0
        largest = page.max_value(_STRIP_BYTE_COUNTS) or page.max_value(_TILE_BYTE_COUNTS)
        return min(largest or size, size)


def has_resolution_tag(path: Path) -> bool:
    """Return whether the first page says a resolution, and not the shape of pixels alone."""
    with path.open("rb") as file:
        page = next(tiff_directories(file), None)
        return page is not None and _RESOLUTION in page and page.value(_UNIT, 2) != _NO_UNIT


def is_lab_of_bytes(path: Path) -> bool:
    """Return whether the first page is CIELAB of 8 bits, which libvips does not read."""
    with path.open("rb") as file:
        page = next(tiff_directories(file), None)
        if page is None or page.value(_PHOTOMETRIC, 0) != _CIELAB:
            return False
        return page.values(_BITS) == (8, 8, 8)


def has_exif(path: Path) -> bool:
    """Return whether the first page refers to EXIF."""
    with path.open("rb") as file:
        page = next(tiff_directories(file), None)
        return page is not None and _EXIF in page


def extra_samples(path: Path) -> list[bool]:
    """Return for each extra band of the first page whether it is alpha."""
    with path.open("rb") as file:
        page = next(tiff_directories(file), None)
        kinds = () if page is None else page.values(_EXTRA_SAMPLES)
    return [kind in _TRANSPARENCY for kind in kinds]
