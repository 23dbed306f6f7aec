"""Facts of a video file before it is run: its pictures' format, and the stamp of every frame.

Frames are counted and stamped by the file's packets: neither the number of frames nor the rate
that a header states is used, since both may be wrong.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.chroma_location import chroma_location
from lowtide.media.video.display_matrix import is_mirrored
from lowtide.media.video.hdr10_light import Hdr10Light, light_of
from lowtide.media.video.opened_video import damaged_error, open_video
from lowtide.media.video.picture_format import PictureFormat, format_of
from lowtide.media.video.pyav import load_av
from lowtide.media.video.video_packets import checked_stamps, decoded_stamps, read_packets

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_DOLBY_TAGS = ("dvh1", "dvhe", "dva1", "dvav", "dav1")


@dataclass(frozen=True, eq=False)
class VideoFacts:
    """Format of a video's frames, and their time stamps.

    Attributes:
        path: The file.
        format: How frames are stored.
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


def inspect_video(path: Path, *, keep_damaged: bool = False) -> VideoFacts:
    """Return the facts of a video file; reads all its packets and decodes one frame.

    Args:
        keep_damaged: Accept a file that ends too early; ``damage`` of the facts says so.

    Raises:
        VideoError: There is no picture stream, no frame or no stamp, the file is damaged, or its
            frames are of a kind that is not supported.
        UsageError: PyAV is not installed.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise VideoError(f"{path}: cannot be read: {error.strerror}") from error
    facts = _inspect(path, status.st_mtime_ns, status.st_size)
    if facts.damage is not None and not keep_damaged:
        raise damaged_error(path, facts.damage)
    return facts


@functools.lru_cache(maxsize=16)
def _inspect(path: Path, _changed: int, _size: int) -> VideoFacts:
    packets = read_packets(path)
    if not packets.ordered:
        packets.stamps = decoded_stamps(path)
    stamps = checked_stamps(path, packets)
    with open_video(path) as (container, stream):
        first, location = _first_frame(path, container, stream)
        try:
            format = format_of(first, location)
        except VideoError as error:
            raise VideoError(f"{path}: {error.message}", hint=error.hint) from error
        return VideoFacts(
            path=path,
            format=format,
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
            notes=(*packets.notes, *format.notes()),
        )


def _first_frame(
    path: Path, container: InputContainer, stream: VideoStream
) -> tuple[VideoFrame, int]:
    """Return the first frame that can be decoded, and the place of its chroma samples.

    Raises `VideoError` for a kind that is not supported.
    """
    av = load_av()
    tag, frame, location = stream.codec_context.codec_tag, None, None
    for packet in container.demux(stream):
        if location is None:
            location = chroma_location(stream, packet)
        try:
            frame = next(iter(packet.decode()), None)
        except av.error.FFmpegError:
            continue  # a damaged beginning: `VideoReader` says which frames are missing
        if frame is not None:
            break
    if frame is None:
        raise damaged_error(path, "no frame of it can be decoded")
    require_progressive(path, frame)
    _require_no_dolby_vision(path, frame, tag)
    return frame, location or 0


def require_progressive(path: Path, frame: VideoFrame) -> None:
    """Raise `VideoError` for a frame that is interlaced."""
    if frame.interlaced_frame:
        raise VideoError(
            f"{path}: interlaced: a frame is two half pictures of different times",
            hint=f"ffmpeg -i {path} -vf bwdif -c:a copy progressive.mkv",
        )


def _require_no_dolby_vision(path: Path, frame: VideoFrame, tag: str) -> None:
    """Raise `VideoError` for a file of Dolby Vision, by its first frame.

    Not for every frame: side data and its frame hold each other, until the garbage collector comes.
    """
    sides = cast("list[Any]", frame.side_data.keys())
    dolby = {"DOVI_METADATA", "DOVI_RPU_BUFFER"} & {one.type.name for one in sides}
    if dolby or tag in _DOLBY_TAGS:
        raise VideoError(
            f"{path}: Dolby Vision, whose colors need its own metadata, which would be lost",
            hint=f"ffmpeg -i {path} -c copy -bsf:v dovi_rpu=strip=1 plain.mkv"
            " leaves the HDR10 or HLG picture, if it has one",
        )
