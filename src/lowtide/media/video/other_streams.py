"""What becomes of a video file's streams in the output: sound, subtitles, cover art, and tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.core.errors import UsageError
from lowtide.media.video.opened_video import (
    ALPHA_MODE,
    find_picture,
    is_cover,
    open_media_file,
)
from lowtide.media.video.sound_encoder import SOUND_WORDS, SoundEncoding, sound_fate
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

Action = Literal["enlarged", "copied", "encoded", "converted", "dropped"]

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
        into: Codec of encoded sound and converted subtitles, or ``attachment`` of a cover.
        reason: Why it is not copied.
        label: Language and title, where it has them.
        file: Name of the file that it is from, where that is not the source.
        encoding: How sound is encoded.
        left_out: Places of damaged packets among those of the stream.
    """

    index: int
    kind: str
    codec: str
    action: Action
    into: str = ""
    reason: str = ""
    label: str = ""
    file: str = ""
    encoding: SoundEncoding | None = None
    left_out: frozenset[int] = frozenset()

    def __str__(self) -> str:
        place = f"{self.index} of {self.file}" if self.file else self.index
        name = f"{self.kind} {place} ({', '.join(filter(None, (self.codec, self.label)))})"
        into = f" into {self.into}" if self.into else ""
        return f"{name}: {self.action}{into}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class OutputStreamsPlan:
    """Streams of an output file, decided before work starts.

    Attributes:
        source: File whose other streams are copied; None of an image sequence.
        container: FFmpeg's name of the output's format.
        picture: Index of the picture stream in the source, or -1.
        streams: Every stream of the source.
        begin: Seconds at which the source begins: 0 but of a broadcast, which begins at any time.
        notes: What else differs from the source.
        sound: Plan of the sound of another file, which has no other streams.
    """

    source: Path | None
    container: str
    picture: int = -1
    streams: tuple[PlannedStream, ...] = ()
    begin: Fraction = Fraction(0)
    notes: tuple[str, ...] = ()
    sound: OutputStreamsPlan | None = None

    @property
    def kept(self) -> tuple[PlannedStream, ...]:
        """The streams whose packets are in the output."""
        return tuple(s for s in self.streams if s.action not in ("enlarged", "dropped"))

    @property
    def all_streams(self) -> tuple[PlannedStream, ...]:
        """Every stream of the source, and of the other file whose sound is taken."""
        return self.streams + (self.sound.streams if self.sound else ())


def plan_streams(
    source: Path | None, target: Path, *, codec: str, cut: bool = False, sound: str = "auto"
) -> OutputStreamsPlan:
    """Plan of what becomes of each stream of ``source`` in a file named ``target``.

    Args:
        source: A video file, or None where the frames come from images.
        target: Name of the output, whose ending is the container.
        codec: FFmpeg's name of the new picture's codec: h264, hevc, av1, prores or ffv1.
        cut: Whether a part of the source is asked for, which begins at 0 anyway.
        sound: One of `SOUND_WORDS`, or the name of a file whose sound it gets. ``auto`` encodes
            what the container does not hold.

    Raises:
        InputError: The source cannot be opened, or has no picture.
        UsageError: The container is unknown, or holds no picture of this codec or of such pixels,
            or the sound cannot be kept as ``sound`` asks for.
    """
    container = container_of(target)
    if not holds_codec(container, codec):
        raise UsageError(
            f"{target}: {TITLES[container]} files hold no {codec} pictures",
            hint=f"name the output {target.with_suffix('.mkv').name}"
            + (", or --codec svtav1" if container == "webm" else ""),
        )
    other = None if sound in SOUND_WORDS else _other_sound(Path(sound), target, container)
    if source is None:
        return OutputStreamsPlan(None, container, sound=other)
    with open_media_file(source) as opened:
        picture = find_picture(opened, source)
        _require_pixel_aspect(opened.streams[picture], container, codec, target)
        streams = tuple(_planned(one, picture, container, sound, target) for one in opened.streams)
        lost = lost_metadata(container, file_metadata(opened))
        begin = _begin(opened)
    notes = []
    if lost:
        notes.append(f"{TITLES[container]} files have no place for the tags {', '.join(lost)}")
    if begin and not cut:
        notes.append(
            f"all times are {abs(float(begin)):.3f} s {'earlier' if begin > 0 else 'later'}:"
            " broadcasts begin at any time, and other files at 0"
        )
    return OutputStreamsPlan(source, container, picture, streams, begin, tuple(notes), other)


