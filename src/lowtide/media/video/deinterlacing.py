"""Interlaced frames made whole by FFmpeg's bwdif: one of each, at its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import load_av
from lowtide.media.video.picture_format import UNSPECIFIED, PictureFormat, planar_name

# Frames that the filter holds: the one that is made whole, its neighbors, and the result.
HELD_FRAMES = 5
# Frames that are not marked as interlaced stay as they are.
_OPTIONS = "mode=send_frame:parity=auto:deint=interlaced"


def whole_frames(
    path: Path, frames: Iterable[tuple[int, Any]], format: PictureFormat
) -> Iterator[tuple[int, Any]]:
    """Make decoded frames whole, in planes, each by the one before it and the one after it.

    Args:
        path: The file, for errors.
        frames: Frames with their number; the first one has none before it.
        format: How they are stored.

    Raises:
        VideoError: The filter takes no such samples.
    """
    graph, waiting = None, deque[int]()
    planar = planar_name(format)
    for index, frame in frames:
        # Of frames with tags, FFmpeg would convert colors where it only has to move samples.
        frame.colorspace, frame.color_range = UNSPECIFIED, 0
        graph = graph or _filter(frame, planar)
        waiting.append(index)
        graph.vpush(frame)
        yield from _made(graph, waiting, path, planar)
    if graph is not None:
        graph.vpush(None)
        yield from _made(graph, waiting, path, planar)


def _filter(frame: Any, planar: str) -> Any:
    av = load_av()
    graph = av.filter.Graph()
    source = {"width": frame.width, "height": frame.height, "format": frame.format}
    steps = [graph.add_buffer(**source, time_base=frame.time_base or Fraction(1, av.time_base))]
    if _in_tags(frame) != planar and not frame.format.name.startswith("gbrap1"):  # it would round
        steps.append(graph.add("format", planar))
    steps += [graph.add("bwdif", _OPTIONS), graph.add("buffersink")]
    graph.link_nodes(*steps).configure()
    return graph


def _made(graph: Any, waiting: deque[int], path: Path, planar: str) -> Iterator[tuple[int, Any]]:
    """Take the frames that the filter has finished."""
    while waiting:
        try:
            frame = graph.vpull()
        except (BlockingIOError, EOFError):  # it waits for the next frame, or there is none
            return
        if _in_tags(frame) != planar:
            raise VideoError(
                f"{path}: interlaced frames of {planar} cannot be made whole",
                hint=f"convert it first: ffmpeg -i {path} -vf bwdif -c:v ffv1 OUT.mkv",
            )
        yield waiting.popleft(), frame


def _in_tags(frame: Any) -> str:
    """Return a frame's format, where its range is in the tags."""
    return frame.format.name.replace("yuvj", "yuv")
