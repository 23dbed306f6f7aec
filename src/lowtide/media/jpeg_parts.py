"""Parts of a JPEG file beside its picture: gain maps, further pictures, and videos.

They are not read. Their notes say so, and XMP does not announce any more what is gone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STARTS_ROWS, _ENDS, _APP0, _APP1, _APP2 = 0xDA, 0xD9, 0xE0, 0xE1, 0xE2
_MPF, _GAIN_MAP = b"MPF\0", b"urn:iso:std:iso:ts:21496:-1\0"
_NUMBER_OF_IMAGES = 0xB001
_HDR_XMP = b"http://ns.adobe.com/hdr-gain-map/1.0/"
_CONTAINERS = rb"http://ns\.google\.com/photos/1\.0/container/(?:item/)?"
_CAMERA = rb"http://ns\.google\.com/photos/1\.0/camera/"
_MOTION = re.compile(rb":(?:MotionPhoto|MicroVideo)\s*(?:=\s*[\"']1|>\s*1)|\"MotionPhoto\"")


@dataclass(frozen=True)
class JpegParts:
    """What the segments of a JPEG say: whether of its resolution, and of parts beside the picture.

    Attributes:
        has_resolution: Whether JFIF states one, and not the shape of pixels alone.
        notes: A note for each part that is not read.
    """

    has_resolution: bool = False
    notes: tuple[str, ...] = ()


def jpeg_parts(path: Path) -> JpegParts:
    """Return what the segments before the rows of a JPEG say."""
    has_resolution = gain_map = motion = False
    pictures = 1
    for marker, data in segments(path):
        if marker == _APP0 and data.startswith(b"JFIF\0") and len(data) >= 12:
            has_resolution |= data[7] != 0
        if marker == _APP1:
            gain_map |= _HDR_XMP in data
            motion |= _MOTION.search(data) is not None
        if marker == _APP2:
            gain_map |= data.startswith(_GAIN_MAP)
            if data.startswith(_MPF):
                pictures = _picture_count(data[len(_MPF) :])
    notes = []
    if gain_map:
        notes.append("the gain map of HDR (Ultra HDR) is not kept: the picture is the SDR one")
    if (more := pictures - 1 - gain_map) > 0:
        notes.append(f"{more} more {'picture' if more == 1 else 'pictures'} of the file not read")
    if motion:
        notes.append("the video of a motion photo is not kept")
    return JpegParts(has_resolution, tuple(notes))


def without_parts(xmp: bytes) -> bytes:
    """Return XMP that announces neither gain map, nor video, nor other parts of a container."""
    gone: list[bytes] = []
    for space, names in (
        (re.escape(_HDR_XMP), rb"\w+"),
        (_CONTAINERS, rb"\w+"),
        (_CAMERA, rb"(?:MotionPhoto|MicroVideo)\w*"),
    ):
        for found in re.finditer(rb"\sxmlns:(\w+)\s*=\s*([\"'])" + space + rb"\2", xmp):
            gone.append(re.escape(found[1]) + b":" + names)
            if names == rb"\w+":
                gone.append(rb"xmlns:" + re.escape(found[1]))
    for name in gone:
        xmp = re.sub(rb"<(" + name + rb")(?=[\s/>])[^>]*?(?:/>|>.*?</\1\s*>)", b"", xmp, flags=re.S)
    for name in gone:
        xmp = re.sub(rb"\s" + name + rb"\s*=\s*(?:\"[^\"]*\"|'[^']*')", b"", xmp)
    return xmp


def segments(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of the segments before the rows; ends at damage."""
    with path.open("rb") as file:
        file.seek(2)
        while len(head := file.read(2)) == 2 and head[0] == 0xFF:
            while head[1] == 0xFF:  # fill bytes
                head = b"\xff" + file.read(1)
            if head[1] in (_STARTS_ROWS, _ENDS) or len(size := file.read(2)) < 2:
                return
            data = file.read(max(int.from_bytes(size) - 2, 0))
            yield head[1], data


def _picture_count(index: bytes) -> int:
    """Return the number of pictures that an MPF segment says, 1 where it is damaged."""
    order = "<" if index[:2] == b"II" else ">"
    try:
        (at,) = struct.unpack_from(order + "L", index, 4)
        (entries,) = struct.unpack_from(order + "H", index, at)
        for place in range(at + 2, at + 2 + 12 * entries, 12):
            tag, _, _, value = struct.unpack_from(order + "HHLL", index, place)
            if tag == _NUMBER_OF_IMAGES:
                return value if value < 1000 else 1
    except struct.error:
        pass
    return 1
