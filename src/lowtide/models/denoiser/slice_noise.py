"""Noise level of a volume of MRI from its slices: of the foreground, and of the background.

Both are in data units. In the foreground a filter removes what is smooth (`noise_response`), and
the least is taken of what its median response tells, and the flattest tenth of the 5 × 5 voxels:
structure only adds to either. Where structure is as fine as the voxels, it adds several times the
noise, and nothing within a slice tells them apart.

The background does. Its magnitudes have a Rayleigh distribution, whose quartiles are 0.907 standard
deviations of the noise apart. Where it was masked, or filtered until it has another shape, it tells
nothing; nor does it where several coils were summed, which has another shape too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.core.histogram import FloatHistogram
from lowtide.models.denoiser.noise_filter import NORMAL_MEDIAN, noise_response
from lowtide.models.denoiser.volume_level import VolumeRange

_SIDE = 5  # voxels of a window
# The tenth percentile of the mean squares of white noise of variance 1 in such windows.
_FLAT, _FLAT_SQUARE = 0.1, 0.4737
_LEAST_WINDOWS = 2000  # which overlap: fewer tell the percentile to more than 10 %
_QUARTILES = 0.9066  # difference of those of Rayleigh noise of 1
# Median by that difference, 1.30 of Rayleigh noise, 1.14 where 1.5 steps of integers are one
# standard deviation, and up to 2.1 where it was interpolated, which
# averages it. Less is broader than noise: edges, ghosts, or areas that were masked in part.
_LEAST_SHAPE, _MOST_SHAPE = 1.1, 2.1
# Sum of the quartiles less twice the median by that difference, 0.076 of Rayleigh noise.
_LEAST_SKEW, _MOST_SKEW = 0.0, 0.15
_LEAST_VOXELS = 500
_MOST_ZEROS = 2  # of 9 voxels that are rounded noise; more are the edge of a mask
# Noise is a little weaker in a foreground of few standard deviations, and else is not: what seems
# so is dark tissue, not background.
_MOST_ABOVE = 1.2


@dataclass(frozen=True)
class SliceNoise:
    """Standard deviations of the noise, None where no voxel tells it."""

    foreground: float | None
    background: float | None


class SliceNoiseStatistics:
    """Running estimate of the noise of one volume whose range is known."""

    def __init__(self, values: VolumeRange) -> None:
        self._range = values
        self._responses, self._squares = FloatHistogram(), FloatHistogram()
        self._magnitudes = FloatHistogram()

    def add(self, image: np.ndarray) -> None:
        """Add one slice (H, W), float32 in data units; smaller than 3 × 3 adds nothing."""
        if min(image.shape) < 3:
            return
        values = image.astype(np.float32)
        finite = _sums(np.isfinite(values), 3) == 9
        values = np.where(np.isfinite(values), values, 0)
        # Zeros are the outside of a mask, which has no noise.
        zeros = _sums(values == 0, 3)
        means = _sums(values, 3) / 9
        response = noise_response(values)
        inside = finite & (zeros == 0) & (means > self._range.threshold)
        self._responses.add(np.abs(response[inside]))
        if min(response.shape) >= _SIDE:
            flat = _sums(inside, _SIDE) == _SIDE**2
            self._squares.add((_sums(response**2, _SIDE) / _SIDE**2)[flat])
        # Chosen by their means, so that nothing cuts the distribution off.
        outside = finite & (zeros <= _MOST_ZEROS) & (means < self._range.background * 2 / 3)
        self._magnitudes.add(values[1:-1, 1:-1][outside])

    def result(self) -> SliceNoise:
        """Return what the slices tell."""
        foreground = self._foreground()
        background = self._background()
        if foreground is not None and background is not None:
            background = background if background <= _MOST_ABOVE * foreground else None
        return SliceNoise(foreground, background)

    def _foreground(self) -> float | None:
        if not self._responses.count:
            return None
        found = self._responses.quantile(0.5) / NORMAL_MEDIAN
        if self._squares.count < _LEAST_WINDOWS:
            return found
        return min(found, (self._squares.quantile(_FLAT) / _FLAT_SQUARE) ** 0.5)

    def _background(self) -> float | None:
        if self._magnitudes.count < _LEAST_VOXELS:
            return None
        first, median, third = (self._magnitudes.quantile(share) for share in (0.25, 0.5, 0.75))
        spread = third - first
        skew = first + third - 2 * median
        right = _LEAST_SHAPE * spread <= median <= _MOST_SHAPE * spread
        right &= _LEAST_SKEW * spread <= skew <= _MOST_SKEW * spread
        return spread / _QUARTILES if right else None


def _sums(values: np.ndarray, side: int) -> np.ndarray:
    """Return the sums over each ``side`` × ``side`` values of an image, (H - side + 1, ...)."""
    kind = np.float64 if values.dtype.kind == "f" else np.int32
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(values, side, axis)
        values = windows.sum(-1, dtype=kind)
    return values
