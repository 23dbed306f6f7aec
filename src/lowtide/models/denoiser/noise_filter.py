"""Filter whose response is noise: [1 -2 1]ᵀ[1 -2 1] / 6.

It removes what is smooth and keeps the standard deviation of white noise, of which 0.674490 is the
median absolute response.
"""

from __future__ import annotations

import numpy as np

NORMAL_MEDIAN = 0.674490


def noise_response(values: np.ndarray) -> np.ndarray:
    """Return the response (H - 2, W - 2, ...) to values (H, W, ...), both at least 3 long."""
    return second_difference(second_difference(values, 0), 1) / 6


def second_difference(values: np.ndarray, axis: int) -> np.ndarray:
    """Return first - 2 · middle + last of each three neighbors along ``axis``."""
    first, middle, last = neighbors(values, axis)
    return first - 2 * middle + last


def neighbors(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of all but two along ``axis``: from the first, second and third place on."""
    size = values.shape[axis] - 2
    at = [slice(None)] * values.ndim
    views = []
    for start in range(3):
        at[axis] = slice(start, start + size)
        views.append(values[tuple(at)])
    return views[0], views[1], views[2]
