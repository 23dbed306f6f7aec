"""Chroma twice as fine by linear interpolation, and back by the short filter that undoes it."""

from __future__ import annotations

import numpy as np

# Filters of the way back, by the place of a chroma sample between its two rows (or columns): the
# first tap's place from there, and the weights.
FILTERS = {
    0.0: (-2, (-0.125, 0.25, 0.75, 0.25, -0.125)),
    0.5: (-1, (-0.25, 0.75, 0.75, -0.25)),
    1.0: (-1, (-0.125, 0.25, 0.75, 0.25, -0.125)),
}
BORDER = 2  # mirrored columns on each side, as many as filters reach


def doubled(samples: np.ndarray, axis: int, start: float, count: int) -> np.ndarray:
    """Return samples (rows, columns), of which each counts for two, interpolated on an axis.

    Args:
        samples: Samples that lie 2 apart.
        axis: The axis.
        start: Place of the first result, where the first sample is at 0.
        count: Number of results, 1 apart.
    """
    samples = np.moveaxis(samples, axis, 0)
    out = np.empty(
        (count, samples.shape[1]) if axis == 0 else (samples.shape[1], count), np.float32
    )
    results, weighted = np.moveaxis(out, axis, 0), {}
    for phase in range(2):
        below, share = divmod((start + phase) / 2, 1)
        below, half = int(below), results[phase::2]
        for one in (share, 1 - share):
            if one not in weighted:
                weighted[one] = samples * np.float32(one)
        after = below + len(half)
        if share == 0:
            half[:] = samples[below:after]
        else:
            upper, lower = weighted[1 - share], weighted[share]
            np.add(upper[below:after], lower[below + 1 : after + 1], out=half)
    return out


def halved(samples: np.ndarray, axis: int, offset: float, count: int) -> np.ndarray:
    """Return ``count`` samples filtered on an axis; ``samples`` begin with the first one's taps."""

    def tap(place: int) -> np.ndarray:
        cut = [slice(None)] * samples.ndim
        cut[axis] = slice(place, place + 2 * count - 1, 2)
        return samples[tuple(cut)]

    _, weights = FILTERS[offset]
    size = len(weights)
    out = tap(0) + tap(size - 1)
    out *= np.float32(weights[0])
    for place in range(1, size // 2):
        pair = tap(place) + tap(size - 1 - place)
        pair *= np.float32(weights[place])
        out += pair
    if size % 2:
        out += tap(size // 2) * np.float32(weights[size // 2])
    return out


def mirrored(places: np.ndarray, offset: float, length: int) -> np.ndarray:
    """Return places in a picture instead of those outside, so that `doubled` is undone there.

    A chroma sample that lies on the first or last sample is mirrored about that, others about the
    border.
    """
    at_start = offset == 0
    at_end = offset != 0.5 and (length % 2 == 1) == at_start
    places = np.where(places < 0, -places - (not at_start), places)
    places = np.where(places >= length, 2 * length - 1 - at_end - places, places)
    return places.clip(0, length - 1)
