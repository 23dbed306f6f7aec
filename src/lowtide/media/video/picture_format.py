"""How the frames of a video are stored: samples, chroma, and the tags of their color.

Planes are the arrays of a frame in one order whatever the file's: Y, Cb, Cr, or Y alone, or
R, G, B. Numbers of colors are those of ITU-T H.273, as FFmpeg has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import load_av

if TYPE_CHECKING:
    from collections.abc import Sequence

    import av

_YUV = re.compile(r"yuvj?(420|422|440|444)p(9|1[0246])?(le|be)?")
_GRAY = re.compile(r"gray(9|1[0246])?(le|be)?")
_PLANAR_RGB = re.compile(r"gbrp(9|1[0246])?(le|be)?")
_PACKED_RGB = re.compile(r"(rgb|bgr|0rgb|0bgr|rgb0|bgr0)(24|48)?(le|be)?")
_PACKED_422 = re.compile(r"(uyvy|yuyv|yvyu)422")
# Names of formats with transparency; without it, samples lie at the same places.
_SEE_THROUGH = re.compile(r"yuva4|gbrap|([rb]g[rb])a|a([rb]g[rb])")
_STEPS = {"420": (2, 2), "422": (2, 1), "440": (1, 2), "444": (1, 1)}

Kind = Literal["yuv", "gray", "rgb"]

UNSPECIFIED = 2
BT_709, BT_601, BT_2020 = 1, 6, 9
# Red's and blue's share of luma, by the number of the matrix.
LUMA_SHARES = {
    BT_709: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    BT_601: (0.299, 0.114),
    7: (0.212, 0.087),
    BT_2020: (0.2627, 0.0593),
}
_OTHER_MATRICES = {0: "RGB", 8: "YCgCo", 10: "BT.2020 with constant luminance", 14: "ICtCp"}
# Where FFmpeg's chroma locations put the first chroma sample, in luma samples right and down of
# the first luma sample. Unspecified (0) is left, as in MPEG-2, H.264, H.265 and AV1.
_CHROMA_OFFSETS = {
    0: (0.0, 0.5),
    1: (0.0, 0.5),
    2: (0.5, 0.5),
    3: (0.0, 0.0),
    4: (0.5, 0.0),
    5: (0.0, 1.0),
    6: (0.5, 1.0),
}
_HD_LINES = 720


class SampleLayout(NamedTuple):
    """Samples of a format.

    Args:
        kind: Luma and chroma, luma alone, or red, green and blue.
        bits: Bits of a sample.
        chroma_step: Luma samples per chroma sample, across and down.
        packed: Order of the samples of a pixel that lie side by side, ``"bgr0"``, or of two pixels,
            ``"uyvy"``; empty where each has a plane.
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
    if found := _PACKED_422.fullmatch(name):
        return SampleLayout("yuv", 8, (2, 1), found[1])
    return None


def opaque_name(name: str) -> str:
    """Return the format whose samples lie as those of ``name`` do, and which has no transparency.

    That is ``name`` itself where it has none, or where there is no such format.
    """
    if not (found := _SEE_THROUGH.match(name)):
        return name
    plain = (
        f"{found[1]}0" if found[1] else f"0{found[2]}" if found[2] else found[0].replace("a", "")
    )
    plain += name[found.end() :]
    return plain if sample_layout(plain) else name


def planar_name(format: PictureFormat) -> str:
    """Return the format of the same samples in planes, of this machine's usual byte order."""
    chroma = {step: name for name, step in _STEPS.items()}[format.chroma_step]
    family = {"yuv": f"yuv{chroma}p", "gray": "gray", "rgb": "gbrp"}[format.kind]
    return family if format.bits == 8 else f"{family}{format.bits}le"


def unknown_layout(name: str) -> VideoError:
    """Return the error of a pixel format that cannot be converted, with one that can."""
    av = load_av()
    known = name in av.video.format.names
    format = av.VideoFormat(name) if known else None
    if format is None or not format.components:
        return VideoError(f"frames are stored as {name}, which cannot be converted")
    deep = max(part.bits for part in format.components) > 8
    if format.is_rgb or format.has_palette:
        near = "gbrp16le" if deep else "bgr0"
    else:
        near = "yuv444p16le" if deep else "yuv444p"
    return VideoError(
        f"frames are stored as {name}{_described(format)}",
        hint=f"convert them first: ffmpeg -i IN -pix_fmt {near} -c:v ffv1 OUT.mkv",
    )


