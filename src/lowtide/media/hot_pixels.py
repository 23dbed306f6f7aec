"""Hot pixels of a sensor: found and mended in the values of a camera RAW file.

They are far above all their neighbors of the same color, and alone: of a star the pixels next to
it, of other colors, are bright too.
"""

from __future__ import annotations

import numpy as np

_BAND = 1 << 18  # pixels
_SAMPLES = 1 << 20  # pixels that tell the noise
_LEVELS = 32  # ranges of brightness, each with noise of its own
_NOISE = 8  # standard deviations above the neighbors
_ALONE = 6  # times what the second of the adjacent pixels is above its own neighbors
_NORMAL_MEDIAN = 0.6745


def mend_hot_pixels(values: np.ndarray, period: int) -> int:
    """Replace hot pixels by the median of their neighbors of the same color, in place.

    Args:
        values: Levels (H, W) with a filter array of so many places a side, or (H, W, 3); uint16.

    Returns:
        How many there were; none in values with fewer than three periods a side.
    """
    planes = [values] if values.ndim == 2 else [values[..., one] for one in range(values.shape[2])]
    if min(values.shape[:2]) < 3 * period:
        return 0
    return sum(_mend(plane, period) for plane in planes)


def _mend(values: np.ndarray, period: int) -> int:
    height, width = values.shape
    edges, noise = _noise(values, period)
    step, found = max(1, _BAND // width), []
    for top in range(0, height, step):
        bottom = min(top + step, height)
        pixels, around, excess = _around(values, top, bottom, period)
        first, second = _two_largest(around)
        limit = _NOISE * noise[np.searchsorted(edges, second)]
        # The second largest, so that two hot pixels next to each other do not hide one another.
        beside = second - np.mean(around, axis=0)
        if period > 1:
            beside = _two_largest(_shifted(excess, 1))[1]
        hot = (pixels >= first) & (pixels - second > limit)
        hot &= excess[1:-1, 1:-1] > _ALONE * beside
        rows, columns = np.nonzero(hot)
        medians = np.median([one[rows, columns] for one in around], axis=0)
        found.append((rows + top, columns, medians))
    for rows, columns, medians in found:
        values[rows, columns] = np.rint(medians).astype(values.dtype)
    return sum(len(rows) for rows, _, _ in found)


def _noise(values: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return edges between ranges of brightness, and the noise in each, of pixels and texture."""
    height, width = values.shape
    step = max(1, _BAND // width)
    every = max(1, height * width // _SAMPLES)
    levels, changes = [], []
    for top in range(0, height, step):
        pixels, around, _ = _around(values, top, min(top + step, height), period)
        second = _two_largest(around)[1]
        mean = np.mean(around, axis=0)
        levels.append(second.ravel()[::every])
        changes.append((pixels - mean).ravel()[::every])
    level, change = np.concatenate(levels), np.abs(np.concatenate(changes))
    edges = np.quantile(level, np.arange(1, _LEVELS) / _LEVELS)
    places = np.searchsorted(edges, level)
    spread = [
        float(np.median(change[places == one])) if (places == one).any() else np.inf
        for one in range(_LEVELS)
    ]
    return edges, np.maximum(np.array(spread) / _NORMAL_MEDIAN, 1.0)


def _around(
    values: np.ndarray, top: int, bottom: int, period: int
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Return rows as float32, their eight neighbors of the same color, and what is above those.

    The latter, above the mean of the neighbors, with one pixel more on each side.
    """
    halo = period + 1
    rows = np.arange(top - halo, bottom + halo)
    last = len(values) - 1
    rows = last - np.abs(last - np.abs(rows))  # mirrored, which keeps the color
    wide = np.pad(values[rows].astype(np.float32), ((0, 0), (halo, halo)), "reflect")
    near = _shifted(wide, period)
    excess = wide[period:-period, period:-period] - np.mean(near, axis=0)
    inner = slice(1, -1)
    return (
        wide[halo:-halo, halo:-halo],
        [one[inner, inner] for one in near],
        excess,
    )


def _shifted(values: np.ndarray, distance: int) -> list[np.ndarray]:
    """Return the eight neighbors at a distance of all but so many pixels at each side."""
    height, width = (side - 2 * distance for side in values.shape)
    return [
        values[y : y + height, x : x + width]
        for y in (0, distance, 2 * distance)
        for x in (0, distance, 2 * distance)
        if (y, x) != (distance, distance)
    ]


def _two_largest(values: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.maximum(values[0], values[1]), np.minimum(values[0], values[1])
    for one in values[2:]:
        second = np.maximum(second, np.minimum(first, one))
        first = np.maximum(first, one)
    return first, second
