"""The one thing about a TIFF that libvips does not tell: how large its compressed pieces are."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_TYPE_CODES = {3: "H", 4: "L", 16: "Q"}
_COMPRESSION, _STRIP_BYTE_COUNTS, _TILE_BYTE_COUNTS = 259, 279, 325
_UNCOMPRESSED = 1


def largest_piece(path: Path) -> int:
    """Bytes of the largest compressed strip or tile of the first page; 0 if not compressed.

    The size of the file where the header does not say, which no piece can exceed.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            counts = _byte_counts(file)
        except (struct.error, OverflowError):
            # A directory that is cut short or damaged; reading its pixels will say so.
            return size
    return min(max(counts, default=size), size)


def _byte_counts(file: BinaryIO) -> tuple[int, ...]:
    head = file.read(16)
    order = "<" if head[:2] == b"II" else ">"
    big = struct.unpack(order + "H", head[2:4])[0] == 43
    (at,) = struct.unpack(order + ("Q" if big else "L"), head[8:16] if big else head[4:8])
    file.seek(at)
    (entries,) = struct.unpack(order + ("Q" if big else "H"), file.read(8 if big else 2))
    # tag, type, count, then the values or where they are
    layout = order + ("HHQ8s" if big else "HHL4s")
    for _ in range(min(entries, 65_535)):
        tag, kind, count, inline = struct.unpack(layout, file.read(struct.calcsize(layout)))
        # Tags are in ascending order, so this one comes before the counts.
        if tag == _COMPRESSION and struct.unpack_from(order + "H", inline)[0] == _UNCOMPRESSED:
            return (0,)
        if tag in (_STRIP_BYTE_COUNTS, _TILE_BYTE_COUNTS) and kind in _TYPE_CODES:
            code = _TYPE_CODES[kind]
            needed = struct.calcsize(f"{order}{count}{code}")
            if needed > len(inline):
                file.seek(struct.unpack(order + ("Q" if big else "L"), inline)[0])
                inline = file.read(min(needed, 1 << 26))
            return struct.unpack_from(f"{order}{count}{code}", inline)
    return ()