def _described(format: av.VideoFormat) -> str:
    """Return why a pixel format is refused."""
    if any(part.is_alpha for part in format.components):
        return ", with transparency, which cannot be kept"
    across, down = (16 // side(16) for side in (format.chroma_width, format.chroma_height))
    ratio = {(4, 1): "4:1:1", (4, 4): "4:1:0"}.get((across, down))
    if ratio is None:
        return ", which cannot be converted"
    return f" ({ratio}: chroma of one in {across * down} pixels), which cannot be converted"


@dataclass(frozen=True)
class ColorTags:
    """Color of a video, as its file states it: H.273's numbers, of which 2 is unspecified."""

    primaries: int = UNSPECIFIED
    transfer: int = UNSPECIFIED
    matrix: int = UNSPECIFIED
    full_range: bool | None = None


@dataclass(frozen=True)
class PictureFormat:
    """Size and sample format of a video's frames.

    Args:
        width: Luma samples of a row.
        height: Rows of luma samples.
        name: FFmpeg's name of the pixel format, ``"yuv420p10le"``.
        tags: Color as the file states it.
        chroma_location: FFmpeg's number; 0 is unspecified, 1 left, 2 center, 3 top left.

    Raises:
        VideoError: The samples or colors are of a kind that cannot be converted.
    """

    width: int
    height: int
    name: str
    tags: ColorTags = ColorTags()
    chroma_location: int = 0

    def __post_init__(self) -> None:
        if self.kind == "yuv" and self.matrix_used not in LUMA_SHARES:
            matrix = self.tags.matrix
            raise VideoError(
                f"the video's color matrix is {_OTHER_MATRICES.get(matrix, f'number {matrix}')},"
                f" which cannot be converted to RGB",
                hint="convert it first: ffmpeg -i IN -vf zscale=matrix=709 -c:v ffv1 OUT.mkv",
            )

    @property
    def kind(self) -> Kind:
        """Whether samples are luma and chroma, luma alone, or red, green and blue."""
        return self.layout.kind

    @property
    def bits(self) -> int:
        """Bits of a sample, 8 to 16."""
        return self.layout.bits

    @property
    def chroma_step(self) -> tuple[int, int]:
        """Luma samples per chroma sample, across and down: (2, 2) for 4:2:0."""
        return self.layout.chroma_step

    @property
    def chroma_offset(self) -> tuple[float, float]:
        """Place of the first chroma sample, in luma samples right and down of the first one."""
        across, down = self.chroma_step
        right, below = _CHROMA_OFFSETS[self.chroma_location]
        return right if across > 1 else 0.0, below if down > 1 else 0.0

    @property
    def plane_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the planes: one byte for 8 bits, else two, in the file's order."""
        if self.bits == 8:
            return np.dtype(np.uint8)
        return np.dtype(">u2" if self.name.endswith("be") else "<u2")

    @property
    def plane_shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each plane; a chroma plane of an odd size is rounded up."""
        if self.kind == "gray":
            return [(self.height, self.width)]
        across, down = self.chroma_step
        chroma = -(-self.height // down), -(-self.width // across)
        return [(self.height, self.width), chroma, chroma]

    @property
    def matrix_used(self) -> int:
        """Number of the matrix: the tag's, or BT.709 from 720 lines on, else BT.601."""
        if self.tags.matrix != UNSPECIFIED:
            return self.tags.matrix
        return BT_709 if self.height >= _HD_LINES else BT_601

    @property
    def full_range_used(self) -> bool:
        """Whether codes use all values: the tag's word, or no for luma and chroma.

        RGB always does. Untagged gray does too, as FFmpeg reads it.
        """
        if self.kind == "rgb" or self.name.startswith("yuvj"):
            return True
        if self.tags.full_range is not None:
            return self.tags.full_range
        return self.kind == "gray"

    def notes(self) -> list[str]:
        """Sentences on what the file leaves open and how it is read."""
        said = []
        if self.kind == "yuv" and self.tags.matrix == UNSPECIFIED:
            name = "BT.709" if self.matrix_used == BT_709 else "BT.601"
            said.append(f"no color matrix is tagged: {name} is used ({self.height} lines)")
        if self.kind != "rgb" and self.tags.full_range is None and not self.full_range_used:
            said.append("no range is tagged: limited range is used")
        return said

    def resized(self, width: int, height: int) -> PictureFormat:
        """Return the format of a larger or smaller picture of the same colors.

        A matrix that was assumed by the number of lines is tagged where players would now assume
        the other one.
        """
        new = replace(self, width=width, height=height)
        if self.kind == "yuv" and new.matrix_used != self.matrix_used:
            new = replace(new, tags=replace(self.tags, matrix=self.matrix_used))
        return new

    @property
    def layout(self) -> SampleLayout:
        """Kind and bits of the samples, and the chroma step, from the name."""
        if (layout := sample_layout(self.name)) is None:
            raise unknown_layout(self.name)
        return layout


def picture_format_of(frame: av.VideoFrame, chroma_location: int = 0) -> PictureFormat:
    """Return the format of a decoded frame, as if opaque.

    Raises:
        VideoError: It cannot be converted.
    """
    ranges = {1: False, 2: True}
    tags = ColorTags(
        frame.color_primaries, frame.color_trc, frame.colorspace, ranges.get(frame.color_range)
    )
    name = opaque_name(frame.format.name)
    return PictureFormat(frame.width, frame.height, name, tags, chroma_location)


def range_number(format: PictureFormat) -> int:
    """Return FFmpeg's number of the range that a format states: 0 none, 1 limited, 2 full."""
    if format.kind == "rgb" or format.name.startswith("yuvj"):
        return 2
    return 0 if format.tags.full_range is None else 1 + format.tags.full_range


def frame_planes(frame: av.VideoFrame, format: PictureFormat) -> list[np.ndarray]:
    """Return a frame's samples as arrays (rows, columns), which are views of the frame.

    Raises:
        VideoError: Rows are stored from the bottom up.
    """
    shapes, dtype = format.plane_shapes, format.plane_dtype
    if letters := format.layout.packed:
        rows, size = _rows(frame, 0, dtype), len(letters)
        return [
            rows[:, letters.index(letter) :: size // letters.count(letter)][:high, :wide]
            for letter, (high, wide) in zip(format.kind, shapes, strict=True)
        ]
    order = (2, 0, 1) if format.kind == "rgb" else range(len(shapes))  # stored as G, B, R
    return [
        _rows(frame, index, dtype)[:high, :wide]
        for index, (high, wide) in zip(order, shapes, strict=True)
    ]


def alpha_of(frame: av.VideoFrame, format: PictureFormat) -> np.ndarray:
    """Return the transparency (H, W) of a frame that has it and is otherwise of a ``format``."""
    dtype = format.plane_dtype
    if letters := format.layout.packed:
        alpha = _rows(frame, 0, dtype)[:, letters.index("0") :: len(letters)]
    else:
        alpha = _rows(frame, 3, dtype)
    return alpha[: format.height, : format.width]


def frame_from_planes(planes: Sequence[np.ndarray], format: PictureFormat) -> av.VideoFrame:
    """Return a new frame with these samples, in `frame_planes`'s order, and the format's color."""
    frame = load_av().VideoFrame(format.width, format.height, format.name)
    for view, plane in zip(frame_planes(frame, format), planes, strict=True):
        view[:] = plane
    tags = format.tags
    frame.color_primaries, frame.color_trc = tags.primaries, tags.transfer
    frame.colorspace = tags.matrix
    frame.color_range = range_number(format)
    return cast("av.VideoFrame", frame)


def _rows(frame: av.VideoFrame, index: int, dtype: np.dtype[np.generic]) -> np.ndarray:
    """Return the samples of one of FFmpeg's planes, padding included."""
    plane = frame.planes[index]
    if plane.line_size < 0:  # PyAV's buffer would begin at the last row in memory
        raise VideoError(
            "frames are stored from the bottom up, which cannot be read",
            hint="convert them first: ffmpeg -i IN -c:v ffv1 OUT.mkv",
        )
    samples = np.frombuffer(cast("memoryview", plane), dtype)
    return samples.reshape(-1, plane.line_size // dtype.itemsize)
