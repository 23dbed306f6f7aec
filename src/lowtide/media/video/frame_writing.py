"""Frames as image files: the samples that those have, and writing one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import open_sink
from lowtide.media.metadata import ImageMetadata
from lowtide.media.video.frame_sequence import FrameSequenceFacts
from lowtide.media.video.packet_times import frame_rate
from lowtide.media.video.picture_format import UNSPECIFIED, PictureFormat
from lowtide.media.video.video_facts import VideoFacts, display_matrix

_PQ, _HLG = 16, 18
# BT.709's, and those of standard definition, which hardly differ.
_USUAL_PRIMARIES = (1, 5, 6, UNSPECIFIED)


def pixel_format_for_images(
    facts: VideoFacts, format: PictureFormat
) -> tuple[PictureFormat, list[str]]:
    """Return ``format`` as image files hold it, and sentences on what they do not say.

    Raises:
        UsageError: The frames would be shown with other colors, or cannot be turned.
    """
    if facts.format.tags.transfer in (_PQ, _HLG):
        name = "PQ" if facts.format.tags.transfer == _PQ else "HLG"
        raise UsageError(
            f"{facts.path}: its colors are {name} (HDR), which image files would not say",
            hint="-o OUT.mkv --codec ffv1 keeps every sample, and the tags",
        )
    if facts.rotation % 90:
        raise UsageError(
            f"{facts.path}: players turn it by {facts.rotation}°, which image files would not say",
            hint="write a video: -o OUT.mkv",
        )
    name = "gray" if format.kind == "gray" else "gbrp"
    held = PictureFormat(format.width, format.height, name if format.bits == 8 else f"{name}16le")
    return held, [] if isinstance(facts, FrameSequenceFacts) else _unsaid(facts)


def upright_planes(planes: Sequence[np.ndarray], rotation: int, mirrored: bool) -> list[np.ndarray]:
    """Return planes (H, W) as players show them.

    Args:
        planes: Samples as they are stored.
        rotation: Degrees counterclockwise, a multiple of 90.
        mirrored: By `is_mirrored`.
    """
    # A sample of column x and row y is shown in column across·(x, y) and row down·(x, y).
    (a, b, _), (c, d, _) = np.reshape(display_matrix(rotation, mirrored)[:6], (2, 3)).tolist()
    turned = [plane if a else plane.T for plane in planes]
    return [plane[:: 1 if b + d > 0 else -1, :: 1 if a + c > 0 else -1] for plane in turned]


def write_frame(path: Path, planes: Sequence[np.ndarray], icc: bytes | None = None) -> None:
    """Write planes (H, W) of 8 or 16 bits, one or R, G and B, as an image file of the suffix.

    Raises:
        OutputError: The file cannot be written; there is none then.
    """
    rows = np.stack(planes, -1).astype(planes[0].dtype.newbyteorder("="))
    height, width, channels = rows.shape
    info = ImageInfo(width, height, channels, "uint8" if rows.dtype == np.uint8 else "uint16")
    with open_sink(path, info, metadata=ImageMetadata(icc=icc)) as sink:
        sink.write(0, rows)
        sink.commit()


def _unsaid(facts: VideoFacts) -> list[str]:
    """Return sentences on what image files do not say of a video."""
    notes, primaries = [], facts.format.tags.primaries
    if primaries not in _USUAL_PRIMARIES:
        notes.append(f"image files do not say that color primaries are number {primaries} of H.273")
    if (aspect := facts.pixel_aspect) is not None and aspect != 1:
        notes.append(
            f"image files do not say that pixels are {aspect.numerator}:{aspect.denominator}"
        )
    if facts.rotation or facts.mirrored:
        notes.append("frames are turned as players show them")
    rate = frame_rate(facts.stamps, facts.time_base, None)
    if rate:
        text = f"image files have no times: --fps {rate.limit_denominator(1001)} gives them back"
    else:
        text = "image files have no times, and those of these frames are not even: they are lost"
    return [*notes, text]
