"""Output of a video: segments encoded in order, then joined with the input's other streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lowtide.core.atomic_file import put_in_place, sync, write_error
from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.clips.rows import frame_info
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import VideoSegment, VideoWork
from lowtide.media.video.mux import check_output, join
from lowtide.media.video.video_encoder import SegmentEncoder
from lowtide.media.video.video_segments import segment_suffix

# Begins the progress of reading back; what it returns counts frames.
StartReading = Callable[[], Callable[[int], None] | None]


@dataclass(frozen=True)
class MadeFrame:
    """Result of frame ``index``: its planes, and the segment that it belongs to."""

    segment: VideoSegment
    index: int
    planes: list[np.ndarray]


class VideoResult:
    """Output of one video, in a hidden folder until `commit`.

    Args:
        target: The output.
        task: What it is made of.
        work: The folder of its segments.
        segments: All segments, of which some may be finished.
        cancel: Stops joining and reading back.
        start_reading: Begins the progress of reading back.
        replace: Whether a file that is at ``target`` in the end is replaced.
    """

    def __init__(
        self,
        target: Path,
        task: VideoTask,
        work: VideoWork,
        segments: list[VideoSegment],
        cancel: Cancel,
        start_reading: StartReading,
        *,
        replace: bool,
    ) -> None:
        assert task.encoder is not None
        self.work, self.segments = work, segments
        self.info = frame_info(task.stored)
        self.notes: list[str] = []
        self._target, self._task, self._cancel = target, task, cancel
        self._replace = replace
        self._start_reading, self._settings = start_reading, task.encoder
        self._joined = work.folder / f"joined{target.suffix}"
        self._part = work.folder / f"unfinished{segment_suffix(self._settings.codec)}"
        self._encoder: SegmentEncoder | None = None
        self._done = self._committed = False

    def is_finished(self, segment: VideoSegment) -> bool:
        """Return whether a segment is complete."""
        return self.work.is_finished(segment)

    def write_frame(self, frame: MadeFrame) -> None:
        """Encode the next frame, in order; the last one of a segment finishes it.

        Raises:
            OutputError: The segment cannot be written.
        """
        task, segment = self._task, frame.segment
        if self._encoder is None:
            self._encoder = SegmentEncoder(
                self._part,
                self._settings,
                task.stored,
                time_base=task.facts.time_base,
                frame_rate=task.frame_rate,
                pixel_aspect=task.pixel_aspect,
                light=task.facts.light,
            )
        self._encoder.write(frame.planes, int(task.facts.stamps[frame.index]))
        if frame.index == segment.last - 1:
            self._encoder.close()
            self._encoder = None
            trim_heap()  # the next encoder's threads would not use what this one's have freed
            try:
                self.work.finish(segment, self._part)
            except OSError as error:
                raise write_error(segment.path, error) from error

    def write(self, first: int, values: np.ndarray) -> None:
        """Raise: a video is written frame by frame."""
        raise TypeError("rows of a video are those of a frame")

    def close_rows(self) -> None:
        """Join the segments, and read the file back."""
        self.finish()

    def finish(self) -> None:
        """Complete the file under its hidden name; does nothing if already done.

        Raises:
            OutputError: It cannot be written, or differs from what was due when it is read.
            Cancelled: The job was stopped.
        """
        if self._done:
            return
        task, after_frame = self._task, partial(check_cancel, self._cancel)
        joined = join(
            task.streams,
            [one.path for one in self.segments],
            self._joined,
            stamps=task.stamps,
            time_base=task.facts.time_base,
            last_duration=task.last_duration,
            pixel_aspect=task.pixel_aspect,
            rotation=task.facts.rotation,
            mirrored=task.facts.mirrored,
            cut=task.is_cut,
            after_frame=after_frame,
        )
        advance = self._start_reading()

        def after_read() -> None:
            check_cancel(self._cancel)
            if advance is not None:
                advance(1)

        check_output(joined, after_frame=after_read)
        self.notes += joined.notes
        self._done = True

    def commit(self) -> Path:
        """Give the file its name, remove its segments, and return its path."""
        self.finish()
        try:
            sync(self._joined)
            put_in_place(self._joined, self._target, replace=self._replace)
            sync(self._target.parent)
        except OSError as error:
            raise write_error(self._target, error) from error
        self._committed = True
        self.work.close(keep=False)
        return self._target

    def abort(self) -> None:
        """Keep finished segments for the next run; does nothing after `commit`."""
        if self._committed:
            return
        if self._encoder is not None:
            self._encoder.abort()
            self._encoder = None
        for path in (self._part, self._joined):
            with contextlib.suppress(OSError):  # the error that led here says more
                path.unlink(missing_ok=True)
        self.work.close(keep=any(one.path.exists() for one in self.segments))
