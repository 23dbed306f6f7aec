"""What becomes of a video file's streams in the output: sound, subtitles, cover art, and tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.core.errors import UsageError
from lowtide.media.video.opened_video import (
    ALPHA_MODE,
    find_picture,
    is_cover,
    open_source,
    packets_with_data,
)
from lowtide.media.video.packet_times import packet_time
from lowtide.media.video.video_containers import (
    TEXT_CODECS,
    TITLES,
    container_of,
    holds_codec,
    holds_stream,
    lost_marks,
    lost_metadata,
)

if TYPE_CHECKING:
    from av.container import InputContainer

Action = Literal["enlarged", "copied", "converted", "dropped"]

_PLAIN_TEXT = ("subrip", "mov_text", "webvtt", "text")
_STYLED_TEXT = ("ass", "ssa")
_SHAPED = ("h264", "hevc")  # codecs that hold the shape of pixels themselves
_COVERS = {"mjpeg": ("cover.jpg", "image/jpeg"), "png": ("cover.png", "image/png")}
_MPEG_CLOCK = 90_000  # ticks a second of MPEG transport and program streams

# What a muxer writes about the file that it writes.
_MUXER_KEYS = {"major_brand", "minor_version", "compatible_brands", "encoder", "duration"}
# What encoders write about the picture that they made: it is another one now.
_PICTURE_KEYS = {"encoder", "encoder_settings", "encoder_options", "vendor_id", ALPHA_MODE}
# Sizes and rates that mkvmerge measured on the file that it wrote.
_STATISTICS = ("bps", "number_of_frames", "number_of_bytes", "duration", "_statistics")


@dataclass(frozen=True)
class PlannedStream:
    """A stream of the source, and what becomes of it.

    Attributes:
        index: Its place in the source.
        kind: ``video``, ``cover``, ``audio``, ``subtitle``, ``attachment`` or ``data``.
        codec: FFmpeg's name of its codec, or of an attachment's file.
        action: What becomes of it; ``enlarged`` is the picture.
        into: Codec of converted subtitles, or ``attachment`` of a converted cover.
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
        lead: Seconds by which everything is later in the output: sound that begins before 0, where
            the container cannot; less than 0 for a broadcast, which begins at any time.
        notes: What else differs from the source.
    """

    source: Path | None
    container: str
    picture: int = -1
    streams: tuple[PlannedStream, ...] = ()
    lead: Fraction = Fraction(0)
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[PlannedStream, ...]:
        """The copied and converted streams."""
        return tuple(s for s in self.streams if s.action in ("copied", "converted"))


def plan_streams(source: Path | None, target: Path, *, codec: str, cut: bool = False) -> StreamPlan:
    """Plan of what becomes of each stream of ``source`` in a file named ``target``.

    Args:
        source: A video file, or None where the frames come from images.
        target: Name of the output, whose ending is the container.
        codec: FFmpeg's name of the new picture's codec: h264, hevc, av1, prores or ffv1.
        cut: Whether a part of the source is asked for, which begins at 0 anyway.

    Raises:
        InputError: The source cannot be opened, or has no picture.
        UsageError: The container is unknown, or holds no picture of this codec or of such pixels.
    """
    container = container_of(target)
    if not holds_codec(container, codec):
        raise UsageError(
            f"{target}: {TITLES[container]} files hold no {codec} pictures",
            hint=f"name the output {target.with_suffix('.mkv').name}"
            + (", or --codec svtav1" if container == "webm" else ""),
        )
    if source is None:
        return StreamPlan(None, container)
    with open_source(source) as opened:
        picture = find_picture(opened, source)
        _require_pixel_aspect(opened.streams[picture], container, codec, target)
        streams = tuple(_planned(stream, picture, container) for stream in opened.streams)
        lost = lost_metadata(container, file_metadata(opened))
        lead, why = _lead(opened, source, streams, container) if not cut else (Fraction(0), "")
    notes = []
    if lost:
        notes.append(f"{TITLES[container]} files have no place for the tags {', '.join(lost)}")
    if lead:
        way = "later" if lead > 0 else "earlier"
        notes.append(f"all times are {abs(float(lead)):.3f} s {way}: {why}")
    return StreamPlan(source, container, picture, streams, lead, tuple(notes))


def no_streams(source: Path | None, container: str) -> StreamPlan:
    """Plan of a sequence of image files, which has no place but for the picture.

    Args:
        source: A video file, or None where the frames come from images.
        container: What the files are.

    Raises:
        InputError: The source cannot be opened, or has no picture.
    """
    if source is None:
        return StreamPlan(None, container)
    with open_source(source) as opened:
        picture = find_picture(opened, source)
        streams = tuple(_left_out(stream, picture) for stream in opened.streams)
    return StreamPlan(source, container, picture, streams)


def _left_out(stream: Any, picture: int) -> PlannedStream:
    planned = _planned(stream, picture, "matroska")
    if stream.index == picture:
        return planned
    return replace(planned, action="dropped", into="", reason="image files hold pictures only")


def _require_pixel_aspect(stream: Any, container: str, codec: str, target: Path) -> None:
    """Raise where a picture's pixels are not square, and neither container nor codec would say so.

    FFmpeg's Matroska writer takes the shape from a place that PyAV cannot fill.
    """
    aspect = stream.sample_aspect_ratio
    if aspect and aspect != 1 and container in ("matroska", "webm") and codec not in _SHAPED:
        ending = ".mov" if codec == "prores" else ".mp4"
        raise UsageError(
            f"{target}: pixels are {aspect.numerator}:{aspect.denominator}, which {codec} in a"
            f" {target.suffix} file cannot say",
            hint=f"name the output {target.with_suffix(ending).name}",
        )


def cover_file(stream: Any) -> tuple[str, str] | None:
    """Name and MIME type of a cover as an attached file; None of a kind that is not known."""
    name, kind = (stream.metadata.get(key) for key in ("filename", "mimetype"))
    if name and kind:
        return name, kind
    return _COVERS.get(stream.codec_context.codec.canonical_name)


def _planned(stream: Any, picture: int, container: str) -> PlannedStream:
    if stream.codec_context is not None:
        codec = stream.codec_context.codec.canonical_name
    else:
        codec = stream.metadata.get("filename") or stream.name or "unknown"
    label = " ".join(filter(None, (stream.metadata.get("language"), title_of(stream.metadata))))
    kind = "cover" if is_cover(stream) else stream.type
    action, into, reason = _fate(stream, kind, codec, container)
    if stream.index == picture:
        action, into, reason = "enlarged", "", ""
    lost = lost_marks(container, stream) if kind in ("audio", "subtitle") else []
    if lost and action != "dropped":
        reason = "; ".join(filter(None, (reason, f"without the mark {', '.join(lost)}")))
    return PlannedStream(stream.index, kind, codec, action, into, reason, label)


def _fate(stream: Any, kind: str, codec: str, container: str) -> tuple[Action, str, str]:
    none = f"{TITLES[container]} files hold no {codec}"
    if kind == "attachment":
        kept = container == "matroska" and holds_stream(container, stream)
        return _kept_if(kept, f"{TITLES[container]} files hold no attachments such as this")
    if kind == "cover" and container != "mp4":
        # The muxers of the others would write a second film, or nothing.
        if container == "matroska" and cover_file(stream):
            return "converted", "attachment", "Matroska keeps a cover as an attached file"
        return "dropped", "", f"{TITLES[container]} files hold no such cover"
    if kind == "video":
        return "dropped", "", "the first picture stream is enlarged"
    if kind not in ("cover", "audio", "subtitle") or stream.codec_context is None:
        return "dropped", "", _data_reason(stream)
    if kind == "subtitle" and codec in _PLAIN_TEXT and not holds_stream(container, stream):
        return "converted", TEXT_CODECS[container], none
    if kind == "subtitle" and codec in _STYLED_TEXT and container != "matroska":
        return "dropped", "", f"{none}, styled subtitles; a .mkv file does"
    if not holds_stream(container, stream) and holds_stream("matroska", stream):
        return "dropped", "", f"{none}; a .mkv file does"
    return _kept_if(holds_stream(container, stream), none)


def _data_reason(stream: Any) -> str:
    if "timecode" in stream.metadata:
        return "a timecode, kept as the picture's tag unless its frame rate varies"
    if stream.container.chapters() and "Subtitle" in stream.metadata.get("handler_name", ""):
        return "titles of chapters, which are kept as chapters"
    return "neither picture nor sound nor subtitles"


def _kept_if(kept: bool, reason: str) -> tuple[Action, str, str]:
    return ("copied", "", "") if kept else ("dropped", "", reason)


def _lead(
    opened: InputContainer, source: Path, streams: tuple[PlannedStream, ...], container: str
) -> tuple[Fraction, str]:
    """Seconds by which everything has to be later in the output, and why."""
    if opened.format.name in ("mpegts", "mpeg") and opened.start_time is not None:
        begin = Fraction(round(Fraction(opened.start_time * _MPEG_CLOCK, 10**6)), _MPEG_CLOCK)
        return -begin, "broadcasts begin at any time, and other files at 0"
    if container not in ("matroska", "webm") or "matroska" in opened.format.name:
        return Fraction(0), ""
    earliest = Fraction(0)
    for planned in streams:
        # Opus begins before 0 by what its decoder leaves out, which Matroska knows of.
        if planned.kind == "audio" and planned.action == "copied" and planned.codec != "opus":
            earliest = min(earliest, _begin(source, planned.index))
    why = f"sound begins before 0, where {TITLES[container]} files cannot"
    return Fraction(ceil(-earliest * 1000), 1000), why


def _begin(source: Path, index: int) -> Fraction:
    with open_source(source) as opened:
        packet = next(packets_with_data(opened.demux(opened.streams[index])), None)
        return Fraction(0) if packet is None else packet_time(packet)


def file_metadata(opened: InputContainer) -> dict[str, str]:
    """Tags of a file but those of its muxer."""
    return {key: text for key, text in opened.metadata.items() if key.lower() not in _MUXER_KEYS}


def title_of(metadata: Mapping[str, str]) -> str:
    """Title of a stream; MP4 calls it its name."""
    return metadata.get("title") or metadata.get("name") or ""


def copied_metadata(metadata: Mapping[str, str], container: str) -> dict[str, str]:
    """Tags of a stream whose packets are copied."""
    left_out = {"handler_name", "vendor_id"} if container in ("matroska", "webm") else set()
    kept = {
        key: text
        for key, text in metadata.items()
        if key not in left_out | {"name"} and not key.lower().startswith(_STATISTICS)
    }
    title = title_of(metadata)
    return kept | ({"title": title} if title else {})


def picture_metadata(metadata: Mapping[str, str], container: str, timecode: bool) -> dict[str, str]:
    """Tags of the source's picture that are true of the new one.

    ``timecode`` is whether a timecode is, by which MP4 counts frames of one rate.
    """
    untrue = _PICTURE_KEYS if timecode else _PICTURE_KEYS | {"timecode"}
    kept = copied_metadata(metadata, container)
    return {key: text for key, text in kept.items() if key.lower() not in untrue}
