"""The directories of a TIFF: what is in the file besides the picture that libvips reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_TYPE_CODES = {1: "B", 3: "H", 4: "L", 13: "L", 16: "Q", 18: "Q"}
_COMPRESSION, _STRIP_BYTE_COUNTS, _TILE_BYTE_COUNTS = 259, 279, 325
_SUBDIRECTORIES, _EXTRA_SAMPLES = 330, 338
_UNCOMPRESSED = 1
_TRANSPARENCY = (1, 2)  # with color multiplied by it, and not
_MOST_BYTES, _MOST_ENTRIES, _MOST_DIRECTORIES = 1 << 26, 65_535, 64


class _DamagedError(Exception):
    """A directory that is cut short or points beyond the file; reading its pixels will say so."""


@dataclass(frozen=True)
class Directory:
    """One image's tags. Values that are no whole numbers, or not to be had, are ``()``."""

    _file: BinaryIO
    _order: str
    _offset: str
    _entries: dict[int, tuple[int, int, bytes]]

    def __contains__(self, tag: int) -> bool:
        return tag in self._entries

    def values(self, tag: int) -> tuple[int, ...]:
        """The numbers of a tag, those in its first 64 MiB at most."""
        kind, count, inline = self._entries.get(tag, (0, 0, b""))
        if kind not in _TYPE_CODES:
            return ()
        one = struct.calcsize(self._order + _TYPE_CODES[kind])
        if count * one > len(inline):
            (at,) = struct.unpack(self._order + self._offset, inline)
            try:
                inline = _read(self._file, at, min(count * one, _MOST_BYTES))
            except _DamagedError:
                return ()
        count = min(count, len(inline) // one)
        return struct.unpack_from(f"{self._order}{count}{_TYPE_CODES[kind]}", inline)

    def value(self, tag: int, default: int) -> int:
        """The first number of a tag."""
        return next(iter(self.values(tag)), default)


def directories(file: BinaryIO) -> Iterator[Directory]:
    """The directories of an open TIFF, the first page's first: pages, and what lies below them.

    Ends where the file does, or after 64.
    """
    try:
        yield from _walk(file)
    except _DamagedError:
        return


def _walk(file: BinaryIO) -> Iterator[Directory]:
    head = _read(file, 0, 8)
    order = "<" if head[:2] == b"II" else ">"
    big = head[2:4] in (b"+\0", b"\0+")
    offset, count = ("Q", "Q") if big else ("L", "H")
    (first,) = struct.unpack(order + offset, _read(file, 8, 8) if big else head[4:8])
    waiting, seen = [first], {0}
    while waiting and len(seen) <= _MOST_DIRECTORIES:
        at = waiting.pop(0)
        if at in seen:
            continue
        seen.add(at)
        # tag, type, count, then the values or where they are
        layout = f"{order}HH{offset}{struct.calcsize(order + offset)}s"
        size, start = struct.calcsize(layout), at + struct.calcsize(order + count)
        (entries,) = struct.unpack(order + count, _read(file, at, start - at))
        entries = min(entries, _MOST_ENTRIES)
        rows = struct.iter_unpack(layout, _read(file, start, size * entries))
        directory = Directory(file, order, offset, {row[0]: row[1:] for row in rows})
        yield directory
        waiting += directory.values(_SUBDIRECTORIES)[:_MOST_DIRECTORIES]
        end = start + size * entries
        waiting += struct.unpack(order + offset, _read(file, end, struct.calcsize(order + offset)))


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    try:
        file.seek(at)
        found = file.read(count)
    except (OverflowError, ValueError, OSError) as error:  # an offset that no file has
        raise _DamagedError from error
    if len(found) < count:
        raise _DamagedError
    return found


def largest_piece(path: Path) -> int:
    """Bytes of the largest compressed strip or tile of the first page; 0 if not compressed.

    The size of the file where the header does not say, which no piece can exceed.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        page = next(directories(file), None)
        if page is None:
            return size
        if page.value(_COMPRESSION, 0) == _UNCOMPRESSED:
            return 0
        counts = page.values(_STRIP_BYTE_COUNTS) or page.values(_TILE_BYTE_COUNTS)
        return min(max(counts, default=size), size)


def extra_samples(path: Path) -> list[bool]:
    """Of each band of the first page that the file says is no color, whether it is transparency."""
    with path.open("rb") as file:
        page = next(directories(file), None)
        kinds = () if page is None else page.values(_EXTRA_SAMPLES)
    return [kind in _TRANSPARENCY for kind in kinds]
