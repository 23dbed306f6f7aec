"""Light levels of HDR10: the mastering display and the brightness of the content."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import av

# FFmpeg's AVMasteringDisplayMetadata: ten rationals, and whether colors and luminances are there.
_DISPLAY = struct.Struct("=20i2i")
_COLOR_UNITS, _LUMINANCE_UNITS = 50_000, 10_000


@dataclass(frozen=True)
class Hdr10Light:
    """SMPTE ST 2086 mastering display and CTA-861.3 content light level.

    Args:
        display: x and y of red, green, blue and white in units of 1/50,000, then the largest and
            least luminance in units of 0.0001 cd/m²; None if the file has none.
        content: Largest and mean light level in cd/m²; None if the file has none.
    """

    display: tuple[int, ...] | None = None
    content: tuple[int, int] | None = None


def light_of(frame: av.VideoFrame) -> Hdr10Light | None:
    """Return the HDR10 data of a decoded frame, or None if it has none."""
    display = content = None
    for data in frame.side_data.keys():  # noqa: SIM118  (iterating gives other things)
        if data.type.name == "MASTERING_DISPLAY_METADATA":
            display = _display(bytes(data))
        elif data.type.name == "CONTENT_LIGHT_LEVEL":
            content = struct.unpack_from("=2I", bytes(data))
    return Hdr10Light(display, content) if display or content else None


def _display(data: bytes) -> tuple[int, ...] | None:
    *numbers, has_colors, has_luminance = _DISPLAY.unpack_from(data)
    if not (has_colors and has_luminance):
        return None
    values = [Fraction(*numbers[i : i + 2]) for i in range(0, 20, 2)]
    colors = [round(value * _COLOR_UNITS) for value in values[:8]]
    least, largest = (round(value * _LUMINANCE_UNITS) for value in values[8:])
    return (*colors, largest, least)
