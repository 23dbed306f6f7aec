"""Facts of a video file before it is run: its pictures' format, and the stamp of every frame.

Frames are counted and stamped by the file's packets: neither the number of frames nor the rate
that a header states is used, since both may be wrong.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lowtide.core.errors import UsageError, VideoError
from lowtide.core.input_file import require_input
from lowtide.media.video.opened_video import (
    damaged_error,
    decoder_of,
    has_separate_alpha,
    load_av,
    open_video,
    readable_packets,
)
from lowtide.media.video.picture_format import PictureFormat, picture_format_of
from lowtide.media.video.side_data import (
    NO_CROP,
    Hdr10Light,
    PictureCrop,
    crop_of,
    cropped_format,
    frame_side_data,
    light_of,
)
from lowtide.media.video.video_packets import checked_stamps, decode_stamps, read_packets

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_DOLBY_TAGS = ("dvh1", "dvhe", "dva1", "dvav", "dav1")

# FFmpeg's numbers of the place that formats mean which state none.
_LOCATIONS = {"mjpeg": 2, "mpeg1video": 2, "dvvideo": 3}
# H.264 and H.265 count from left (0); AV1 knows left (1) and top left (2).
_STATED = re.compile(r"(chroma_sample_loc_type_top_field|chroma_sample_position)\s.*= (\d)")
_OF_AV1 = {1: 1, 2: 3}

_ONE = 1 << 16  # a factor of 1 in the matrix's fixed-point numbers
_ONE_OF_LAST = 1 << 30


@dataclass(frozen=True, eq=False, kw_only=True)
class VideoFacts:
    """Format of a video's frames, and their time stamps.

    Attributes:
        path: The file.
        format: How frames are stored that are shown: without what the file crops, as if opaque.
        stamps: When each frame is shown, (N,) int64 in units of ``time_base``, increasing.
        time_base: Seconds of a unit.
        last_duration: How long the last frame is shown, in units of ``time_base``; 0 if unknown.
        container: FFmpeg's name of the container: ``matroska,webm``.
        codec: FFmpeg's name of the codec: ``h264``.
        stream: Index of the stream in the file.
        rotation: Degrees by which players turn frames, counterclockwise.
        mirrored: Whether players mirror them.
        pixel_aspect: Width of a pixel by its height, or None where the file does not say.
        light: Light levels of HDR10, or None.
        ordered: Whether decoded frames have their own stamps; else those in order are theirs.
        damage: What is wrong with the file, or None.
        notes: What was assumed.
        crop: What the container leaves out of decoded frames.
        has_alpha: Whether frames are stored with transparency.
        deinterlaces: Whether interlaced frames are made whole.
    """

    path: Path
    format: PictureFormat
    stamps: np.ndarray
    time_base: Fraction
    last_duration: int
    container: str
    codec: str
    stream: int
    rotation: int
    mirrored: bool
    pixel_aspect: Fraction | None
    light: Hdr10Light | None
    ordered: bool
    damage: str | None
    notes: tuple[str, ...]
    crop: PictureCrop = NO_CROP
    has_alpha: bool = False
    deinterlaces: bool = False

    @property
    def decoded(self) -> PictureFormat:
        """How frames come from the decoder, with what is cropped."""
        format, (left, right, top, bottom) = self.format, self.crop
        return replace(
            format, width=left + format.width + right, height=top + format.height + bottom
        )

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.stamps)

    @property
    def numbers(self) -> np.ndarray:
        """Numbers of the frames (N,): from 0, or those of image files."""
        return np.arange(self.frames)

    @property
    def extent(self) -> str:
        """How many frames there are, for texts."""
        return f"{self.frames} over {self.seconds(self.frames - 1) - self.seconds(0):.2f} s"

    def seconds(self, index: int) -> float:
        """Return when frame ``index`` is shown, in seconds."""
        return float(int(self.stamps[index]) * self.time_base)


def inspect_video(
    path: Path, *, keep_damaged: bool = False, deinterlace: bool = False
) -> VideoFacts:
    """Return the facts of a video file; reads all its packets and decodes one frame.

    Args:
        keep_damaged: Accept a file that ends too early; ``damage`` of the facts says so.
        deinterlace: Accept interlaced frames, which `VideoReader` makes whole.

    Raises:
        VideoError: There is no picture stream, no frame or no stamp, the file is damaged, or its
            frames are of a kind that is not supported.
        UsageError: PyAV is not installed.
    """
    status = require_input(path, VideoError)
    facts = _inspect(path, status.st_mtime_ns, status.st_size, deinterlace)
    if facts.damage is not None and not keep_damaged:
        raise damaged_error(path, facts.damage)
    return facts


@functools.lru_cache(maxsize=16)
def _inspect(path: Path, _changed: int, _size: int, deinterlace: bool) -> VideoFacts:
    packets = read_packets(path)
    if not packets.ordered:
        decode_stamps(path, packets)
    stamps = checked_stamps(path, packets)
    with open_video(path) as (container, stream):
        first, location = _first_frame(path, container, stream, deinterlace)
        crop = crop_of(container, stream)
        try:
            format = picture_format_of(first, location)
            shown = cropped_format(format, crop)
        except VideoError as error:
            raise VideoError(f"{path}: {error.message}", hint=error.hint) from error
        facts = VideoFacts(
            path=path,
            format=shown,
            stamps=stamps,
            time_base=packets.time_base,
            last_duration=packets.last_duration,
            container=container.format.name,
            codec=stream.codec_context.name,
            stream=stream.index,
            rotation=first.rotation,
            mirrored=is_mirrored(first),
            pixel_aspect=stream.sample_aspect_ratio or None,
            light=light_of(first),
            ordered=packets.ordered,
            damage=packets.damage,
            notes=(),
            crop=crop,
            has_alpha=first.format.name != format.name or has_separate_alpha(stream),
            deinterlaces=deinterlace,
        )
        return replace(facts, notes=(*packets.notes, *_notes(format, facts, first)))


def _notes(decoded: PictureFormat, facts: VideoFacts, first: VideoFrame) -> list[str]:
    """Return sentences on how the frames of a file are read."""
    said, format = decoded.notes(), facts.format
    if facts.crop != NO_CROP:
        said.append(f"the file crops {facts.crop}: frames are {format.width}×{format.height}")
    if facts.deinterlaces and first.interlaced_frame:
        said.append("interlaced frames are made whole, one of each: number, times and rate stay")
    elif facts.deinterlaces:
        said.append("the first frame is not marked as interlaced: only marked ones are made whole")
    return said


def _first_frame(
    path: Path, container: InputContainer, stream: VideoStream, deinterlace: bool
) -> tuple[VideoFrame, int]:
    """Return the first frame that can be decoded, and the place of its chroma samples.

    Raises `VideoError` for a kind that is not supported.
    """
    av = load_av()
    tag, frame, location = stream.codec_context.codec_tag, None, None
    decoder = decoder_of(stream)
    for packet in readable_packets(container.demux(stream)):
        if location is None:
            location = chroma_location(stream, packet)
        try:
            frame = next(iter(decoder.decode(packet)), None)
        except av.error.FFmpegError:
            continue  # a damaged beginning: `VideoReader` says which frames are missing
        if frame is not None:
            break
    if frame is None:
        raise VideoError(f"{path}: damaged: no frame of it can be decoded")
    require_deinterlaceable(path, frame, stream.codec_context.name, deinterlace)
    _require_no_dolby_vision(path, frame, tag)
    return frame, location or 0


def require_deinterlaceable(path: Path, frame: VideoFrame, codec: str, deinterlace: bool) -> None:
    """Raise `VideoError` for an interlaced frame that is not to be made whole, or cannot be.

    Frames of interlaced H.265 are half pictures, of which others hold two.
    """
    if frame.interlaced_frame and codec == "hevc":
        raise VideoError(
            f"{path}: interlaced: each frame of this H.265 is a half picture",
            hint=f"ffmpeg -i {path} -vf weave,bwdif -c:a copy progressive.mkv",
        )
    if frame.interlaced_frame and not deinterlace:
        raise VideoError(
            f"{path}: interlaced: a frame is two half pictures of different times",
            hint="--deinterlace makes whole frames of them",
        )


def _require_no_dolby_vision(path: Path, frame: VideoFrame, tag: str) -> None:
    """Raise `VideoError` for a file of Dolby Vision, by its first frame.

    Not for every frame: side data and its frame hold each other, until the garbage collector comes.
    """
    sides = cast("list[Any]", frame_side_data(frame).keys())
    dolby = {"DOVI_METADATA", "DOVI_RPU_BUFFER"} & {one.type.name for one in sides}
    if dolby or tag in _DOLBY_TAGS:
        raise VideoError(
            f"{path}: Dolby Vision, whose colors need its own metadata, which would be lost",
            hint=f"ffmpeg -i {path} -c copy -bsf:v dovi_rpu=strip=1 plain.mkv"
            " leaves the HDR10 or HLG picture, if it has one",
        )


def chroma_location(stream: VideoStream, packet: av.Packet) -> int:
    """Return FFmpeg's number of the chroma location of a stream; 0 where it states none.

    FFmpeg's frames do not show it in Python.

    Args:
        stream: Video stream of an open file.
        packet: Its first packet, where the headers of some streams are.
    """
    av = load_av()
    name = stream.codec_context.name
    if name in _LOCATIONS:
        return _LOCATIONS[name]
    if name not in ("h264", "hevc", "av1", "libdav1d"):
        return 0
    level = av.logging.get_level()
    av.logging.set_level(av.logging.TRACE)
    try:
        with av.logging.Capture() as lines, contextlib.suppress(av.error.FFmpegError):
            # A packet that it cannot read is damaged, and is told where it is decoded.
            filter = av.bitstream.BitStreamFilterContext("trace_headers", stream)
            filter.filter(av.Packet(bytes(packet)))  # it takes the bytes away
    finally:
        av.logging.set_level(level)
    for _, _, line in lines:
        if found := _STATED.search(line):
            number = int(found[2])
            return _OF_AV1.get(number, 0) if "position" in found[1] else 1 + number
    return 0


def is_mirrored(frame: VideoFrame) -> bool:
    """Whether players mirror a decoded frame, which its ``rotation`` does not say."""
    data = frame_side_data(frame).get("DISPLAYMATRIX")
    if data is None:
        return False
    (a, b, _), (c, d, _), _ = np.frombuffer(bytes(data), np.int32).reshape(3, 3).tolist()
    return a * d - b * c < 0


def display_matrix(rotation: int, mirrored: bool) -> list[int]:
    """Matrix of nine numbers that turns and mirrors a picture.

    Args:
        rotation: Degrees counterclockwise, as PyAV reads it from a frame, mirrored or not.
        mirrored: Whether the second axis is turned over.
    """
    sine, cosine = (round(_ONE * turn(math.radians(rotation))) for turn in (math.sin, math.cos))
    side = -1 if mirrored else 1
    return [cosine, -sine, 0, side * sine, side * cosine, 0, 0, 0, _ONE_OF_LAST]


def frame_range(facts: VideoFacts, frames: str | None, time: str | None) -> tuple[int, int]:
    """Return the first frame and the one after the last that ``A:B`` names; all by default.

    ``frames`` are numbers from 0, or those of image files; ``time`` is in seconds from the first
    frame.

    Raises:
        UsageError: The text is no range, or holds no frame.
    """
    if frames is not None:
        first, last = _parse(frames, "--frames", "24:48", int)
        numbers = facts.numbers
        start = int(np.searchsorted(numbers, first or 0))
        stop = facts.frames if last is None else int(np.searchsorted(numbers, last))
    elif time is not None:
        first, last = _parse(time, "--time", "1.5:4", float)
        times = (facts.stamps - facts.stamps[0]) * float(facts.time_base)
        start = int(np.searchsorted(times, (first or 0) - 1e-6))
        stop = facts.frames if last is None else int(np.searchsorted(times, last - 1e-6))
    else:
        start, stop = 0, facts.frames
    if start >= stop:
        given = f"--frames {frames}" if frames is not None else f"--time {time}"
        raise UsageError(f"{given} holds no frame of {facts.path}, which has {facts.extent}")
    return start, stop


def _parse(text: str, option: str, example: str, kind: Any) -> tuple[Any, Any]:
    first, colon, last = text.partition(":")
    try:
        values = [kind(one) if one.strip() else None for one in (first, last)]
    except ValueError:
        values = []
    if not colon or not values or any(one is not None and one < 0 for one in values):
        raise UsageError(f"{option} {text!r} is not a range A:B", hint=f"{option} {example}")
    return values[0], values[1]
