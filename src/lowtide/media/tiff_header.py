"""The directories of a TIFF: what is in the file besides the picture that libvips reads."""

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
_TRANSPARENCY = (1, 2)  # with color multiplied by it, and not
_MOST_NUMBERS, _MOST_ENTRIES, _MOST_DIRECTORIES = 4096, 65_535, 64
_BLOCK = 1 << 18  # numbers read at once


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
        """The numbers of a tag, the first 4096 of them at most."""
        blocks = self._blocks(tag, _MOST_NUMBERS)
        return tuple(int(number) for number in next(blocks, ()))

    def largest(self, tag: int) -> int | None:
        """The largest number of a tag, however many there are."""
        return max((int(block.max()) for block in self._blocks(tag) if len(block)), default=None)

    def _blocks(self, tag: int, most: int | None = None) -> Iterator[np.ndarray]:
        kind, count, inline = self._entries.get(tag, (0, 0, b""))
        if kind not in _TYPES:
            return
        dtype = np.dtype(self._order + _TYPES[kind])
        count = count if most is None else min(count, most)
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
    if at + count > os.fstat(file.fileno()).st_size:
        raise _DamagedError
    file.seek(at)
    return file.read(count)


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
        largest = page.largest(_STRIP_BYTE_COUNTS) or page.largest(_TILE_BYTE_COUNTS)
        return min(largest or size, size)


def extra_samples(path: Path) -> list[bool]:
    """Of each band of the first page that the file says is no color, whether it is transparency."""
    with path.open("rb") as file:
        page = next(directories(file), None)
        kinds = () if page is None else page.values(_EXTRA_SAMPLES)
    return [kind in _TRANSPARENCY for kind in kinds]
