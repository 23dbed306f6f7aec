"""Frames of segments: read ahead of the network, and written behind it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from lowtide.core.errors import VideoError
from lowtide.core.signal import ClosedOnExit
from lowtide.jobs.clips.memory import WAITING_FRAMES
from lowtide.jobs.clips.rows import FrameRowSource, frame_info
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import VideoSegment
from lowtide.media.video.frame_sequence import FrameSequenceFacts, FrameSequenceReader
from lowtide.media.video.picture_format import PictureFormat
from lowtide.media.video.video_facts import VideoFacts
from lowtide.media.video.video_reader import StoredFrame, VideoReader

# Frames from the first one on, and the distance of those of them that tell the noise of a clip.
_LOOKED_AT, _STEP = 97, 24
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class DueFrame:
    """Frame ``index`` of a video, which is to be run for a segment.

    ``planes`` are those of another frame of the segment where it could not be decoded.
    """

    segment: VideoSegment
    index: int
    planes: list[np.ndarray]
    is_decoded: bool


class FirstFramesImage(ClosedOnExit):
    """Some of a clip's first frames, one below the other, as an image (H·frames, W, 3).

    Of the first 97 every 24th, so that a fade from black is not all. One is in memory.

    Args:
        due: The frames of ``segment``, in order; closed with this.
        format: What their samples mean.
    """

    def __init__(
        self, due: Generator[DueFrame], segment: VideoSegment, format: PictureFormat
    ) -> None:
        self._due, self._format = due, format
        count = len(range(segment.first, min(segment.last, segment.first + _LOOKED_AT), _STEP))
        one = frame_info(format)
        self.info = replace(one, height=one.height * count)
        self.shape, self.dtype = self.info.shape, np.dtype(np.float32)
        self._height, self._number, self._next = one.height, -1, islice(due, 0, None, _STEP)
        self._frame: FrameRowSource | None = None

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, 3), in order."""
        rows, last = [np.empty((0, *self.shape[1:]), np.float32)], min(last, self.shape[0])
        while first < last:
            number, top = divmod(first, self._height)
            while self._number < number:
                self._frame = FrameRowSource(next(self._next).planes, self._format)
                self._number += 1
            assert self._frame is not None
            rows.append(self._frame.read(top, min(self._height, top + last - first)))
            first += len(rows[-1])
        return np.concatenate(rows)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._due.close()


def due_frames(
    task: VideoTask, segments: Sequence[VideoSegment], keep_damaged: bool
) -> Generator[DueFrame]:
    """Iterate over the frames of ``segments``, each of which comes from one place of the file.

    A frame that cannot be decoded is replaced by the one before, or at the start of a segment by
    the next one: what a segment holds does not depend on where a run began.

    Raises:
        VideoError: A frame cannot be decoded, or with ``keep_damaged`` none of a segment.
    """
    for group in _adjacent(segments):
        first, last = group[0].first, group[-1].last
        frames = _frames(task.facts, first, last, keep_damaged)
        found: StoredFrame | None = next(frames, None)
        for segment in group:
            before: list[np.ndarray] | None = None
            for index in range(segment.first, segment.last):
                if found is not None and found.index == index:
                    before = found.planes
                    yield DueFrame(segment, index, before, True)
                    found = next(frames, None)
                    continue
                if before is None and found is not None and found.index < segment.last:
                    before = found.planes
                if before is None:
                    frames = f"{segment.first:,} to {segment.last - 1:,}"
                    raise VideoError(
                        f"{task.facts.path}: damaged: no frame of {frames} can be decoded",
                        hint=f"--frames A:{segment.first}, or --frames {segment.last}:B",
                    )
                yield DueFrame(segment, index, before, False)


def _frames(facts: VideoFacts, first: int, last: int, keep_damaged: bool) -> Iterator[StoredFrame]:
    if isinstance(facts, FrameSequenceFacts):
        return iter(FrameSequenceReader(facts, first, last, keep_damaged=keep_damaged))
    return iter(VideoReader(facts, first, last, keep_damaged=keep_damaged))


def _adjacent(segments: Sequence[VideoSegment]) -> Iterator[list[VideoSegment]]:
    """Group segments that follow each other without a gap."""
    group: list[VideoSegment] = []
    for segment in segments:
        if group and group[-1].last != segment.first:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


T = TypeVar("T")


class _Thread(Generic[T]):
    """Thread with a queue of few places; ``stop`` ends it at the next item."""

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[T | None] = queue.Queue(WAITING_FRAMES)
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  (raised again in the thread of the job)
            self._failure = error

    def _put(self, item: T | None) -> bool:
        """Wait for a place; False when the thread was stopped meanwhile."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                if not self._thread.is_alive():
                    return False
        return False

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread at its next item, and drop what waits."""
        self._stopped.set()
        self._thread.join()


class ReadAhead(_Thread[T]):
    """Items of an iterable, which is iterated in a thread; its errors are raised here."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        super().__init__("lowtide-read")

    def _run(self) -> None:
        for item in self._items:
            if not self._put(item):
                return

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items."""
        while True:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    self._raise_failure()
                    return
                continue
            assert item is not None
            yield item


class WriteBehind(_Thread[T]):
    """Calls ``write`` with items in a thread; its errors are raised where the next one is put."""

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write = write
        super().__init__("lowtide-write")

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            self._write(item)

    def put(self, item: T) -> None:
        """Queue an item, once there is a place."""
        self._put(item)
        self._raise_failure()

    def finish(self) -> None:
        """Wait until all items are written."""
        self._put(None)
        self._thread.join()
        self._raise_failure()
