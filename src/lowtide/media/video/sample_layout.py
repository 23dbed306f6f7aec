"""Layout of samples that FFmpeg's name of a pixel format stands for."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from lowtide.core.errors import VideoError
from lowtide.media.video.pyav import load_av

_YUV = re.compile(r"yuvj?(420|422|440|444)p(9|1[0246])?(le|be)?")
_GRAY = re.compile(r"gray(9|1[0246])?(le|be)?")
_PLANAR_RGB = re.compile(r"gbrp(9|1[0246])?(le|be)?")
_PACKED_RGB = re.compile(r"(rgb|bgr|0rgb|0bgr|rgb0|bgr0)(24|48)?(le|be)?")
_STEPS = {"420": (2, 2), "422": (2, 1), "440": (1, 2), "444": (1, 1)}

Kind = Literal["yuv", "gray", "rgb"]


class SampleLayout(NamedTuple):
    """Samples of a format.

    Args:
        kind: Luma and chroma, luma alone, or red, green and blue.
        bits: Bits of a sample.
        chroma_step: Luma samples per chroma sample, across and down.
        packed: Order of the samples of a pixel that lie side by side, ``"bgr0"``; empty where
            each has a plane.
    """

    kind: Kind
    bits: int
    chroma_step: tuple[int, int]
    packed: str = ""


@lru_cache  # asked for each band of rows
def sample_layout(name: str) -> SampleLayout | None:
    """Return the layout that FFmpeg's name stands for, or None for samples of another kind."""
    if found := _YUV.fullmatch(name):
        return SampleLayout("yuv", int(found[2] or 8), _STEPS[found[1]])
    if found := _GRAY.fullmatch(name):
        return SampleLayout("gray", int(found[1] or 8), (1, 1))
    if found := _PLANAR_RGB.fullmatch(name):
        return SampleLayout("rgb", int(found[1] or 8), (1, 1))
    if found := _PACKED_RGB.fullmatch(name):
        return SampleLayout("rgb", 16 if found[2] == "48" else 8, (1, 1), found[1])
    return None


def unknown_layout(name: str) -> VideoError:
    """Return the error of a pixel format that cannot be converted, with one that can."""
    av = load_av()
    known = name in av.video.format.names
    format = av.VideoFormat(name) if known else None
    if format is None or not format.components:
        return VideoError(f"frames are stored as {name}, which cannot be converted")
    alpha = any(part.is_alpha for part in format.components)
    deep = max(part.bits for part in format.components) > 8
    if format.is_rgb or format.has_palette:
        near = "gbrp16le" if deep else "bgr0"
    else:
        near = "yuv444p16le" if deep else "yuv444p"
    return VideoError(
        f"frames are stored as {name}, "
        + ("with transparency, which cannot be kept" if alpha else "which cannot be converted"),
        hint=f"convert them first: ffmpeg -i IN -pix_fmt {near} -c:v ffv1 OUT.mkv",
    )
