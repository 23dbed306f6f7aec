"""Facts of a video file before it is run: its pictures' format, and the stamp of every frame.

Frames are counted and stamped by the file's packets: neither the number of frames nor the rate
that a header states is used, since both may be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.chroma_location import chroma_location
from lowtide.media.video.display_matrix import is_mirrored
from lowtide.media.video.hdr10_light import Hdr10Light, light_of
from lowtide.media.video.opened_video import ffmpeg_name, is_cover, packets_with_data
from lowtide.media.video.picture_format import PictureFormat, format_of
from lowtide.media.video.pyav import load_av

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_DOLBY_TAGS = ("dvh1", "dvhe", "dva1", "dvav", "dav1")
# Streams may end a little before the duration in a header: a cut file ends earlier.
_END_SECONDS = Fraction(1, 2)
# AVI stamps frames in the order in which they are stored, which is not always that of display.
_STORED_ORDER = "avi"
_STILL = "image2"


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


def damaged_error(path: Path, damage: str) -> VideoError:
    """Return the error of a damaged file."""
    return VideoError(f"{path}: damaged: {damage}", hint="--damaged keep takes what is there")


@contextmanager
def open_video(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its stream of pictures, which is the first that is no cover art.

    Raises:
        VideoError: It cannot be read, or has none.
    """
    av = load_av()
    try:
        container = av.open(ffmpeg_name(path), metadata_errors="replace")
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(
            f"{path}: not a video, or cut short: {error.strerror}",
            hint="the end of an .mp4 or .mov file holds its index, without which nothing is found",
        ) from error
    with container:
        found = [one for one in container.streams.video if not is_cover(one)]
        if not found:
            kinds = ", ".join(sorted({one.type for one in container.streams})) or "nothing"
            raise VideoError(f"{path}: no stream of pictures, only {kinds}")
        if container.format.name.startswith(_STILL) or container.format.name.endswith("_pipe"):
            raise VideoError(f"{path}: a picture", hint=f"lowtide upscale {path} -o OUTPUT")
        yield container, found[0]


@dataclass
class _Packets:
    """What the packets of a file say: stamps of frames, and when its last stream ends."""

    time_base: Fraction
    stamps: list[int] = field(default_factory=list)
    missing: int = 0
    hidden: int = 0
    last_duration: int = 0
    end: Fraction = Fraction(0)
    header_end: Fraction = Fraction(0)
    ordered: bool = True

    @property
    def notes(self) -> list[str]:
        """Frames that players do not show."""
        if not self.hidden:
            return []
        return [
            f"{self.hidden} frames before the first one are hidden, as the file's edit list says"
        ]

    @property
    def damage(self) -> str | None:
        """What a file that ends before its header says is called."""
        if self.header_end - self.end <= _END_SECONDS:
            return None
        said = f"{float(self.header_end):.2f} s"
        return f"it ends after {float(self.end):.2f} s, and its header says {said}"

    def add(self, packet: Any, pictures: bool) -> None:
        stamp = packet.dts if packet.pts is None else packet.pts
        if stamp is not None:
            end = (stamp + (packet.duration or 0)) * packet.time_base
            self.end = max(self.end, end)
        if not pictures:
            return
        if packet.is_discard:
            self.hidden += 1
            return
        if packet.pts is None:
            self.missing += 1
            return
        if not self.stamps or packet.pts > max(self.stamps[-64:]):
            self.last_duration = packet.duration or 0
        self.stamps.append(packet.pts)


@functools.lru_cache(maxsize=16)
def _inspect(path: Path, _changed: int, _size: int) -> VideoFacts:
    packets = _read_packets(path)
    if not packets.ordered:
        packets.stamps = _decoded_stamps(path)
    stamps = _checked_stamps(path, packets)
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


def _read_packets(path: Path) -> _Packets:
    """Read all packets; raises `VideoError` where that fails."""
    av = load_av()
    with open_video(path) as (container, stream):
        packets = _Packets(stream.time_base or Fraction(1, av.time_base))
        packets.ordered = container.format.name != _STORED_ORDER
        try:
            for packet in packets_with_data(container.demux()):
                packets.add(packet, packet.stream.index == stream.index)
        except av.error.FFmpegError as error:
            raise damaged_error(path, error.strerror) from error
        # From 0 on; in formats that count from the first packet, it is found in the packets.
        packets.header_end = Fraction(container.duration or 0, av.time_base)
    return packets


def _decoded_stamps(path: Path) -> list[int]:
    """Return the stamps of all frames of a file whose packets are more than its frames."""
    av = load_av()
    with open_video(path) as (container, stream):
        try:
            return [frame.pts for frame in container.decode(stream) if frame.pts is not None]
        except av.error.FFmpegError as error:
            raise damaged_error(path, str(error.strerror)) from error


def _checked_stamps(path: Path, packets: _Packets) -> np.ndarray:
    """Return the stamps in order; raises `VideoError` where frames have none of their own."""
    if packets.missing:
        raise VideoError(
            f"{path}: {packets.missing} of {packets.missing + len(packets.stamps)} frames have no"
            " time stamp",
            hint=f"give it stamps: ffmpeg -fflags +genpts -r 25 -i {path} -c copy stamped.mkv",
        )
    stamps = np.array(sorted(packets.stamps), np.int64)
    if not len(stamps):
        raise VideoError(f"{path}: its stream of pictures has no frames")
    equal = np.flatnonzero(np.diff(stamps) == 0)
    if len(equal):
        place = int(equal[0])
        seconds = float(int(stamps[place]) * packets.time_base)
        raise VideoError(
            f"{path}: frames {place} and {place + 1} have the same time stamp, {seconds:.3f} s"
            f" ({len(equal)} such frames)",
            hint=f"give it stamps of its own: ffmpeg -i {path} -fps_mode cfr stamped.mkv",
        )
    return stamps


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
