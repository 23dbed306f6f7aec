"""Light levels of HDR10: the mastering display and the brightness of the content."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import av

# FFmpeg's AVMasteringDisplayMetadata: ten rationals, and whether colors and luminances are there.
_DISPLAY = struct.Struct("=20i2i")
_COLOR_UNITS, _LUMINANCE_UNITS = 50_000, 10_000
# Encoders' names of the two.
_NAMES = {
    "x264": ("mastering-display", "cll"),
    "x265": ("master-display", "max-cll"),
    "svtav1": ("mastering-display", "content-light"),
}


@dataclass(frozen=True)
class Hdr10Light:
    """SMPTE ST 2086 mastering display and CTA-861.3 content light level.

    Args:
        display: x and y of red, green, blue and white in units of 1/50,000, then the largest and
            least luminance in units of 0.0001 cd/m²; None if unknown.
        content: Largest and mean light level in cd/m²; None if unknown.
    """

    display: tuple[int, ...] | None = None
    content: tuple[int, int] | None = None

    def parameters(self, codec: str) -> dict[str, str]:
        """Return a codec's own parameters for it; none for a codec that cannot hold it."""
        if codec not in _NAMES:
            return {}
        found, names = {}, _NAMES[codec]
        if self.display is not None:
            found[names[0]] = self._display_text(codec)
        if self.content is not None:
            found[names[1]] = "{},{}".format(*self.content)
        return found

    def _display_text(self, codec: str) -> str:
        values = [str(value) for value in self.display or ()]
        if codec == "svtav1":  # takes decimals
            values = [
                f"{int(value) / (_COLOR_UNITS if place < 8 else _LUMINANCE_UNITS):.6f}"
                for place, value in enumerate(values)
            ]
        red, green, blue, white, luminance = (",".join(values[i : i + 2]) for i in range(0, 10, 2))
        return f"G({green})B({blue})R({red})WP({white})L({luminance})"


def side_data(frame: av.VideoFrame) -> Any:
    """Return a decoded frame's side data; none where there is a kind that PyAV does not know."""
    try:
        return frame.side_data
    except ValueError:  # such as EXIF: no kind of any camera's or display's
        return {}


def light_of(frame: av.VideoFrame) -> Hdr10Light | None:
    """Return the HDR10 data of a decoded frame, or None if it has none."""
    data = side_data(frame)
    display = data.get("MASTERING_DISPLAY_METADATA")
    content = data.get("CONTENT_LIGHT_LEVEL")
    light = Hdr10Light(
        None if display is None else _display(bytes(display)),
        # Encoders write zeros for unknown.
        None if content is None else _content(bytes(content)),
    )
    return None if light == Hdr10Light() else light


def _display(data: bytes) -> tuple[int, ...] | None:
    *numbers, has_colors, has_luminance = _DISPLAY.unpack_from(data)
    if not (has_colors and has_luminance):
        return None
    values = [Fraction(*numbers[i : i + 2]) for i in range(0, 20, 2)]
    colors = [round(value * _COLOR_UNITS) for value in values[:8]]
    least, largest = (round(value * _LUMINANCE_UNITS) for value in values[8:])
    return (*colors, largest, least)


def _content(data: bytes) -> tuple[int, int] | None:
    largest, mean = struct.unpack_from("=2I", data)
    return (largest, mean) if largest or mean else None
