"""Video files opened by FFmpeg, by PyAV, which is optional: picture stream, covers and packets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import InputError, UsageError, VideoError
from lowtide.core.input_file import require_input

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream

_COVER_FLAG = 1024  # FFmpeg's disposition of a still picture that belongs to the file
_STILL = "image2"


def load_av() -> ModuleType:
    """Import PyAV; raises `UsageError` where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise UsageError(
            "video files need PyAV, which is not installed", hint="pip install 'lowtide[video]'"
        ) from error
    return av


def ffmpeg_name(path: Path) -> str:
    """Name by which FFmpeg opens a file: it takes ``12:30.mp4`` for an address."""
    return str(path.absolute())


def open_source(source: Path) -> InputContainer:
    """Opened video file; raises `InputError` for what FFmpeg cannot read."""
    av = load_av()
    require_input(source)
    try:
        return av.open(ffmpeg_name(source), metadata_errors="replace")
    except (OSError, ValueError, av.error.FFmpegError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{source}: cannot be read as video ({reason})") from error


@contextmanager
def open_video(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its stream of pictures, which is the first that is no cover art.

    Raises:
        VideoError: It cannot be read, or has none.
    """
    av = load_av()
    require_input(path, VideoError)
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


def damaged_error(path: Path, damage: str) -> VideoError:
    """Return the error of a damaged file."""
    return VideoError(f"{path}: damaged: {damage}", hint="--damaged keep takes what is there")


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
