"""Video files opened by FFmpeg: their picture stream, covers and packets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import InputError
from lowtide.media.video.pyav import load_av

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream

_COVER_FLAG = 1024  # FFmpeg's disposition of a still picture that belongs to the file


def ffmpeg_name(path: Path) -> str:
    """Name by which FFmpeg opens a file: it takes ``12:30.mp4`` for an address."""
    return str(path.absolute())


def open_source(source: Path) -> InputContainer:
    """Opened video file; raises `InputError` for what FFmpeg cannot read."""
    av = load_av()
    try:
        return av.open(ffmpeg_name(source), metadata_errors="replace")
    except (OSError, ValueError, av.error.FFmpegError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{source}: cannot be read as video ({reason})") from error


def find_picture(opened: InputContainer, source: Path) -> int:
    """Index of the first picture stream that is no cover.

    Raises:
        InputError: There is none.
    """
    for stream in opened.streams.video:
        if not is_cover(stream):
            return stream.index
    raise InputError(f"{source}: the file has no picture stream")


def is_cover(stream: Stream) -> bool:
    """Whether a picture stream is a cover: one still picture."""
    return stream.type == "video" and bool(int(stream.disposition) & _COVER_FLAG)


def packets_with_data(packets: Iterator[Any]) -> Iterator[Any]:
    """Packets of a demuxer without the empty ones that only flush a decoder.

    Those without a decoding stamp are real: Matroska leaves it out where frames are reordered.
    """
    return (packet for packet in packets if packet.size)
