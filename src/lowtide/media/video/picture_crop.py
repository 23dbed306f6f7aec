"""What a file says is left out of its pictures: Matroska's PixelCrop, and MP4's clean aperture.

What a codec itself leaves out, decoders do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.picture_format import PictureFormat

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Lines of FFmpeg's description of a file.
_FIND_STREAM = re.compile(r" +Stream #0:(\d+)")
_FIND_CROP = re.compile(r" +Frame Cropping: (\d+)/(\d+)/(\d+)/(\d+)", re.IGNORECASE)


class Crop(NamedTuple):
    """Columns and rows of a decoded frame that players leave out, since its file says so."""

    left: int = 0
    right: int = 0
    top: int = 0
    bottom: int = 0

    def __str__(self) -> str:
        sides = zip(self, ("left", "right", "above", "below"), strict=True)
        return ", ".join(f"{count} {side}" for count, side in sides if count)


NO_CROP = Crop()


def crop_of(container: InputContainer, stream: VideoStream) -> Crop:
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
            return Crop(*map(int, found.groups()))
    return NO_CROP


def cropped_format(format: PictureFormat, crop: Crop) -> PictureFormat:
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
    planes: Sequence[np.ndarray], shown: PictureFormat, crop: Crop
) -> list[np.ndarray]:
    """Return what a crop leaves of planes, as views; ``shown`` is its format."""
    steps = [(1, 1), shown.chroma_step, shown.chroma_step]
    return [
        plane[crop.top // down :, crop.left // across :][:high, :wide]
        for plane, (across, down), (high, wide) in zip(
            planes, steps, shown.plane_shapes, strict=False
        )
    ]
