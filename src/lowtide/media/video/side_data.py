"""What files say beside their pictures: the part that is shown, and HDR10's light levels.

What is left out of a picture is Matroska's PixelCrop and MP4's clean aperture; what a codec itself
leaves out, decoders do.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.picture_format import PictureFormat

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream


# Lines of FFmpeg's description of a file.
_FIND_STREAM = re.compile(r" +Stream #0:(\d+)")
_FIND_CROP = re.compile(r" +Frame Cropping: (\d+)/(\d+)/(\d+)/(\d+)", re.IGNORECASE)

# FFmpeg's AVMasteringDisplayMetadata: ten rationals, and whether colors and luminances are there.
_DISPLAY = struct.Struct("=20i2i")
_COLOR_UNITS, _LUMINANCE_UNITS = 50_000, 10_000
# Encoders' names of the two.
_NAMES = {
    "x264": ("mastering-display", "cll"),
    "x265": ("master-display", "max-cll"),
    "svtav1": ("mastering-display", "content-light"),
}


class PictureCrop(NamedTuple):
    """Columns and rows of a decoded frame that players leave out, since its file says so."""

    left: int = 0
    right: int = 0
    top: int = 0
    bottom: int = 0

    def __str__(self) -> str:
        sides = zip(self, ("left", "right", "above", "below"), strict=True)
        return ", ".join(f"{count} {side}" for count, side in sides if count)


NO_CROP = PictureCrop()


def crop_of(container: InputContainer, stream: VideoStream) -> PictureCrop:
    """Return what a container says is left out of a stream's pictures.

    FFmpeg's decoders do not apply it, and Python sees it in FFmpeg's description of the file only.
    """
    log, here = load_av().logging, False
    level = log.get_level()
    log.set_level(log.INFO)
    try:
        lines = cast("Any", container).dumps_format().splitlines()  # its stubs lack it
    finally:
        log.set_level(level)
    for line in lines:
        if found := _FIND_STREAM.match(line):
            here = int(found[1]) == stream.index
        elif here and (found := _FIND_CROP.match(line)):
            return PictureCrop(*map(int, found.groups()))
    return NO_CROP


def cropped_format(format: PictureFormat, crop: PictureCrop) -> PictureFormat:
    """Return the format of what a crop leaves; raises `VideoError` where it cannot be cut out."""
    if crop == NO_CROP:
        return format
    width, height = format.width - crop.left - crop.right, format.height - crop.top - crop.bottom
    across, down = format.chroma_step
    if min(width, height) < 1:
        raise VideoError(f"the file crops {crop} of frames of {format.width}×{format.height}")
    if crop.left % across or crop.top % down:
        cut = f"format=yuv444p{'' if format.bits == 8 else f'{format.bits}le'},"
        cut += f"crop={width}:{height}:{crop.left}:{crop.top}"
        raise VideoError(
            f"the file crops {crop} of frames of {format.name}, where chroma cannot be cut",
            hint=f"cut them first: ffmpeg -apply_cropping codec -i IN -vf {cut} -c:v ffv1 OUT.mkv",
        )
    return format.resized(width, height)


def cropped_planes(
    planes: Sequence[np.ndarray], shown: PictureFormat, crop: PictureCrop
) -> list[np.ndarray]:
    """Return what a crop leaves of planes, as views; ``shown`` is its format."""
    steps = [(1, 1), shown.chroma_step, shown.chroma_step]
    return [
        plane[crop.top // down :, crop.left // across :][:high, :wide]
        for plane, (across, down), (high, wide) in zip(
            planes, steps, shown.plane_shapes, strict=False
        )
    ]


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


def frame_side_data(frame: av.VideoFrame) -> Any:
    """Return a decoded frame's side data; none where there is a kind that PyAV does not know."""
    try:
        return frame.side_data
    except ValueError:  # such as EXIF: no kind of any camera's or display's
        return {}


def light_of(frame: av.VideoFrame) -> Hdr10Light | None:
    """Return the HDR10 data of a decoded frame, or None if it has none."""
    data = frame_side_data(frame)
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
