"""Range, foreground and noise level of a volume of MRI, slice by slice.

Values are in data units, of any scale. The noise level is the robust scale of the second
difference within slices, as of photographs (`lowtide.models.denoiser.noise_level`), over the
foreground only: magnitudes of the background have two thirds of its noise, or none at all where it
was masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.core.histogram import FloatHistogram
from lowtide.models.denoiser.noise_filter import NORMAL_MEDIAN, noise_response

_TAIL = 1e-3  # share of voxels below and above the range


@dataclass(frozen=True)
class VolumeRange:
    """Values of one volume: a robust minimum and maximum, and where its foreground begins.

    ``threshold`` divides the voxels into the two classes of the largest variance between them
    (Otsu); ``not_finite`` counts NaN and infinite voxels, which are left out.
    """

    low: float
    high: float
    threshold: float
    not_finite: int

    @property
    def span(self) -> float:
        """Difference of the robust maximum and minimum; 0 for a constant volume."""
        return self.high - self.low


class RangeStatistics:
    """Running statistics of the values of one volume."""

    def __init__(self) -> None:
        self._values, self._not_finite = FloatHistogram(), 0

    def add(self, values: np.ndarray) -> None:
        """Add float32 values in data units, of any shape."""
        finite = np.isfinite(values)
        self._not_finite += int(values.size - finite.sum())
        self._values.add(values[finite])

    def result(self) -> VolumeRange:
        """Return the range; all zeros where no voxel is finite."""
        if not self._values.count:
            return VolumeRange(0.0, 0.0, 0.0, self._not_finite)
        low, high = (self._values.quantile(share) for share in (_TAIL, 1 - _TAIL))
        return VolumeRange(low, high, _otsu(*self._values.filled()), self._not_finite)


class LevelStatistics:
    """Running estimate of the noise level of one volume whose range is known."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._responses = threshold, FloatHistogram()

    def add(self, image: np.ndarray) -> None:
        """Add one slice (H, W), float32 in data units; smaller than 3 × 3 adds nothing."""
        if min(image.shape) < 3:
            return
        values = image.astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(values, (3, 3))
        response = np.abs(noise_response(values))
        # Zeros are the outside of a mask, which has no noise.
        known = (np.isfinite(windows) & (windows != 0)).all((2, 3))
        self._responses.add(response[known & (windows.mean((2, 3)) > self._threshold)])

    def sigma(self) -> float | None:
        """Return the standard deviation of the noise, or None where no voxel tells it."""
        if not self._responses.count:
            return None
        return self._responses.quantile(0.5) / NORMAL_MEDIAN


def _otsu(values: np.ndarray, counts: np.ndarray) -> float:
    """Return the threshold of the largest variance between two classes of counted values.

    Below the least value for a single one, which is foreground.
    """
    if len(values) < 2:
        return float(values[0]) - 1
    below = np.cumsum(counts)[:-1].astype(np.float64)
    above = counts.sum() - below
    sums = np.cumsum(counts * values)
    difference = sums[:-1] / below - (sums[-1] - sums[:-1]) / above
    best = int(np.argmax(below * above * difference**2))
    return float(values[best] + values[best + 1]) / 2
