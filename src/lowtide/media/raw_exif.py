"""EXIF of what LibRaw says about an exposure, for pictures developed from camera RAW files."""

from __future__ import annotations

import math
import struct
from datetime import datetime
from typing import Any

_SHORT, _LONG, _ASCII, _RATIONAL = 3, 4, 2, 5
_ARTIST, _EXIF, _TIME, _EXPOSURE, _APERTURE, _ISO, _TAKEN, _FOCAL = (
    *(0x013B, 0x8769, 0x0132, 0x829A),
    *(0x829D, 0x8827, 0x9003, 0x920A),
)
_HEADER = 8
_Entry = tuple[int, int, int, bytes]  # tag, type, count, data


def exif_of(other: Any) -> bytes:
    """Return an EXIF block of ISO, exposure time, aperture, focal length, time and artist.

    Args:
        other: `rawpy.RawPy.other`, of which values that are unknown are 0 or empty.
    """
    first, second = list[_Entry](), list[_Entry]()
    if other.artist:
        first.append(_text(_ARTIST, other.artist))
    if isinstance(other.timestamp, datetime) and other.timestamp.year > 1970:
        taken = other.timestamp.strftime("%Y:%m:%d %H:%M:%S")
        first.append(_text(_TIME, taken))
        second.append(_text(_TAKEN, taken))
    for tag, value in (
        (_EXPOSURE, other.shutter_speed),
        (_APERTURE, other.aperture),
        (_FOCAL, other.focal_length),
    ):
        if math.isfinite(value) and 0 < value < 1e5:
            second.append((tag, _RATIONAL, 1, _ratio(value)))
    if math.isfinite(other.iso_speed) and 1 <= other.iso_speed < 65_536:
        second.append((_ISO, _SHORT, 1, struct.pack("<H", round(other.iso_speed))))
    pointer = (_EXIF, _LONG, 1, struct.pack("<L", 0))
    at = _HEADER + len(_directory([*first, pointer], _HEADER))
    first.append((_EXIF, _LONG, 1, struct.pack("<L", at)))
    head = b"Exif\0\0II*\0" + struct.pack("<L", _HEADER)
    return head + _directory(first, _HEADER) + _directory(second, at)


def _text(tag: int, text: str) -> _Entry:
    data = text.encode("utf-8", "replace") + b"\0"
    return tag, _ASCII, len(data), data


def _ratio(value: float) -> bytes:
    """Return a fraction: 1/n of short exposures, thousandths of others."""
    above, below = (1, round(1 / value)) if value < 0.1 else (round(value * 1000), 1000)
    return struct.pack("<LL", above, below)


def _directory(entries: list[_Entry], at: int) -> bytes:
    """Return a TIFF directory that lies at byte ``at``, and the data that do not fit in it."""
    data, more = struct.pack("<H", len(entries)), b""
    start = at + len(data) + 12 * len(entries) + 4
    for tag, kind, count, value in sorted(entries):
        if len(value) > 4:
            value, more = (
                struct.pack("<L", start + len(more)),
                more + value + b"\0" * (len(value) % 2),
            )
        data += struct.pack("<HHL", tag, kind, count) + value.ljust(4, b"\0")
    return data + struct.pack("<L", 0) + more
