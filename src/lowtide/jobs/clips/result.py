"""Result of a clip, made in segments that are joined when all are finished."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lowtide.core.atomic_file import put_in_place, sync_to_disk, write_error
from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.jobs.clips.rows import frame_info
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import STARTED_OVER, SegmentsFolder, VideoSegment
from lowtide.media.video.mux import join_segments, verify_output_frames
from lowtide.media.video.video_encoder import VideoSegmentEncoder, segment_suffix

# Begins the progress of reading back; what it returns counts frames.
StartReading = Callable[[], Callable[[int], None] | None]


@dataclass(frozen=True)
class ComputedFrame:
    """Result of frame ``index``: its planes, and the segment that it belongs to."""

    segment: VideoSegment
    index: int
    planes: list[np.ndarray]


class SegmentWriter:
    """Writes nothing of the frames of a clip: what writes some overrides what it says here.

    All methods raise `OutputError` or OSError where they cannot write.

    Args:
        task: What is written.
        work: The folder of the segments.
        segments: All of them, of which some may be finished.
    """

    def __init__(self, task: VideoTask, work: SegmentsFolder, segments: list[VideoSegment]) -> None:
        self.task, self.work, self.segments = task, work, segments

    def write(self, frame: ComputedFrame) -> None:
        """Write the next frame of a segment."""

    def end_segment(self, segment: VideoSegment) -> Path:
        """Complete a segment under a temporary name, and return that."""
        return self.work.new_text(segment, "")

    def is_whole(self, segment: VideoSegment) -> bool:
        """Return whether all that a finished segment refers to is there."""
        return True

    def join(self) -> list[str]:
        """Make the result of all segments; return notes on what could not be kept."""
        return []

    def put_in_place(self) -> Path:
        """Give the result its name, and return it."""
        return self.work.folder

    def abort(self) -> None:
        """Remove what is not finished."""


class ClipResult:
    """Result of one clip, in a hidden folder until `commit`; ``writer`` says what it is."""

    def __init__(self, writer: SegmentWriter) -> None:
        self.work, self.segments = writer.work, writer.segments
        self.info = frame_info(writer.task.stored)
        self.notes: list[str] = []
        self._writer = writer
        self._joined = self._committed = False

    def due_segments(self) -> list[VideoSegment]:
        """Return the segments that are not finished; a note says if none is of use."""
        due = [one for one in self.segments if not self.is_finished(one)]
        if len(due) == len(self.segments) and self.work.has_finished:
            self.notes.append(STARTED_OVER)
        return due

    def is_finished(self, segment: VideoSegment) -> bool:
        """Return whether a segment is complete."""
        return self.work.is_finished(segment) and self._writer.is_whole(segment)

    def write_frame(self, frame: ComputedFrame) -> None:
        """Write the next frame, in order; the last one of a segment finishes it.

        Raises:
            OutputError: The segment cannot be written.
        """
        segment = frame.segment
        try:
            self._writer.write(frame)
            if frame.index < segment.last - 1:
                return
            part = self._writer.end_segment(segment)
            trim_heap()  # the next encoder's threads would not use what this one's have freed
            self.work.finish(segment, part)
        except OSError as error:
            raise write_error(segment.path, error) from error

    def write(self, first: int, values: np.ndarray) -> None:
        """Raise: a clip is written frame by frame."""
        raise TypeError("rows of a clip are those of a frame")

    def close_rows(self) -> None:
        """Join the segments."""
        self.finish()

    def finish(self) -> None:
        """Make the result of its segments under a hidden name; does nothing if already done.

        Raises:
            OutputError: It cannot be written, or differs from what was due when it is read.
            Cancelled: The job was stopped.
        """
        if not self._joined:
            self.notes += self._writer.join()
            self._joined = True

    def commit(self) -> Path:
        """Give the result its name, remove its segments, and return its path.

        Raises:
            OutputError: It cannot have its name.
        """
        self.finish()
        path = self._writer.put_in_place()
        self._committed = True
        self.work.close(keep=False)
        return path

    def abort(self) -> None:
        """Keep finished segments for the next run; does nothing after `commit`."""
        if not self._committed:
            self._writer.abort()
            self.work.close(keep=self.work.has_finished)


class FileWriter(SegmentWriter):
    """Base of what joins its segments to one file, in their folder until `put_in_place`.

    Args:
        target: The output.
        task: What is written.
        work: The folder of the segments.
        segments: All of them.
        part: Name of an unfinished segment in the folder.
        joined: Name of the file in the folder.
        replace: Whether a file that is at ``target`` in the end is replaced.
    """

    def __init__(
        self,
        target: Path,
        task: VideoTask,
        work: SegmentsFolder,
        segments: list[VideoSegment],
        *,
        part: str,
        joined: str,
        replace: bool,
    ) -> None:
        super().__init__(task, work, segments)
        self._part, self._joined = work.folder / part, work.folder / joined
        self._target, self._replace = target, replace

    def put_in_place(self) -> Path:
        """Give the file its name."""
        put_file_in_place(self._joined, self._target, replace=self._replace)
        return self._target

    def abort(self) -> None:
        """Remove what is not finished."""
        for path in (self._part, self._joined):
            with contextlib.suppress(OSError):  # the error that led here says more
                path.unlink(missing_ok=True)


class ContainerWriter(FileWriter):
    """Writes segments of a video, and joins them with the input's other streams.

    Args:
        target: The output.
        task: What it is made of.
        work: The folder of its segments.
        segments: All of them.
        cancel: Stops joining and reading back.
        start_reading: Begins the progress of reading back.
        replace: Whether a file that is at ``target`` in the end is replaced.
    """

    def __init__(
        self,
        target: Path,
        task: VideoTask,
        work: SegmentsFolder,
        segments: list[VideoSegment],
        cancel: Cancel = None,
        start_reading: StartReading = lambda: None,
        *,
        replace: bool,
    ) -> None:
        assert task.encoder is not None
        super().__init__(
            target,
            task,
            work,
            segments,
            part=f"unfinished{segment_suffix(task.encoder.codec)}",
            joined=f"joined{target.suffix}",
            replace=replace,
        )
        self._cancel, self._start_reading, self._settings = cancel, start_reading, task.encoder
        self._encoder: VideoSegmentEncoder | None = None

    def write(self, frame: ComputedFrame) -> None:
        """Encode the next frame."""
        task = self.task
        if self._encoder is None:
            self._encoder = VideoSegmentEncoder(
                self._part,
                self._settings,
                task.stored,
                time_base=task.facts.time_base,
                frame_rate=task.frame_rate,
                pixel_aspect=task.pixel_aspect,
                light=task.facts.light,
            )
        self._encoder.write(frame.planes, int(task.facts.stamps[frame.index]))

    def end_segment(self, segment: VideoSegment) -> Path:
        """Encode what the encoder holds back."""
        assert self._encoder is not None
        self._encoder.close()
        self._encoder = None
        return self._part

    def join(self) -> list[str]:
        """Join the segments, and read the file back."""
        task, after_frame = self.task, partial(raise_if_cancelled, self._cancel)
        joined = join_segments(
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
            raise_if_cancelled(self._cancel)
            if advance is not None:
                advance(1)

        verify_output_frames(joined, after_frame=after_read)
        return list(joined.notes)

    def abort(self) -> None:
        """Remove what is not finished."""
        if self._encoder is not None:
            self._encoder.abort()
            self._encoder = None
        super().abort()


def put_file_in_place(part: Path, target: Path, *, replace: bool) -> None:
    """Give a complete file its name, on the disk too.

    Raises:
        OutputError: Something else has that name, or the folder cannot be written.
    """
    try:
        sync_to_disk(part)
        put_in_place(part, target, replace=replace)
        sync_to_disk(target.parent)
    except OSError as error:
        raise write_error(target, error) from error
