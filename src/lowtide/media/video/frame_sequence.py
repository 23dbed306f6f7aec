"""Sequences of image files as videos: their facts, and their frames in order."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.core.errors import ImageError, UsageError, VideoError
from lowtide.core.hashing import file_sha256
from lowtide.media.image_facts import ImageFacts, open_decoder
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_source import open_image
from lowtide.media.metadata import read_metadata
from lowtide.media.video.frame_pattern import FrameFile, FramePattern
from lowtide.media.video.opened_video import damaged_error
from lowtide.media.video.picture_format import PictureFormat
from lowtide.media.video.video_facts import VideoFacts
from lowtide.media.video.video_reader import StoredFrame

# By channels and sample type.
_FORMATS = {
    (1, "uint8"): "gray",
    (1, "uint16"): "gray16le",
    (3, "uint8"): "gbrp",
    (3, "uint16"): "gbrp16le",
}
_ANY_SIZE = 1 << 62  # a limit is that of the job, for all kinds of frames
_MOST_A_SECOND = 1000


@dataclass(frozen=True, eq=False)
class SequenceFacts(VideoFacts):
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
            whole.update(f"{one.path.name} {file_sha256(one.path)}\n".encode())
        return whole.hexdigest()


def inspect_sequence(pattern: FramePattern, fps: str | float | None) -> SequenceFacts:
    """Return the facts of a sequence; lists the folder and reads one header.

    Args:
        pattern: Names of the files.
        fps: Frames a second: a number, or a fraction such as ``"24000/1001"``; None if unknown.

    Raises:
        VideoError: There are no files, or the first one cannot be a frame of a video.
        UsageError: ``fps`` is no rate.
    """
    files = tuple(pattern.files())
    facts = SequenceFacts(
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
    return _described(facts, files[0])


def sequence_part(
    facts: SequenceFacts, first: int, last: int, *, keep_damaged: bool = False
) -> SequenceFacts:
    """Return the facts as the header of file ``first`` has them, after a look at all to ``last``.

    Raises:
        VideoError: A file is missing, or is not as the first one is; with ``keep_damaged`` one that
            cannot be read is left to the reader.
    """
    files = facts.files[first:last]
    facts = _described(facts, files[0])
    for before, one in pairwise(files):
        hint = f"--frames {files[0].number}:{before.number + 1}, and the rest in another run"
        if one.number > before.number + 1:
            raise VideoError(
                f"{facts.pattern.file(before.number + 1)}: this frame is missing, between"
                f" {before.path.name} and {one.path.name}",
                hint=hint,
            )
        try:
            found = _header(one)
        except ImageError as error:
            if keep_damaged:
                continue
            raise _damaged(one.path, error) from error
        _require_frame(one.path, found.facts.info)
        if (change := _change(facts, found)) is not None:
            raise VideoError(f"{one.path}: {change} as {files[0].path.name}", hint=hint)
    return facts


def _described(facts: SequenceFacts, file: FrameFile) -> SequenceFacts:
    """Return facts with the format that a file has."""
    try:
        header = _header(file)
    except ImageError as error:
        raise VideoError(error.message, hint=error.hint) from error
    found, info = header.facts, header.facts.info
    _require_frame(file.path, info)
    return replace(
        facts,
        format=PictureFormat(info.width, info.height, _FORMATS[info.channels, info.sample_type]),
        codec=found.format.lower(),
        notes=found.notes,
        decoding=(found.resident_bytes, found.typical_bytes),
        icc=header.icc,
    )


class SequenceReader:
    """Frames ``first`` to before ``last`` of a sequence, as an iterator.

    Args:
        facts: The sequence's facts.
        keep_damaged: Files that cannot be decoded are left out, instead of an error.

    Raises:
        VideoError: While it iterates: a file cannot be decoded, or is of another size than the
            first one.
    """

    def __init__(
        self, facts: SequenceFacts, first: int, last: int, *, keep_damaged: bool = False
    ) -> None:
        self._facts, self._first, self._last = facts, first, last
        self._keep = keep_damaged

    def __iter__(self) -> Iterator[StoredFrame]:
        """Iterate over the frames."""
        for index in range(self._first, self._last):
            path = self._facts.files[index].path
            try:
                rows = read_frame(path)
            except ImageError as error:
                if self._keep:
                    continue
                raise _damaged(path, error) from error
            format = self._facts.format
            if rows.shape[:2] != (format.height, format.width):
                raise VideoError(f"{path}: the file changed while it was waiting to be read")
            planes = [rows[..., channel] for channel in range(rows.shape[2])]
            yield StoredFrame(index, int(self._facts.stamps[index]), planes)


def read_frame(path: Path) -> np.ndarray:
    """Return all samples of an image file, (H, W, C); raises `ImageError` if it is damaged."""
    with open_image(path, max_pixels=_ANY_SIZE) as source:
        return source.read(0, source.info.height)


class _Header(NamedTuple):
    facts: ImageFacts
    icc: bytes | None


@functools.lru_cache(maxsize=1 << 16)  # each is asked for before the model is loaded, and after
def _header(file: FrameFile) -> _Header:
    opened = open_decoder(file.path, _ANY_SIZE)
    return _Header(opened.facts, read_metadata(opened.image).icc)


def _require_frame(path: Path, info: ImageInfo) -> None:
    """Raise `VideoError` for samples that videos do not have."""
    if info.alpha:
        raise VideoError(
            f"{path}: it has transparency, which videos do not keep",
            hint=f"lowtide upscale {path.parent} -o FOLDER keeps it, image by image",
        )
    if (info.channels, info.sample_type) not in _FORMATS:
        raise VideoError(
            f"{path}: samples are {info.sample_type}, and frames of videos have 8 or 16 bits",
            hint=f"lowtide upscale {path.parent} -o FOLDER keeps them, image by image",
        )


def _change(facts: SequenceFacts, found: _Header) -> str | None:
    """Return what tells a frame from the first one; None if they are alike."""
    info, usual = found.facts.info, facts.format
    name = _FORMATS[info.channels, info.sample_type]
    if (info.width, info.height, name) != (usual.width, usual.height, usual.name):
        return (
            f"{info.width}×{info.height} {name}, and not {usual.width}×{usual.height} {usual.name}"
        )
    return "its color profile is not the same" if found.icc != facts.icc else None


def _damaged(path: Path, error: ImageError) -> VideoError:
    return damaged_error(path, error.message.removeprefix(f"{path}: "))


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
