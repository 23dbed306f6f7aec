"""Frames of a video file in order, each compared with what the file's packets promise.

Interlaced frames are made whole by FFmpeg's bwdif: one of each, at its time.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.media.video.opened_video import (
    damaged_error,
    decoder_of,
    load_av,
    open_video,
    readable_packets,
)
from lowtide.media.video.picture_format import (
    UNSPECIFIED,
    PictureFormat,
    alpha_of,
    frame_planes,
    opaque_name,
    picture_format_of,
    planar_name,
    unknown_layout,
)
from lowtide.media.video.side_data import cropped_format, cropped_planes
from lowtide.media.video.video_facts import VideoFacts, require_deinterlaceable

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream


# Stops at flaws that FFmpeg would hide by repeating parts of another frame.
_STRICT = {"err_detect": "explode"}

# Frames that the filter holds: the one that is made whole, its neighbors, and the result.
HELD_FRAMES = 5
# Frames that are not marked as interlaced stay as they are.
_OPTIONS = "mode=send_frame:parity=auto:deint=interlaced"


@dataclass(frozen=True)
class StoredFrame:
    """Frame of a file, as it is stored.

    Attributes:
        index: Its number in the file, from 0.
        pts: When it is shown, in units of the file's time base.
        planes: Samples in the order of `frame_planes`, views of the decoder's memory.
    """

    index: int
    pts: int
    planes: list[np.ndarray]


@functools.lru_cache(maxsize=16)  # asked for before a model is loaded, and after
def video_part(facts: VideoFacts, first: int, *, keep_damaged: bool = False) -> VideoFacts:
    """Return the facts of a video that begins with frame ``first``, whose format may differ.

    Raises:
        VideoError: The frame cannot be decoded, or is of a kind that is not supported.
    """
    if not first:
        return facts
    reader = VideoReader(facts, first, first + 1, keep_damaged=keep_damaged)
    try:
        return replace(facts, format=cropped_format(reader.first_format(), facts.crop))
    except VideoError as error:
        raise VideoError(f"{facts.path}: {error.message}", hint=error.hint) from error


@functools.lru_cache(maxsize=16)
def require_opaque(facts: VideoFacts, first: int, last: int, *, keep_damaged: bool = False) -> None:
    """Decode frames that are stored with transparency; raise `VideoError` for one that has any."""
    if not facts.has_alpha:
        return
    format = facts.decoded
    full = (1 << format.bits) - 1
    for index, frame in VideoReader(facts, first, last, keep_damaged=keep_damaged).decoded():
        if frame.format.name != format.name and alpha_of(frame, format).min() < full:
            refused = unknown_layout(frame.format.name)
            raise VideoError(
                f"{facts.path}: {refused.message}: frame {index:,}, at {facts.seconds(index):.2f}"
                " s, is the first that is not opaque",
                hint=refused.hint,
            )


class VideoReader:
    """Frames ``first`` to before ``last`` of a video, as an iterator; also a context manager.

    Args:
        facts: The file's facts. Frames have to be those of its stamps, in size and format too.
        keep_damaged: Frames that cannot be decoded are left out, instead of an error.

    Raises:
        VideoError: While it iterates: a frame cannot be decoded, is missing, or differs in size or
            format. Names its time.
    """

    def __init__(
        self, facts: VideoFacts, first: int, last: int, *, keep_damaged: bool = False
    ) -> None:
        self._facts, self._first, self._last = facts, first, last
        self._keep = keep_damaged

    def __iter__(self) -> Iterator[StoredFrame]:
        """Iterate over the frames."""
        facts = self._facts
        if facts.deinterlaces:
            frames = self._due(
                deinterlace_frames(facts.path, self._with_neighbors(), facts.decoded)
            )
        else:
            frames = self.decoded()
        for index, frame in frames:
            format = replace(facts.decoded, name=opaque_name(frame.format.name))
            planes = cropped_planes(frame_planes(frame, format), facts.format, facts.crop)
            yield StoredFrame(index, int(facts.stamps[index]), planes)

    def decoded(self) -> Iterator[tuple[int, Any]]:
        """Iterate over the frames as they are decoded, with their index."""
        for index, frame in self._due(self._placed()):
            self._check(index, frame)
            yield index, frame

    def first_format(self) -> PictureFormat:
        """Return how frames are stored from the first one on, which may be another way."""
        for index, frame in self._placed():
            if index >= self._first:
                return picture_format_of(frame, self._facts.format.chroma_location)
        raise self._missing(self._first)

    def _placed(self) -> Iterator[tuple[int, Any]]:
        """Decode frames from ``first`` or before, with their index."""
        # Where seeking leads behind the first frame, as in a transport stream, all are decoded.
        for seeks in (True, False) if self._first and self._facts.ordered else (False,):
            with open_video(self._facts.path) as (container, stream):
                frames = self._decoded(container, stream, seeks)
                found = next(frames, None)
                if not seeks or (found is not None and found[0] <= self._start):
                    yield from chain([found] if found else [], frames)
                    return

    @property
    def _start(self) -> int:
        """The first frame that is needed: an interlaced one is made whole by its neighbors too."""
        return max(0, self._first - self._facts.deinterlaces)

    def _with_neighbors(self) -> Iterator[tuple[int, Any]]:
        """Iterate over decoded frames up to the one after the last, where it is alike."""
        for index, frame in self._placed():
            if self._first <= index < self._last:
                self._check(index, frame)
            elif not self._is_alike(frame):
                continue
            yield index, frame
            if index >= self._last:
                return

    def _due(self, frames: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Iterate over the frames of the range; raises `VideoError` where one is missing."""
        due = self._first
        for index, frame in frames:
            if index >= self._last:
                break
            if index < due:
                continue
            if index > due and not self._keep:
                raise self._missing(due)
            yield index, frame
            due = index + 1
            if due == self._last:
                return
        if due < self._last and not self._keep:
            raise self._missing(due)

    def _decoded(
        self, container: InputContainer, stream: VideoStream, seeks: bool
    ) -> Iterator[tuple[int, Any]]:
        """Decode frames of an opened file, from where it seeks to, with their index."""
        facts = self._facts
        decoder = decoder_of(stream)
        if not self._keep:
            decoder.options = _STRICT
        if seeks:
            container.seek(int(facts.stamps[self._start]), stream=stream)
        count, last = 0, -1
        for frame in self._frames(container, stream, decoder):
            index = self._index_of(frame.pts) if facts.ordered else count
            count += 1
            if index is None or index >= facts.frames:
                continue  # hidden by an edit list, or before what was seeked
            if index > last:
                last = index
                yield index, frame
            elif not self._keep:
                raise self._backwards(index)

    def _frames(
        self, container: InputContainer, stream: VideoStream, decoder: VideoCodecContext
    ) -> Iterator[Any]:
        """Decode all frames, or those that can be if damage is kept."""
        av, facts = load_av(), self._facts
        seen = None
        for packet in readable_packets(container.demux(stream)):
            try:
                frames = decoder.decode(packet)
            except av.error.FFmpegError as error:
                if self._keep:
                    continue
                # Before what was asked for, damage may be that of seeking to an open end.
                if seen is None or seen < facts.stamps[self._first]:
                    continue
                raise damaged_error(
                    facts.path,
                    f"after {float(seen * facts.time_base):.2f} s a frame cannot be decoded"
                    f" ({error.strerror})",
                ) from error
            for frame in frames:
                if frame.pts is not None:
                    seen = frame.pts
                yield frame

    def _index_of(self, pts: int | None) -> int | None:
        stamps = self._facts.stamps
        if pts is None:
            return None
        index = int(np.searchsorted(stamps, pts))
        return index if index < len(stamps) and stamps[index] == pts else None

    def _missing(self, index: int) -> VideoError:
        facts = self._facts
        return damaged_error(
            facts.path,
            f"frame {index:,} of {facts.frames:,}, at {facts.seconds(index):.2f} s, cannot be"
            " decoded",
        )

    def _backwards(self, index: int) -> VideoError:
        facts = self._facts
        return VideoError(
            f"{facts.path}: time stamps go backwards: the frame of {facts.seconds(index):.3f} s"
            " comes after a later one",
            hint=f"give it stamps of its own: ffmpeg -i {facts.path} -fps_mode cfr stamped.mkv",
        )

    def _is_alike(self, frame: Any) -> bool:
        """Whether a decoded frame is stored as the first one is."""
        due, name = self._facts.decoded, frame.format.name
        if self._facts.has_alpha:
            name = opaque_name(name)
        return (frame.width, frame.height, name) == (due.width, due.height, due.name)

    def _check(self, index: int, frame: Any) -> None:
        """Raise `VideoError` for a frame that is not stored as the first one is."""
        facts, format = self._facts, self._facts.decoded
        require_deinterlaceable(facts.path, frame, facts.codec, facts.deinterlaces)
        if not self._is_alike(frame):
            raise VideoError(
                f"{facts.path}: from frame {index:,} on, at {facts.seconds(index):.2f} s, frames"
                f" are {frame.width}×{frame.height} {frame.format.name} instead of"
                f" {format.width}×{format.height} {format.name}",
                hint=f"--frames A:{index}, and --frames {index}:B in another run",
            )


def deinterlace_frames(
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
