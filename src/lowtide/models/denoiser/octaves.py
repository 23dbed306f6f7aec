"""Strength of an image's blocks in three octaves of detail, which tells noise from what is smooth.

A block of 16 × 16 pixels is transformed (orthonormal DCT-II) without its mean and its slope. Its
coefficients are as large as the noise at their frequency: white noise of standard deviation 1 has
1 everywhere; noise that neighboring pixels share, as after demosaicing, resizing or JPEG, has less
at high frequencies. The mean of their absolute values is less of edges than their mean square.

`octave_levels` are the levels of noise in these octaves as a denoiser is given them, of brightness
and of color.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

BLOCK = 16  # pixels on a side
# Least frequency of the bands, in shares of the largest: fine, middle and coarse detail.
_BANDS = 0.5, 0.25, 0.125
# Brightness and two differences of colors, which white noise of three channels has alike.
OPPONENTS = np.array(
    [
        [1 / math.sqrt(3)] * 3,
        [1 / math.sqrt(2), 0, -1 / math.sqrt(2)],
        [1 / math.sqrt(6), -2 / math.sqrt(6), 1 / math.sqrt(6)],
    ]
)

# How many times stronger texture is in the coarse octave than in the middle one, at least, and
# noise that JPEG left to brightness; of levels by `band_strengths`.
_TEXTURE_GROWS, _NOISE_GROWS = 3.0, 1.4
# What brightness of flat blocks has in the middle octave without any noise.
_TEXTURE = 5 / 255
_WHITE = 1.3  # largest level by the least, of the octaves that texture hardly reaches
# Exponents of an octave's next finer one: a diagonal Haar band lies between both.
_MIDDLE_REACHES, _COARSE_REACHES = 0.12, 0.25
_TINY = 1e-9


def band_strengths(rows: np.ndarray) -> np.ndarray:
    """Return what noise the blocks of a strip would have: (blocks, C, 3), fine to coarse.

    Args:
        rows: Values (N, W, C) of a strip of at most `BLOCK` rows, of three colors their
            `OPPONENTS`; both sides are at least 3. Columns beyond whole blocks are left out.
    """
    height, width, channels = rows.shape
    side = min(BLOCK, width)
    count = width // side
    whole = rows[:, : count * side].reshape(height, -1)
    columns = (_transform(height) @ whole).reshape(height, count, side, channels)
    found = columns.transpose(1, 3, 0, 2) @ _transform(side).T
    # A slope is an odd function of the place: its part of each coefficient follows from the first.
    for size, one in ((height, found[..., 0]), (side, found[..., 0, :])):
        one[..., 1:] -= one[..., 1:2] * _slope(size)[1:]
    return np.abs(found).reshape(count, channels, -1) @ _band_weights(height, side)


@lru_cache(maxsize=8)
def band_sizes(height: int, width: int) -> np.ndarray:
    """Return how many coefficients of a block (H, W) the three bands have."""
    return (_band_weights(height, width) > 0).sum(0)


@lru_cache(maxsize=8)
def _band_weights(height: int, width: int) -> np.ndarray:
    """Return the weights (H·W, 3) of absolute coefficients, which make means of 1 of white noise.

    A normal variable's mean absolute value is √(2/π) of its standard deviation.
    """
    rows, columns = np.arange(height)[:, None] / height, np.arange(width) / width
    frequency = np.maximum(rows, columns).ravel()
    above, weights = np.inf, []
    for least in _BANDS:
        inside = (frequency >= least) & (frequency < above)
        weights.append(inside * (math.sqrt(math.pi / 2) / max(1, inside.sum())))
        above = least
    return np.stack(weights, 1).astype(np.float32)


@lru_cache(maxsize=8)
def _transform(size: int) -> np.ndarray:
    """Return the orthonormal DCT-II (size, size)."""
    place = (np.arange(size) + 0.5) * math.pi / size
    matrix = np.cos(np.arange(size)[:, None] * place) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)


@lru_cache(maxsize=8)
def _slope(size: int) -> np.ndarray:
    """Return the transform of a slope, 1 at the first frequency."""
    found = _transform(size) @ (np.arange(size, dtype=np.float32) - (size - 1) / 2)
    return found / found[1]


def brightness_alone(levels: np.ndarray, lost: float) -> float:
    """Return the noise of brightness in the middle octave that has no color, in JPEGs.

    Coding removes noise of colors that is weaker than its step. Texture looks alike, but is
    stronger in the coarse octave.

    Args:
        levels: Brightness by octave (3,), fine to coarse.
        lost: The strongest noise of colors that coding may have removed, 0 without coding.
    """
    _, middle, coarse = levels
    noise = (_TEXTURE_GROWS * middle) ** 2 - coarse**2
    noise /= _TEXTURE_GROWS**2 - _NOISE_GROWS**2
    return min(lost, middle, math.sqrt(max(0.0, noise - _TEXTURE**2)))


def octave_levels(levels: np.ndarray, sigma: float, lost: float) -> tuple[float, ...]:
    """Return the noise (6,) in the diagonal Haar bands of 1, 2 and 4 pixels.

    Three are of brightness and three of color; white noise has ``sigma`` in each.

    Args:
        levels: Of `band_strengths` by octave (C, 3), fine to coarse; three channels are
            `OPPONENTS`.
        sigma: The level as a whole.
        lost: As `brightness_alone` takes it.
    """
    if len(levels) != 3:
        # As three equal channels, all of whose noise is brightness.
        return (math.sqrt(3) * sigma,) * 3 + (0.0,) * 3
    bright, color = levels[0], np.sqrt((levels[1:] ** 2).mean(0))
    seen = bright[0], color[0], color[1]
    if max(seen) <= _WHITE * min(seen):
        return (sigma,) * 6
    alone = brightness_alone(bright, lost)
    middle = min(bright[1], max(color[1], alone, bright[0]))
    growth = color[2] / max(color[1], _TINY) if 2 * color[1] > middle else _NOISE_GROWS
    coarse = min(bright[2], max(color[2], middle * growth))
    return *_haar(bright[0], middle, coarse), *_haar(*color)


def _haar(fine: float, middle: float, coarse: float) -> tuple[float, float, float]:
    """Return the diagonal Haar bands of noise with these levels by octave."""
    return (
        float(fine),
        float(middle ** (1 - _MIDDLE_REACHES) * fine**_MIDDLE_REACHES),
        float(coarse ** (1 - _COARSE_REACHES) * middle**_COARSE_REACHES),
    )
