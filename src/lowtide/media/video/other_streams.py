"""What becomes of a video file's streams in the output: sound, subtitles, fonts, cover art."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from lowtide.core.errors import InputError, UsageError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream

Action = Literal["enlarged", "copied", "converted", "dropped"]

# Container formats by the ending of the output's name, as FFmpeg calls them.
CONTAINERS = {
    ".mp4": "mp4",
    ".m4v": "mp4",
    ".mov": "mov",
    ".mkv": "matroska",
    ".webm": "webm",
}
# Why other containers are refused.
_UNFIT = {
    ".avi": "AVI has one frame rate and no time stamps of its own",
    ".ts": "MPEG transport streams begin at a time of their own",
    ".m2ts": "MPEG transport streams begin at a time of their own",
    ".mpg": "MPEG program streams begin at a time of their own",
    ".flv": "FLV holds one picture and one sound stream only",
    ".gif": "GIF holds no sound and 256 colors",
}
# Subtitles of plain text: what each container has for them.
_TEXT_CODECS = {"mp4": "mov_text", "mov": "mov_text", "matroska": "subrip", "webm": "webvtt"}
_PLAIN_TEXT = ("subrip", "srt", "mov_text", "webvtt", "text")
_COVER = {"mjpeg": "image/jpeg", "png": "image/png"}


@dataclass(frozen=True)
class PlannedStream:
    """A stream of the source, and what becomes of it.

    Attributes:
        index: Its place in the source.
        kind: ``video``, ``audio``, ``subtitle``, ``attachment`` or ``data``.
        codec: FFmpeg's name of its codec, or of the kind of data.
        action: What becomes of it; ``enlarged`` is the picture.
        into: Codec of a converted stream, or ``attachment`` of a cover picture.
        reason: Why it is converted or dropped.
        label: Language and title, where it has them.
    """

    index: int
    kind: str
    codec: str
    action: Action
    into: str = ""
    reason: str = ""
    label: str = ""

    def __str__(self) -> str:
        name = f"{self.kind} {self.index} ({', '.join(filter(None, (self.codec, self.label)))})"
        into = f" into {self.into}" if self.into else ""
        return f"{name}: {self.action}{into}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class StreamPlan:
    """Streams of an output file, decided before work starts.

    Attributes:
        source: File whose other streams are copied; None of an image sequence.
        container: FFmpeg's name of the output's format.
        picture: Index of the picture stream in the source, or -1.
        streams: Every stream of the source.
        notes: What else of the source the output cannot hold.
    """

    source: Path | None
    container: str
    picture: int = -1
    streams: tuple[PlannedStream, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[PlannedStream, ...]:
        """The copied and converted streams."""
        return tuple(s for s in self.streams if s.action in ("copied", "converted"))


def load_av() -> ModuleType:
    """Import PyAV; raises `UsageError` where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise UsageError(
            "video files need PyAV, which is not installed", hint="pip install 'lowtide[video]'"
        ) from error
    return av


def container_of(target: Path) -> str:
    """FFmpeg's name of the container that ``target``'s ending asks for.

    Raises:
        UsageError: Video is not written into such a file.
    """
    ending = target.suffix.lower()
    if ending not in CONTAINERS:
        why = _UNFIT.get(ending, f"{ending or 'no ending'} is no container that Lowtide writes")
        raise UsageError(
            f"{target}: {why}; output files end in {', '.join(CONTAINERS)}",
            hint=f"name the output {target.with_suffix('.mkv').name}",
        )
    return CONTAINERS[ending]


def plan_streams(source: Path | None, target: Path, *, codec: str) -> StreamPlan:
    """Plan of what becomes of each stream of ``source`` in a file named ``target``.

    Args:
        source: A video file, or None where the frames come from images.
        target: Name of the output, whose ending is the container.
        codec: FFmpeg's name of the new picture's codec: h264, hevc, av1, prores or ffv1.

    Raises:
        InputError: The source cannot be opened, or has no picture.
        UsageError: The container is unknown, or holds no picture of this codec.
    """
    container = container_of(target)
    able = _codecs_of(container)
    if codec not in able:
        raise UsageError(
            f"{target}: a {target.suffix.lower()} file holds no {codec} picture",
            hint=f"name the output {target.with_suffix('.mkv').name}, or choose another --codec",
        )
    if source is None:
        return StreamPlan(None, container)
    with open_source(source) as opened:
        picture = find_picture(opened, source)
        streams = tuple(_fate(stream, picture, container, able) for stream in opened.streams)
    return StreamPlan(source, container, picture, streams)


def open_source(source: Path) -> InputContainer:
    """Opened video file; raises `InputError` for what FFmpeg cannot read."""
    av = load_av()
    try:
        return av.open(str(source))
    except (OSError, ValueError, av.error.FFmpegError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{source}: cannot be read as video ({reason})") from error


def is_cover(stream: Stream) -> bool:
    """Whether a picture stream is a cover: one still image."""
    return stream.type == "video" and bool(int(stream.disposition) & 1024)


def find_picture(opened: InputContainer, source: Path) -> int:
    """Index of the first picture stream that is no cover.

    Raises:
        InputError: There is none.
    """
    for stream in opened.streams.video:
        if not is_cover(stream):
            return stream.index
    raise InputError(f"{source}: the file has no picture stream")


def _codecs_of(container: str) -> set[str]:
    with load_av().open(io.BytesIO(), "w", format=container) as output:
        return output.supported_codecs


def _fate(stream: Any, picture: int, container: str, able: set[str]) -> PlannedStream:
    codec = stream.codec_context.name if stream.codec_context else (stream.name or "unknown")
    label = " ".join(
        value for key in ("language", "title") if (value := stream.metadata.get(key, ""))
    )
    action, into, reason = _decide(stream, codec, picture, container, able)
    return PlannedStream(stream.index, stream.type, codec, action, into, reason, label)


def _decide(
    stream: Any, codec: str, picture: int, container: str, able: set[str]
) -> tuple[Action, str, str]:
    holds = f"{container} files hold none"
    if stream.index == picture:
        return "enlarged", "", ""
    if is_cover(stream) and container == "matroska" and codec in _COVER:
        return "converted", "attachment", "Matroska keeps cover pictures as attachments"
    if stream.type == "attachment":
        kept = container == "matroska"
        return ("copied", "", "") if kept else ("dropped", "", f"attachment: {holds}")
    if stream.type == "data" or stream.codec_context is None:
        return "dropped", "", "no picture, sound or text that is known here"
    if stream.type == "video" and not is_cover(stream):
        return "dropped", "", "one picture stream is enlarged"
    if codec in able:
        return "copied", "", ""
    if stream.type == "subtitle" and codec in _PLAIN_TEXT:
        return "converted", _TEXT_CODECS[container], f"{container} files hold no {codec}"
    return "dropped", "", f"{container} files hold no {codec}"


def packets_with_data(packets: Iterator[Any]) -> Iterator[Any]:
    """Packets of a demuxer without the empty ones that only flush a decoder.

    Those without a decoding stamp are real: Matroska leaves it out where frames are reordered.
    """
    return (packet for packet in packets if packet.size)
