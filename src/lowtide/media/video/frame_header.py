"""Headers of image files as frames of a video: what all of a sequence have alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lowtide.core.errors import ImageError, VideoError
from lowtide.media.image_facts import ImageFacts, open_decoder
from lowtide.media.metadata import read_metadata
from lowtide.media.video.opened_video import damaged_error
from lowtide.media.video.picture_format import PictureFormat

# Limits are those of the job, for all kinds of frames.
ANY_SIZE = 1 << 62
# By channels and sample type.
_FORMATS = {
    (1, "uint8"): "gray",
    (1, "uint16"): "gray16le",
    (3, "uint8"): "gbrp",
    (3, "uint16"): "gbrp16le",
}


class FrameHeader(NamedTuple):
    """Header of an image file, and its color profile or None."""

    facts: ImageFacts
    icc: bytes | None

    @property
    def format(self) -> PictureFormat:
        """How its samples are those of a frame."""
        info = self.facts.info
        name = _FORMATS[info.channels, info.sample_type]
        return PictureFormat(info.width, info.height, name)


def read_header(path: Path) -> FrameHeader:
    """Return the header of a frame's file.

    Raises:
        ImageError: It cannot be read.
        VideoError: Its samples are of a kind that videos do not have.
    """
    opened = open_decoder(path, ANY_SIZE)
    info = opened.facts.info
    if info.alpha or (info.channels, info.sample_type) not in _FORMATS:
        kind = "it has transparency" if info.alpha else f"samples are {info.sample_type}"
        raise VideoError(
            f"{path}: {kind}, which videos do not keep",
            hint=f"lowtide upscale {path.parent} -o FOLDER does, image by image",
        )
    return FrameHeader(opened.facts, read_metadata(opened.image).icc)


def change_of(found: FrameHeader, usual: FrameHeader) -> str | None:
    """Return what tells a frame from the first one, in words; None if they are alike."""
    now, first = (
        f"{one.format.width}×{one.format.height} {one.format.name}" for one in (found, usual)
    )
    if now != first:
        return f"{now}, and not {first}"
    return None if found.icc == usual.icc else "its color profile is not the same"


def damaged_frame(path: Path, error: ImageError) -> VideoError:
    """Return the error of a file that cannot be decoded."""
    return damaged_error(path, error.message.removeprefix(f"{path}: "))
