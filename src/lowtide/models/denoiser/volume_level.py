"""Range, foreground and background of a volume of MRI, slice by slice, in data units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.core.histogram import FloatHistogram

_TAIL = 1e-3  # share of voxels below and above the range
# Of Rayleigh noise this times the median is above all but a thousandth.
_MEDIANS = 3.0
_MOST_ROUNDS = 50


@dataclass(frozen=True)
class VolumeRange:
    """Values of one volume: a robust minimum and maximum, and where its foreground begins.

    Attributes:
        threshold: Value between the two classes of voxels with the largest variance between them
            (Otsu).
        not_finite: Number of NaN and infinite voxels, which are left out.
        background: Most of what the background's noise reaches, if there is one; 0 where magnitudes
            are negative or nothing is below the threshold.
    """

    low: float
    high: float
    threshold: float
    not_finite: int
    background: float = 0.0

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
        values, counts = self._values.filled()
        threshold = _otsu(values, counts)
        background = _background(values, counts, threshold)
        return VolumeRange(low, high, threshold, self._not_finite, background)


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


def _background(values: np.ndarray, counts: np.ndarray, threshold: float) -> float:
    """Return three medians of the values above 0 that are less than that."""
    if values[0] < 0:
        return 0.0
    most = threshold
    for _ in range(_MOST_ROUNDS):
        below = (values > 0) & (values < most)
        if not below.any():
            return 0.0
        reached = np.cumsum(counts[below])
        median = float(values[below][np.searchsorted(reached, reached[-1] / 2)])
        if _MEDIANS * median >= most:
            break
        most = _MEDIANS * median
    return most
