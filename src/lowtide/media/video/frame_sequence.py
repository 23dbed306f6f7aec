"""Sequences of image files as videos: facts, headers, and frames, read and written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.core.errors import ImageError, UsageError, VideoError
from lowtide.core.input_file import file_sha256
from lowtide.media.image_facts import ImageFacts, open_decoder
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import open_sink
from lowtide.media.image_source import open_image
from lowtide.media.metadata import ImageMetadata
from lowtide.media.video.frame_pattern import FrameFile, FramePattern
from lowtide.media.video.opened_video import damaged_error
from lowtide.media.video.packet_times import frame_rate
from lowtide.media.video.picture_format import UNSPECIFIED, PictureFormat
from lowtide.media.video.video_facts import VideoFacts, display_matrix
from lowtide.media.video.video_reader import StoredFrame

_MOST_A_SECOND = 1000

# Limits are those of the job, for all kinds of frames.
ANY_SIZE = 1 << 62
# By channels and sample type.
_FORMATS = {
    (1, "uint8"): "gray",
    (1, "uint16"): "gray16le",
    (3, "uint8"): "gbrp",
    (3, "uint16"): "gbrp16le",
}


@dataclass(frozen=True, eq=False)
class FrameSequenceFacts(VideoFacts):
    """Facts of image files, as those of a video whose stamps are the numbers of the files.

    Attributes:
        pattern: Names of the files.
        files: The files, one per stamp.
        decoding: Upper bound and usual bytes of decoding one, without its samples.
        icc: Color profile of the first one, or None.
        has_times: Whether frames a second are known; else the time base is a whole second.
    """

    pattern: FramePattern
    files: tuple[FrameFile, ...]
    decoding: tuple[int, int]
    icc: bytes | None
    has_times: bool

    @property
    def numbers(self) -> np.ndarray:
        """Numbers of the files (N,)."""
        return np.array([one.number for one in self.files])

    @property
    def extent(self) -> str:
        """Which frames there are, for texts."""
        return f"frames {self.files[0].number} to {self.files[-1].number}"

    def content_sha256(self, first: int, last: int) -> str:
        """Return a hash of the files ``first`` to before ``last``, names included."""
        whole = hashlib.sha256()
        for one in self.files[first:last]:
            path = self.pattern.file(one.number)
            whole.update(f"{path.name} {file_sha256(path)}\n".encode())
        return whole.hexdigest()


def inspect_sequence(pattern: FramePattern, fps: str | float | None) -> FrameSequenceFacts:
    """Return the facts of a sequence; lists the folder and reads a header.

    Args:
        pattern: Names of the files.
        fps: Frames a second: a number, or a fraction such as ``"24000/1001"``; None if unknown.

    Raises:
        VideoError: There are no files, or none can be a frame of a video.
        UsageError: ``fps`` is no rate.
    """
    files = tuple(pattern.files())
    facts = FrameSequenceFacts(
        path=pattern.path,
        format=PictureFormat(0, 0, "gbrp"),
        stamps=np.array([one.number for one in files], np.int64) - files[0].number,
        time_base=1 / (Fraction(1) if fps is None else _rate(fps)),
        last_duration=1,
        container="image2",
        codec="",
        stream=-1,
        rotation=0,
        mirrored=False,
        pixel_aspect=None,
        light=None,
        ordered=True,
        damage=None,
        notes=(),
        pattern=pattern,
        files=files,
        decoding=(0, 0),
        icc=None,
        has_times=fps is not None,
    )
    return _described(facts, _first_header(pattern, files))


def sequence_part(
    facts: FrameSequenceFacts, first: int, last: int, *, keep_damaged: bool = False
) -> FrameSequenceFacts:
    """Return the facts as the header of file ``first`` has them, after a look at all to ``last``.

    Raises:
        VideoError: A file is missing, or is not as the first one is; with ``keep_damaged`` one that
            cannot be read is left to the reader.
    """
    files = facts.files[first:last]
    return _described(facts, _common_header(facts.pattern, files, keep_damaged))


def _described(facts: FrameSequenceFacts, header: FrameHeader) -> FrameSequenceFacts:
    """Return facts with the format that a header states."""
    return replace(
        facts,
        format=header.format,
        codec=header.facts.format.lower(),
        notes=header.facts.notes,
        decoding=(header.facts.resident_bytes, header.facts.typical_bytes),
        icc=header.icc,
    )


@functools.lru_cache(maxsize=4)  # asked for before a model is loaded, and after
def _common_header(
    pattern: FramePattern, files: tuple[FrameFile, ...], keep_damaged: bool
) -> FrameHeader:
    """Return the header that all files have; raises `VideoError` for one that differs."""
    first, begin = files if keep_damaged else files[:1], pattern.name(files[0].number)
    usual = _first_header(pattern, first)
    for before, one in pairwise(files):
        due, path = before.number + 1, pattern.file(one.number)
        hint = f"--frames {files[0].number}:{due}, and the rest in another run"
        if one.number > due:
            raise VideoError(
                f"{pattern.file(due)}: this frame is missing, between"
                f" {pattern.name(before.number)} and {path.name}",
                hint=hint,
            )
        try:
            found = read_header(path)
        except ImageError as error:
            if keep_damaged:
                continue
            raise damaged_frame(path, error) from error
        if (change := describe_difference(found, usual)) is not None:
            raise VideoError(f"{path}: {change} as {begin}", hint=hint)
    return usual


def _first_header(pattern: FramePattern, files: Sequence[FrameFile]) -> FrameHeader:
    """Return the header of the first file that can be read; raises `VideoError` if none can."""
    for one in files:
        with contextlib.suppress(ImageError):
            return read_header(pattern.file(one.number))
    path = pattern.file(files[0].number)
    try:
        return read_header(path)
    except ImageError as error:
        raise damaged_frame(path, error) from error


class FrameSequenceReader:
    """Frames ``first`` to before ``last`` of a sequence, as an iterator.

    Args:
        facts: The sequence's facts.
        keep_damaged: Files that cannot be decoded are left out, instead of an error.

    Raises:
        VideoError: While it iterates: a file cannot be decoded, or is of another size than the
            first one.
    """

    def __init__(
        self, facts: FrameSequenceFacts, first: int, last: int, *, keep_damaged: bool = False
    ) -> None:
        self._facts, self._first, self._last = facts, first, last
        self._keep = keep_damaged

    def __iter__(self) -> Iterator[StoredFrame]:
        """Iterate over the frames."""
        for index in range(self._first, self._last):
            path = self._facts.pattern.file(self._facts.files[index].number)
            try:
                rows = read_frame(path)
            except ImageError as error:
                if self._keep:
                    continue
                raise damaged_frame(path, error) from error
            format = self._facts.format
            rows = rows[..., : len(format.plane_shapes)]  # an alpha channel is opaque
            due = (format.height, format.width, len(format.plane_shapes))
            if (rows.shape, rows.itemsize) != (due, format.plane_dtype.itemsize):
                raise VideoError(f"{path}: the file changed while it was waiting to be read")
            planes = [rows[..., channel] for channel in range(rows.shape[2])]
            yield StoredFrame(index, int(self._facts.stamps[index]), planes)


def read_frame(path: Path) -> np.ndarray:
    """Return all samples of an image file, (H, W, C); raises `ImageError` if it is damaged."""
    with open_image(path, max_pixels=ANY_SIZE) as source:
        return source.read(0, source.info.height)


def _rate(fps: str | float) -> Fraction:
    try:
        rate = Fraction(str(fps))
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if not 0 < rate <= _MOST_A_SECOND:
        raise UsageError(
            f"--fps {fps} is not a number of frames a second", hint="--fps 24, or 24000/1001"
        )
    return rate


class FrameHeader(NamedTuple):
    """Header of an image file, and its color profile or None."""

    facts: ImageFacts
    icc: bytes | None

    @property
    def format(self) -> PictureFormat:
        """How its samples are those of a frame."""
        info = self.facts.info
        name = _FORMATS[info.color_channels, info.sample_type]
        return PictureFormat(info.width, info.height, name)


def read_header(path: Path) -> FrameHeader:
    """Return the header of a frame's file; one with an alpha channel is decoded too.

    Raises:
        ImageError: It cannot be read.
        VideoError: Its samples are of a kind that videos do not have.
    """
    opened = open_decoder(path, ANY_SIZE, decode=False)
    info = opened.facts.info
    kind = None
    if (info.color_channels, info.sample_type) not in _FORMATS:
        kind = f"samples are {info.sample_type}"
    elif opened.facts.color is not None and opened.facts.color.description is None:
        kind = f"its color is {opened.facts.color.name}"
    elif info.alpha and read_frame(path)[..., -1].min() < info.full_scale:
        kind = "it has transparency"
    if kind is not None:
        raise VideoError(
            f"{path}: {kind}, which videos do not keep",
            hint=f"lowtide upscale {path.parent} -o FOLDER does, image by image",
        )
    return FrameHeader(opened.facts, opened.metadata.icc)


def describe_difference(found: FrameHeader, usual: FrameHeader) -> str | None:
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
