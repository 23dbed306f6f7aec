"""Frames that go into a video autoencoder, those that come out, and how far they differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import numpy as np

from lowtide.core.atomic_file import write_error
from lowtide.core.metrics import SSIM_WINDOW, psnr, ssim
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.jobs.clips.rows import BAND_ROWS, FrameRowSink, FrameRowSource, frame_info
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.clips.work import SegmentsFolder, VideoSegment
from lowtide.jobs.engine.report import reported_db
from lowtide.media.video.video_reader import StoredFrame, VideoReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor


class ClipReader:
    """Frames of a video in order, in -1..1; a context manager, which closes the file.

    They are resized to the frames that the task stores. Then the last row, column and frame are
    repeated as often as they are asked for.

    Args:
        task: Which frames.
        height: Rows to return.
        width: Columns to return.
        cancel: Stops reading with `Cancelled`.
        first: Frames of the task that are left out.
    """

    def __init__(
        self, task: VideoTask, height: int, width: int, cancel: Cancel = None, first: int = 0
    ) -> None:
        self._task, self._size, self._cancel, self._first = task, (height, width), cancel, first
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
            self._frames = iter(VideoReader(task.facts, task.first + self._first, task.last))
        chunk = torch.empty(1, 3, count, *self._size)
        for number in range(count):
            raise_if_cancelled(self._cancel)
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
        source, format = FrameRowSource(frame.planes, task.facts.format), task.facts.format
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

    from lowtide.media.pixels import resample_image

    image = resample_image(pyvips.Image.new_from_array(np.ascontiguousarray(rows)), width, height)
    return np.asarray(image.numpy(), np.float32)


def images_of(frames: Tensor, height: int, width: int) -> Iterator[np.ndarray]:
    """Yield frames (1, 3, T, H, W) in about -1..1 as images.

    Each is float32 (``height``, ``width``, 3), clipped to 0..1.
    """
    for frame in frames[0].unbind(1):
        image = frame[:, :height, :width].permute(1, 2, 0).add(1)
        yield image.div_(2).clamp_(0, 1).numpy()


def planes_of(image: np.ndarray, task: VideoTask) -> list[np.ndarray]:
    """Return the samples to store of an image, float32 (H, W, 3) in 0..1."""
    sink = FrameRowSink(frame_info(task.stored), task.stored)
    sink.write(0, image)
    return sink.planes


class ClipComparison:
    """PSNR and SSIM of frames against those of a video, which is read along.

    A context manager, which closes the file.
    """

    def __init__(self, task: VideoTask, cancel: Cancel = None) -> None:
        self._size = task.stored.height, task.stored.width
        self._task, self._cancel = task, cancel
        self._reader: ClipReader | None = None
        self._errors, self._likeness = list[float](), list[float]()

    def add(self, image: np.ndarray) -> None:
        """Compare the next frame, float32 (H, W, 3) in 0..1; raises as `ClipReader.read`."""
        if self._reader is None:
            first = len(self._errors)
            self._reader = ClipReader(self._task, *self._size, self._cancel, first)
        (given,) = images_of(self._reader.read(1), *self._size)
        self._errors.append(mean_of_bands(_error, image, given, 1))
        if min(self._size) >= SSIM_WINDOW:
            self._likeness.append(mean_of_bands(ssim, image, given, SSIM_WINDOW))

    def keep(self, work: SegmentsFolder, segment: VideoSegment) -> None:
        """Write what is known beside a segment, for a run that goes on behind it."""
        place = _figures_of(segment)
        try:
            part = work.new_text(place, json.dumps([self._errors, self._likeness]))
            work.finish(place, part)
        except OSError as error:
            raise write_error(place.path, error) from error

    def recall(self, segment: VideoSegment) -> None:
        """Go on behind a segment."""
        text = _figures_of(segment).path.read_text("utf-8")
        self._errors, self._likeness = json.loads(text)

    def figures(self) -> dict[str, float | None]:
        """Return the mean of all frames and the worst one, as a `VaeReport` has them.

        SSIM is None of frames that are smaller than its window.
        """
        return {
            "psnr_db": _decibels(float(np.mean(self._errors))),
            "worst_psnr_db": _decibels(max(self._errors)),
            "ssim": round(float(np.mean(self._likeness)), 4) if self._likeness else None,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._reader is not None:
            self._reader.__exit__(*exception)


def _figures_of(segment: VideoSegment) -> VideoSegment:
    path = segment.path.with_suffix(".figures")
    return VideoSegment(segment.first, segment.last, path, segment.how)


def _error(image: np.ndarray, given: np.ndarray) -> float:
    return 10 ** (-psnr(image, given) / 10)


def mean_of_bands(
    measure: Callable[[np.ndarray, np.ndarray], float],
    image: np.ndarray,
    given: np.ndarray,
    window: int,
) -> float:
    """Return the mean of a measure over all windows of rows, in bands: it works in float64."""
    total, places = 0.0, len(image) - window + 1
    for first in range(0, places, BAND_ROWS):
        count = min(BAND_ROWS, places - first)
        rows = slice(first, first + count + window - 1)
        total += count * measure(image[rows], given[rows])
    return total / places


def _decibels(error: float) -> float | None:
    return None if error == 0 else reported_db(-10 * float(np.log10(error)))
