"""Heads of written files, where the encoder says what it does not know, or cannot say what is.

It writes a resolution whether there is one or not, and the color of HDR it does not write.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from lowtide.media.formats import JPEG, PNG, TIFF, ImageFormat
from lowtide.media.metadata import Metadata

_PNG_HEADER_END = 33  # of signature and IHDR
_BLOCK = 1 << 17
_RESOLUTIONS, _UNIT = (282, 283), 296  # tags of TIFF


def correct_head(path: Path, image_format: ImageFormat, metadata: Metadata) -> None:
    """Correct what the head of a file says, whose metadata are to be these; raises `OSError`."""
    if image_format is PNG:
        _correct_png(path, metadata)
    elif image_format is JPEG and metadata.has_resolution and metadata.exif is None:
        # Where EXIF is written, it has the resolution.
        sides = (min(max(round(one * 25.4), 1), 65_535) for one in (metadata.xres, metadata.yres))
        jfif = b"JFIF\0\1\1\1" + struct.pack(">HH", *sides) + b"\0\0"
        _replace_bytes(path, 2, 0, b"\xff\xe0" + struct.pack(">H", 2 + len(jfif)) + jfif)
    elif image_format is TIFF and not metadata.has_resolution:
        _drop_tiff_resolution(path)


def _correct_png(path: Path, metadata: Metadata) -> None:
    made = b"".join(metadata.texts.values())
    if metadata.codes is not None:
        data = b"cICP" + bytes([*metadata.codes, 0, 1])
        made += struct.pack(">L", len(data) - 4) + data + struct.pack(">L", zlib.crc32(data))
    if not metadata.has_resolution:
        place = _PNG_HEADER_END
        with path.open("rb") as file:
            while True:
                file.seek(place)
                size, name = struct.unpack(">L4s", file.read(8))
                if name in (b"pHYs", b"IDAT"):
                    break
                place += size + 12
        if name == b"pHYs":
            _replace_bytes(path, place, size + 12, b"")
    if made:
        _replace_bytes(path, _PNG_HEADER_END, 0, made)


def _replace_bytes(path: Path, place: int, count: int, made: bytes) -> None:
    """Replace so many bytes of a file from ``place`` on, and move what is after them."""
    waiting, source = made, place + count
    with path.open("r+b") as file:
        file.seek(source)
        while block := file.read(_BLOCK):
            source += len(block)
            waiting += block
            # Nothing is overwritten that was not read.
            ready = waiting[: source - place]
            file.seek(place)
            file.write(ready)
            waiting, place = waiting[len(ready) :], place + len(ready)
            file.seek(source)
        file.seek(place)
        file.write(waiting)
        file.truncate()


def _drop_tiff_resolution(path: Path) -> None:
    """Remove the resolution's entries from the first directory of a TIFF."""
    with path.open("r+b") as file:
        head = file.read(16)
        order = "<" if head[:2] == b"II" else ">"
        big = struct.unpack_from(order + "H", head, 2)[0] == 43
        form, step, pointer = ("Q", 20, "Q") if big else ("H", 12, "L")
        (at,) = struct.unpack_from(order + pointer, head, 8 if big else 4)
        file.seek(at)
        (count,) = struct.unpack(order + form, file.read(struct.calcsize(form)))
        entries = [file.read(step) for _ in range(count)]
        rest = file.read(struct.calcsize(pointer))
        gone = (*_RESOLUTIONS, _UNIT)
        kept = [one for one in entries if struct.unpack_from(order + "H", one)[0] not in gone]
        file.seek(at)
        file.write(struct.pack(order + form, len(kept)) + b"".join(kept) + rest)
