"""Container formats of video outputs, and what each can hold, found by trying."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.core.errors import UsageError
from lowtide.media.video.opened_video import load_av

# Names of FFmpeg's formats by the ending of the output's name.
CONTAINERS = {
    ".mp4": "mp4",
    ".m4v": "mp4",
    ".mov": "mov",
    ".mkv": "matroska",
    ".webm": "webm",
}
# How users know them.
TITLES = {"mp4": "MP4", "mov": "QuickTime", "matroska": "Matroska", "webm": "WebM"}
# Subtitles of plain text: what each has for them.
TEXT_CODECS = {"mp4": "mov_text", "mov": "mov_text", "matroska": "subrip", "webm": "webvtt"}
# Marks of streams (FFmpeg's dispositions) that each keeps of sound and subtitles.
MARKS = {
    "mp4": {"default", "dub", "comment", "forced"},
    "mov": {"default"},
    "matroska": {
        *("default", "dub", "original", "comment", "forced"),
        *("hearing_impaired", "visual_impaired"),
    },
}
MARKS["webm"] = MARKS["matroska"]
_NO_DATE = "1970-01-01T00:00:00"
_UNFIT = {
    ".avi": "AVI has one frame rate and no time stamps",
    ".ts": "MPEG transport streams begin at times of their own",
    ".m2ts": "MPEG transport streams begin at times of their own",
    ".mts": "MPEG transport streams begin at times of their own",
    ".mpg": "MPEG program streams begin at times of their own",
    ".flv": "FLV holds one sound stream and no subtitles",
    ".gif": "GIF holds 256 colors and no sound",
}


def container_of(target: Path) -> str:
    """FFmpeg's name of the format that the ending of ``target`` asks for.

    Raises:
        UsageError: Lowtide writes no video into such a file.
    """
    ending = target.suffix.lower()
    if ending not in CONTAINERS:
        why = _UNFIT.get(ending, "video is not written into such a file")
        raise UsageError(
            f"{target}: {why}; the name may end in {', '.join(CONTAINERS)}",
            hint=f"name the output {target.with_suffix('.mkv').name}",
        )
    return CONTAINERS[ending]


def muxer_options(container: str, scale: int = 1000) -> dict[str, str]:
    """FFmpeg's options by which a container keeps what it is given.

    Args:
        container: FFmpeg's name of the format.
        scale: Ticks a second in which MP4 and QuickTime say when a stream begins.
    """
    if container in ("matroska", "webm"):
        return {"default_mode": "passthrough"}  # or the first stream of a kind becomes a default
    options = {"movie_timescale": str(scale)}
    if container == "mov":
        options["movflags"] = "use_metadata_tags"  # as phones write them; MP4 players do not look
    return options


def holds_codec(container: str, codec: str) -> bool:
    """Whether pictures of ``codec``, by FFmpeg's name, can be in a container."""
    if (container, codec) == ("mov", "av1"):
        return False  # FFmpeg lists it, and refuses it when it writes the header
    with load_av().open(io.BytesIO(), "w", format=container) as output:
        return codec in output.supported_codecs


def add_copy(output: Any, stream: Any) -> Any:
    """Add a stream to an output, whose packets will be those of an opened file's ``stream``.

    Raises `ValueError` where FFmpeg's list of what the container holds has no such codec. The list
    of Matroska leaves out the sound that it holds by Microsoft's names, as A_MS/ACM.
    """
    try:
        return output.add_stream_from_template(stream, opaque=True)
    except ValueError:
        if output.format.name != "matroska" or stream.type != "audio":
            raise
    av = load_av()
    # A stream that is in the list gets all parameters of the other one, by a filter that does
    # nothing. The name of the codec in the source's container is not among them.
    with av.open(io.BytesIO(), "w", format="null") as names:
        nameless = names.add_stream_from_template(stream, opaque=True)
        made = output.add_stream_from_template(names.add_stream("flac"), opaque=True)
        av.bitstream.BitStreamFilterContext("null", nameless, made)
    return made


def holds_stream(container: str, stream: Any) -> bool:
    """Whether a container takes the packets of an opened file's stream as they are."""
    av = load_av()
    with av.open(io.BytesIO(), "w", format=container) as output:
        try:
            add_copy(output, stream)
            output.start_encoding()
        except (ValueError, av.error.FFmpegError):
            return False
    return True


def lost_marks(container: str, stream: Any) -> list[str]:
    """Marks of a stream that a container has no place for, such as ``forced``."""
    return [mark.name for mark in stream.disposition if mark.name not in MARKS[container]]


def lost_metadata(container: str, metadata: Mapping[str, str]) -> list[str]:
    """Keys of a file's metadata that a container has no place for."""
    if container not in ("mp4", "mov"):
        return []  # Matroska holds any
    made = io.BytesIO()
    av = load_av()
    with av.open(made, "w", format=container, container_options=muxer_options(container)) as file:
        file.add_mux_stream("mjpeg", width=16, height=16)
        file.metadata.update(metadata)
        file.start_encoding()
    made.seek(0)
    with av.open(made) as file:
        found = set(file.metadata.values())
    # FFmpeg leaves out a date of 0: nobody has set it.
    return [
        key
        for key, value in metadata.items()
        if value not in found and not value.startswith(_NO_DATE)
    ]
