"""Comparison of the frames that come out of a video autoencoder with those that went in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np

from lowtide.core.metrics import SSIM_WINDOW, psnr, ssim
from lowtide.core.progress import Cancel
from lowtide.jobs.clips.rows import BAND_ROWS
from lowtide.jobs.clips.task import VideoTask
from lowtide.jobs.engine.report import reported_db
from lowtide.jobs.vae.clip_reader import ClipReader
from lowtide.jobs.vae.clip_writer import images_of


class ClipComparison:
    """PSNR and SSIM of frames against those of a video, which is read along.

    A context manager, which closes the file.
    """

    def __init__(self, task: VideoTask, cancel: Cancel = None) -> None:
        self._size = task.stored.height, task.stored.width
        self._reader = ClipReader(task, *self._size, cancel)
        self._errors, self._likeness = list[float](), list[float]()

    def add(self, image: np.ndarray) -> None:
        """Compare the next frame, float32 (H, W, 3) in 0..1; raises as `ClipReader.read`."""
        (given,) = images_of(self._reader.read(1), *self._size)
        self._errors.append(_mean_of_bands(_error, image, given, 1))
        if min(self._size) >= SSIM_WINDOW:
            self._likeness.append(_mean_of_bands(ssim, image, given, SSIM_WINDOW))

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
        self._reader.__exit__(*exception)


def _error(image: np.ndarray, given: np.ndarray) -> float:
    return 10 ** (-psnr(image, given) / 10)


def _mean_of_bands(
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
