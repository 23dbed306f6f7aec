"""A video made of the results of chunks, frame by frame."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.clips.result import MadeFrame, VideoResult
from lowtide.jobs.clips.rows import FrameSink, frame_info
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import VideoWork

if TYPE_CHECKING:
    from torch import Tensor


class ClipWriter:
    """A video with the other streams of its task, hidden until `commit`.

    Args:
        task: What is written.
        target: The output.
        cancel: Stops writing with `Cancelled`.
        replace: Whether a file that is at ``target`` in the end is replaced.
    """

    def __init__(
        self, task: VideoTask, target: Path, cancel: Cancel = None, *, replace: bool = False
    ) -> None:
        (self._segment,) = task.segments(target, task.frames)
        self._task, self._cancel, self._next = task, cancel, task.first
        work = VideoWork(target, str(uuid.uuid4()))  # nothing of another run is used
        self._result = VideoResult(
            target, task, work, [self._segment], cancel, lambda: None, replace=replace
        )

    def write(self, image: np.ndarray) -> None:
        """Write the next frame, float32 (H, W, 3) in 0..1.

        Raises:
            OutputError: The file cannot be written.
            Cancelled: ``cancel`` was set.
        """
        check_cancel(self._cancel)
        sink = FrameSink(frame_info(self._task.stored), self._task.stored)
        sink.write(0, image)
        self._result.write_frame(MadeFrame(self._segment, self._next, sink.planes))
        self._next += 1

    def commit(self) -> list[str]:
        """Give the file its name, and return notes on what could not be kept; raises as `write`."""
        self._result.commit()
        return self._result.notes

    def abort(self) -> None:
        """Remove what was written; does nothing after `commit`."""
        self._result.abort()


def images_of(frames: Tensor, height: int, width: int) -> Iterator[np.ndarray]:
    """Yield frames (1, 3, T, H, W) in about -1..1 as images.

    Each is float32 (``height``, ``width``, 3), clipped to 0..1.
    """
    for frame in frames[0].unbind(1):
        image = frame[:, :height, :width].permute(1, 2, 0).add(1)
        yield image.div_(2).clamp_(0, 1).numpy()
