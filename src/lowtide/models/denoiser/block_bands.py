"""Strength of an image's blocks in three octaves of detail, which tells noise from what is smooth.

A block of 16 × 16 pixels is transformed (orthonormal DCT-II) without its mean and its slope. Its
coefficients are as large as the noise at their frequency: white noise of standard deviation 1 has
1 everywhere; noise that neighboring pixels share, as after demosaicing, resizing or JPEG, has less
at high frequencies. The mean of their absolute values is less of edges than their mean square.
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
