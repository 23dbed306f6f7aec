"""Estimate of a noise level from the noisy image itself, row by row.

A filter (`noise_response`) removes what is smooth and keeps the standard deviation of white noise.
Blocks with texture keep more of it, so that the flattest tenth of the blocks tells the noise: of
each quarter of the brightnesses, since noise may depend on brightness. The result is
their root mean square. Texture that is everywhere counts as noise, by a tenth at a sigma of 5 of
255 on most photographs.
"""

from __future__ import annotations

import math

import numpy as np

from lowtide.models.denoiser.noise_models import GaussianNoise
from lowtide.models.denoiser.noise_statistics import neighbors, noise_response

# Half a step of 8 bits: no noise that could be seen, and less than texture is taken for.
LEAST_SIGMA = 0.5 / 255
_BLOCK = 16  # pixels on a side
_GROUPS = 4  # of brightness
# Share of blocks that are flat, and how many a group has at least: a tenth of fewer is too few.
_FLAT, _LEAST_BLOCKS = 0.1, 32
# Sum of the squares of the filter's autocorrelation: so many neighbors count as one sample.
_CORRELATION = (1 + 2 * ((4 / 6) ** 2 + (1 / 6) ** 2)) ** 2
_NORMAL_TENTH = -1.281552


class NoiseLevel:
    """Running estimate of the noise level of an image of C ``channels``.

    Neighborhoods with a value of exactly 0 or 1 are left out: clipped noise is weaker. Keeps three
    numbers for each channel of a block of 16 × 16 pixels.
    """

    def __init__(self, channels: int) -> None:
        self._channels = channels
        self._rows = np.empty((0, 0, channels), np.float32)
        # For each strip of blocks: mean squares, means and pixels (blocks, C).
        self._strips: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        """Add the next rows (N, W, C) of the image, float32 in 0..1."""
        rows = rows if not self._rows.size else np.concatenate([self._rows, rows])
        while len(rows) >= _BLOCK + 2:
            self._strips.append(_strip(rows[: _BLOCK + 2]))
            rows = rows[_BLOCK:]
        self._rows = rows.copy()

    def sigma(self) -> float | None:
        """Return the standard deviation of the noise, or None where no pixel tells it.

        Of several channels their root mean square.
        """
        strips = self._strips
        if not strips and len(self._rows) > 2:
            strips = [_strip(self._rows)]  # an image of less than a block
        if not strips:
            return None
        squares, means, pixels = np.concatenate(strips, 1)
        levels = []
        for channel in range(self._channels):
            known = pixels[:, channel] > 0
            if known.any():
                levels.append(
                    _channel_variance(*(one[known, channel] for one in (squares, means, pixels)))
                )
        return math.sqrt(np.mean(levels)) if levels else None

    def gaussian(self) -> GaussianNoise | None:
        """Return noise of that level, to two decimals of 255 as reports have it."""
        sigma = self.sigma()
        return None if sigma is None else GaussianNoise(std=round(sigma * 255, 2) / 255)


def _strip(rows: np.ndarray) -> np.ndarray:
    """Return mean squares of filtered rows, means and pixels (3, blocks, C) of a strip of blocks.

    A block that is clipped by more than half has no pixels.
    """
    if rows.shape[1] < 3:
        return np.zeros((3, 0, rows.shape[2]))
    found = noise_response(rows)
    inside = (rows != 0) & (rows != 1)
    for axis in (0, 1):
        inside = _all_of_three(inside, axis)
    starts = np.arange(0, max(1, found.shape[1] - _BLOCK + 1), _BLOCK)
    width = min(_BLOCK, found.shape[1])
    columns = starts[-1] + width

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values[:, :columns].sum(0, dtype=np.float64), starts, axis=0)

    pixels = total(inside)
    pixels[pixels * 2 < len(found) * width] = 0
    count = np.maximum(pixels, 1)
    middle = rows[1:-1, 1:-1]
    return np.stack([total(found**2 * inside) / count, total(middle * inside) / count, pixels])


def _channel_variance(squares: np.ndarray, means: np.ndarray, pixels: np.ndarray) -> float:
    """Return the variance of the noise from what the blocks (N,) of a channel have."""
    # Blocks without any are areas that were drawn, or black bars: an image that is mostly such has
    # no noise, and else they tell nothing.
    noisy = squares > 0
    if noisy.mean() < 0.5:
        return 0.0
    squares, means, pixels = squares[noisy], means[noisy], pixels[noisy]
    groups = max(1, min(_GROUPS, len(squares) // _LEAST_BLOCKS))
    by_brightness = np.array_split(np.argsort(means, kind="stable"), groups)
    return float(np.mean([_flat_variance(squares[one], pixels[one]) for one in by_brightness]))


def _flat_variance(squares: np.ndarray, pixels: np.ndarray) -> float:
    """Return the variance of white noise whose flattest blocks are those found."""
    few = len(squares) < _LEAST_BLOCKS
    found = np.quantile(squares, 0.5 if few else _FLAT)
    # The same quantile of such means of white noise: chi-squared by Wilson and Hilferty.
    spread = 2 / 9 * _CORRELATION / np.median(pixels)
    normal = 0.0 if few else _NORMAL_TENTH
    return float(found / (1 - spread + normal * math.sqrt(spread)) ** 3)


def _all_of_three(values: np.ndarray, axis: int) -> np.ndarray:
    first, middle, last = neighbors(values, axis)
    return first & middle & last
