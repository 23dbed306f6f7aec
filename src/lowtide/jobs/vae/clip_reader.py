"""Frames of a video as tensors of a few frames, for networks that run chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import numpy as np

from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.clips.rows import BAND_ROWS, FrameSource
from lowtide.jobs.clips.task import VideoTask
from lowtide.media.video.video_reader import StoredFrame, VideoReader

if TYPE_CHECKING:
    import torch


class ClipReader:
    """Frames of a video in order, in -1..1; a context manager, which closes the file.

    They are resized to the frames that the task stores. Then the last row, column and frame are
    repeated as often as they are asked for.

    Args:
        task: Which frames.
        height: Rows to return.
        width: Columns to return.
        cancel: Stops reading with `Cancelled`.
    """

    def __init__(self, task: VideoTask, height: int, width: int, cancel: Cancel = None) -> None:
        self._task, self._size, self._cancel = task, (height, width), cancel
        self._frames: Iterator[StoredFrame] | None = None

    def read(self, count: int) -> torch.Tensor:
        """Return the next ``count`` frames, float32 (1, 3, count, H, W).

        Raises:
            VideoError: A frame cannot be decoded.
            Cancelled: ``cancel`` was set.
        """
        import torch

        if self._frames is None:
            task = self._task
            self._frames = iter(VideoReader(task.facts, task.first, task.last))
        chunk = torch.empty(1, 3, count, *self._size)
        for number in range(count):
            check_cancel(self._cancel)
            target = chunk[0, :, number]
            if (frame := next(self._frames, None)) is None:
                target.copy_(chunk[0, :, number - 1])
            else:
                self._convert(frame, target)
            del frame  # a view of the decoder's memory
        return chunk

    def _convert(self, frame: StoredFrame, target: torch.Tensor) -> None:
        import torch

        task = self._task
        source, format = FrameSource(frame.planes, task.facts.format), task.facts.format
        height, width = task.stored.height, task.stored.width
        whole = (format.height, format.width) != (height, width)
        step = format.height if whole else BAND_ROWS
        for first in range(0, format.height, step):
            rows = source.read(first, first + step)
            if whole:
                rows = _resized(rows, width, height)
            there = target[:, first : first + len(rows), :width]
            torch.sub(torch.from_numpy(rows).permute(2, 0, 1) * 2, 1, out=there)
        target[:, height:, :width] = target[:, height - 1 : height, :width]
        target[:, :, width:] = target[:, :, width - 1 : width]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._frames = None


def _resized(rows: np.ndarray, width: int, height: int) -> np.ndarray:
    import pyvips

    from lowtide.media.pixels import resize

    image = resize(pyvips.Image.new_from_array(np.ascontiguousarray(rows)), width, height)
    return np.asarray(image.numpy(), np.float32)
