"""Estimate of a noise level from the noisy image itself, row by row.

The median of |I * [1 -2 1]ᵀ[1 -2 1] / 6| / 0.6745: a filter that removes what is smooth and keeps
the standard deviation of white noise, and the robust scale of what is left. Texture counts as
noise, which is a quarter too much at a sigma of 5 of 255 and a hundredth at 25.
"""

from __future__ import annotations

import numpy as np

# Half a step of 8 bits: no noise that could be seen, and less than texture is taken for.
LEAST_SIGMA = 0.5 / 255
# Values are counted in bins of this width, so that the median of any number takes the same memory.
_BINS = 1 << 16
_LARGEST = 2 / 3  # of values in 0..1: 16 / 6 times half the range is never reached by noise
_NORMAL_MEDIAN = 0.674490


class NoiseLevel:
    """Running estimate of the noise level of an image of C ``channels``.

    Neighborhoods with a value of 0 or 1 are left out: clipped noise is weaker.
    """

    def __init__(self, channels: int) -> None:
        self._counts = np.zeros((channels, _BINS), np.int64)
        self._rows = np.empty((0, 0, channels), np.float32)

    def add(self, rows: np.ndarray) -> None:
        """Add the next rows (N, W, C) of the image, float32 in 0..1."""
        known = self._rows
        rows = rows if not known.size else np.concatenate([known, rows])
        self._rows = rows[-2:].copy()
        if rows.shape[0] < 3 or rows.shape[1] < 3:
            return
        found = np.abs(_second_difference(_second_difference(rows, 0), 1)) / 6
        inside = (rows > 0) & (rows < 1)
        for axis in (0, 1):
            inside = _all_of_three(inside, axis)
        places = np.minimum(found * (_BINS / _LARGEST), _BINS - 1).astype(np.int64)
        for channel, counts in enumerate(self._counts):
            chosen = places[..., channel][inside[..., channel]]
            counts += np.bincount(chosen, minlength=_BINS)

    def sigma(self) -> float | None:
        """Return the standard deviation of the noise, or None where no pixel tells it.

        Of several channels their root mean square.
        """
        levels = [_median(counts) / _NORMAL_MEDIAN for counts in self._counts if counts.any()]
        return float(np.sqrt(np.mean(np.square(levels)))) if levels else None

    def levels_of_255(self) -> float | None:
        """Return `sigma` in levels of 255, to two decimals as reports have it."""
        sigma = self.sigma()
        return None if sigma is None else round(sigma * 255, 2)


def _median(counts: np.ndarray) -> float:
    """Return the median of counted values, linear inside its bin; 0 where that is the first."""
    sums = np.cumsum(counts)
    half = sums[-1] / 2
    place = int(np.searchsorted(sums, half))
    if place == 0:
        return 0.0
    within = (half - sums[place - 1]) / counts[place]
    return float(place + within) * _LARGEST / _BINS


def _second_difference(values: np.ndarray, axis: int) -> np.ndarray:
    first, middle, last = _three(values, axis)
    return first - 2 * middle + last


def _all_of_three(values: np.ndarray, axis: int) -> np.ndarray:
    first, middle, last = _three(values, axis)
    return first & middle & last


def _three(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of all but two along ``axis``: from the first, second and third place on."""
    size = values.shape[axis] - 2
    at = [slice(None)] * values.ndim
    views = []
    for start in range(3):
        at[axis] = slice(start, start + size)
        views.append(values[tuple(at)])
    return views[0], views[1], views[2]