def _other_sound(path: Path, target: Path, container: str) -> OutputStreamsPlan:
    """Plan of the sound of a file of its own."""
    if not path.is_file():
        raise UsageError(
            f"--sound {path} is no file", hint=f"--sound {'|'.join(SOUND_WORDS)}, or a file"
        )
    with open_media_file(path) as opened:
        streams = tuple(
            replace(_planned(one, -1, container, str(path), target), file=path.name)
            for one in opened.streams.audio
        )
        begin = _begin(opened)
    if not streams:
        raise UsageError(f"--sound {path}: there is no sound in it")
    return OutputStreamsPlan(path, container, streams=streams, begin=begin)


def no_streams(source: Path | None, container: str) -> OutputStreamsPlan:
    """Plan of a sequence of image files, which has no place but for the picture.

    Args:
        source: A video file, or None where the frames come from images.
        container: What the files are.

    Raises:
        InputError: The source cannot be opened, or has no picture.
    """
    if source is None:
        return OutputStreamsPlan(None, container)
    with open_media_file(source) as opened:
        picture = find_picture(opened, source)
        streams = tuple(_left_out(stream, picture) for stream in opened.streams)
    return OutputStreamsPlan(source, container, picture, streams)


def _left_out(stream: Any, picture: int) -> PlannedStream:
    planned = _planned(stream, picture, "matroska", "none", Path())
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


def _planned(stream: Any, picture: int, container: str, sound: str, target: Path) -> PlannedStream:
    if stream.codec_context is not None:
        codec = stream.codec_context.codec.canonical_name
    else:
        # A stream of an unknown codec has no name, in Python not even that of None.
        codec = stream.metadata.get("filename") or getattr(stream, "name", None) or "unknown"
    label = " ".join(filter(None, (stream.metadata.get("language"), title_of(stream.metadata))))
    kind = "cover" if is_cover(stream) else stream.type
    encoding = None
    if stream.index == picture:
        action, into, reason = "enlarged", "", ""
    elif kind == "audio" and picture >= 0 and sound not in SOUND_WORDS:
        action, into, reason = "dropped", "", f"the sound of {sound} is taken"
    elif kind == "audio":
        fate = sound_fate(stream, codec, container, sound, target)
        action, into, reason, encoding = fate.action, fate.into, fate.reason, fate.encoding
    else:
        action, into, reason = _fate(stream, kind, codec, container)
    lost = lost_marks(container, stream) if kind in ("audio", "subtitle") else []
    if lost and action != "dropped":
        reason = "; ".join(filter(None, (reason, f"without the mark {', '.join(lost)}")))
    planned = PlannedStream(stream.index, kind, codec, action, into, reason, label)
    return replace(planned, encoding=encoding)


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
    if kind not in ("cover", "subtitle") or stream.codec_context is None:
        return "dropped", "", _data_reason(stream)
    if kind == "subtitle" and codec in _PLAIN_TEXT and not holds_stream(container, stream):
        return "converted", TEXT_CODECS[container], none
    if kind == "subtitle" and codec in _STYLED_TEXT and container != "matroska":
        return "converted", TEXT_CODECS[container], f"{none}, whose places and effects are lost"
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


def _begin(opened: InputContainer) -> Fraction:
    """Seconds at which a file begins that may do so at any time."""
    if opened.format.name not in ("mpegts", "mpeg") or opened.start_time is None:
        return Fraction(0)
    return Fraction(round(Fraction(opened.start_time * _MPEG_CLOCK, 10**6)), _MPEG_CLOCK)


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
