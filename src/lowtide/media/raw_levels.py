"""Black and white levels of a camera RAW file against the levels that its data have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowtide.core.errors import ImageError
from lowtide.media.raw_file import RawFile

# Means of this many places a side have a sixteenth of the noise, so that the darkest of them is not
# below black by more than a tenth of it, whatever the ISO. A doubled black level is twice too high.
_SIDE = 16
_DARKEST = 0.1  # percent of the means
_BELOW_BLACK = 0.75
# A difference that matters, as a share of white: less than a thousandth is a sensor's drift.
_DRIFT = 1e-3
# Without a black level in the file: one of 64 in 12 bits is 1.6 % of white, one of 64 in 10 bits
# 6 %, and noise reaches down to half of that; in files that really begin at 0 a few pixels are near
# it. One in a million may be dead.
_LOWEST = 1e-6
_OFFSET = 5e-3
_BRIGHT = 0.999
_BAND = 1 << 20


@dataclass(frozen=True)
class RawLevels:
    """Levels that the data of a RAW file have.

    Attributes:
        lowest: Level that all but a millionth of the pixels reach.
        darkest: Mean of the darkest parts, of the shape of `RawFile.black`.
        bright: Level that a thousandth of the pixels exceeds.
        saturated: Share of pixels at the white level or above.
    """

    lowest: int
    darkest: np.ndarray
    bright: int
    saturated: float


def measure_levels(raw: RawFile) -> RawLevels:
    """Return the levels of a file, read in bands."""
    counts = np.zeros(1 << 16, np.int64)
    means: list[np.ndarray] = []
    for band in _bands(raw):
        counts += np.bincount(band.ravel(), minlength=1 << 16)
        means += _block_means(band, raw.black)
    sums = np.cumsum(counts)
    lowest, bright = np.searchsorted(sums, [_LOWEST * sums[-1], _BRIGHT * sums[-1]], "right")
    saturated = 1 - sums[int(np.ceil(raw.white)) - 1] / sums[-1]
    darkest = np.percentile(np.concatenate(means), _DARKEST, axis=0)
    return RawLevels(int(lowest), darkest, int(bright), float(saturated))


def check_levels(raw: RawFile, levels: RawLevels, *, given: bool) -> list[str]:
    """Return notes on the black level, which was ``given`` or is the file's.

    Raises:
        ImageError: It stands clearly above the darkest parts of the data, or is 0 and the data
            stand clearly above that.
    """
    above = raw.black - levels.darkest
    wrong = (levels.darkest < _BELOW_BLACK * raw.black) & (above > _DRIFT * raw.white)
    if wrong.any():
        place = np.unravel_index(np.argmax(np.where(wrong, above, -np.inf)), above.shape)
        black, dark = raw.black[place], levels.darkest[place]
        raise ImageError(
            f"{raw.path}: the black level is {black:g}, and the darkest parts of the data are at"
            f" {dark:.0f}" + ("" if given else ": it may be doubled"),
            hint=f"give the right one: --black-level {black / 2:.0f}, or at most {dark:.0f}",
        )
    if given or raw.black.any():
        return []
    if levels.lowest > _OFFSET * raw.white:
        raise ImageError(
            f"{raw.path}: the black level is 0, and the data begin at {levels.lowest} of"
            f" {raw.white:g}: it is not in the file",
            hint=f"give it: --black-level {levels.lowest}, or --black-level 0 if it is right",
        )
    if levels.lowest:
        return [
            f"the file says black level 0, and its data begin at {levels.lowest} of"
            f" {raw.white:g}; --black-level N sets it"
        ]
    return []


def _bands(raw: RawFile) -> Iterator[np.ndarray]:
    """Yield bands of rows that begin at the filter array's first place, the last one shorter."""
    height, width = raw.values.shape[:2]
    rows = _period(raw.black) * _SIDE
    rows *= max(1, _BAND // (rows * width))
    for top in range(0, height, rows):
        yield raw.values[top : top + rows]


def _block_means(band: np.ndarray, black: np.ndarray) -> list[np.ndarray]:
    """Return the means (N, ``*black.shape``) of blocks of a band, by place or color."""
    period = _period(black)
    places = band.shape[0] // period, band.shape[1] // period
    sides = [min(_SIDE, count) for count in places]
    if not all(sides):
        return []
    counts = [count // side for count, side in zip(places, sides, strict=True)]
    (rows, columns), (high, wide) = counts, sides
    used = band[: rows * high * period, : columns * wide * period]
    blocks = used.reshape(rows, high, period, columns, wide, period, -1)
    means = blocks.mean((1, 4), dtype=np.float64)  # (rows, period, columns, period, colors)
    return [means.transpose(0, 2, 1, 3, 4).reshape(-1, *black.shape)]


def _period(black: np.ndarray) -> int:
    return len(black) if black.ndim == 2 else 1
