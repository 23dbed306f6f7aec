"""Range, foreground, background and noise of a volume of MRI, slice by slice, in data units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.models.denoiser.noise_statistics import NORMAL_MEDIAN, noise_response

# Bits of a float32 that are counted: sign, exponent and ten of the mantissa.
_DROPPED = 13
_BINS = 1 << (32 - _DROPPED)
_SIGN = np.uint32(1 << 31)

_TAIL = 1e-3  # share of voxels below and above the range
# Of Rayleigh noise this times the median is above all but a thousandth.
_MEDIANS = 3.0
# Times what nearly all voxels but zeros reach: scanners have at most 16 bits.
_NEARLY_ALL, _BEYOND = 0.95, 1e3
_MOST_ROUNDS = 50

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


class FloatHistogram:
    """Counts of float32 values in bins as wide as a thousandth of the value."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count finite values, of any shape."""
        # As integers, positive floats ascend with their bits and negative ones descend.
        bits = np.ascontiguousarray(values, np.float32).ravel().view(np.uint32)
        places = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint32(_DROPPED)
        np.add.at(self._counts, places, 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self._counts.sum())

    def filled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return values and counts of the bins that are not empty, in ascending order."""
        places = np.flatnonzero(self._counts).astype(np.uint32)
        # Values at the beginning of their bin: whole numbers of few bits are exact.
        codes = places << np.uint32(_DROPPED)
        bits = np.where(codes & _SIGN, codes ^ _SIGN, ~codes)
        return bits.view(np.float32).astype(np.float64), self._counts[places]

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all lies, interpolated between bins."""
        return _quantile(*self.filled(), share)


def _quantile(values: np.ndarray, counts: np.ndarray, share: float) -> float:
    middles = np.cumsum(counts) - counts / 2
    return float(np.interp(share * middles[-1] + share * counts[-1] / 2, middles, values))


@dataclass(frozen=True)
class VolumeRange:
    """Values of one volume: a robust minimum and maximum, and where its foreground begins.

    Attributes:
        threshold: Value between the two classes of voxels with the largest variance between them
            (Otsu).
        not_finite: Number of NaN and infinite voxels, and those beyond ``most``: all are left out.
        most: Largest magnitude that counts as a value.
        background: Most of what the background's noise reaches, if there is one; 0 where magnitudes
            are negative or nothing is below the threshold.
        limits: Least and largest value.
    """

    low: float
    high: float
    threshold: float
    not_finite: int
    most: float
    background: float = 0.0
    limits: tuple[float, float] = (-np.inf, np.inf)

    @property
    def span(self) -> float:
        """Difference of the robust maximum and minimum; 0 for a constant volume."""
        return self.high - self.low

    def known(self, values: np.ndarray) -> np.ndarray:
        """Return values in data units with those beyond ``most`` as infinity, which they mean."""
        beyond = np.abs(values) > self.most
        return np.where(beyond, np.copysign(np.float32(np.inf), values), values)


class VolumeRangeEstimator:
    """Running statistics of the values of one volume."""

    def __init__(self) -> None:
        self._values, self._not_finite = FloatHistogram(), 0
        self._least, self._largest = np.inf, -np.inf

    def add(self, values: np.ndarray) -> None:
        """Add float32 values in data units, of any shape."""
        found = values[np.isfinite(values)]
        self._not_finite += values.size - found.size
        self._values.add(found)
        self._least = float(found.min(initial=self._least))
        self._largest = float(found.max(initial=self._largest))

    def result(self) -> VolumeRange:
        """Return the range; all zeros where no voxel is finite."""
        if not self._values.count:
            return VolumeRange(0.0, 0.0, 0.0, self._not_finite, np.inf)
        values, counts = self._values.filled()
        most = _most(values, counts)
        inside = np.abs(values) <= most
        not_finite = self._not_finite + int(counts[~inside].sum())
        values, counts = values[inside], counts[inside]
        low, high = (_quantile(values, counts, share) for share in (_TAIL, 1 - _TAIL))
        # A few hot voxels are no class of their own.
        threshold = _otsu(values.clip(2 * low - high, 2 * high - low), counts)
        background = _background(values, counts, threshold)
        # Of those beyond ``most`` the bins tell the rest, to a thousandth.
        limits = (
            self._least if self._least >= -most else float(values[0]),
            self._largest if self._largest <= most else float(values[-1]),
        )
        return VolumeRange(low, high, threshold, not_finite, most, background, limits)


def _most(values: np.ndarray, counts: np.ndarray) -> float:
    """Return the magnitude beyond which a voxel is damage: far above nearly all but zeros."""
    sizes, at = np.unique(np.abs(values), return_inverse=True)
    counts = np.bincount(at, counts)
    if sizes[0] == 0:
        sizes, counts = sizes[1:], counts[1:]
    if not len(sizes):
        return np.inf
    # A value that is there, not between two: of few voxels one must not decide.
    reached = np.cumsum(counts)
    place = np.searchsorted(reached, _NEARLY_ALL * (reached[-1] - 1), side="right")
    return _BEYOND * float(sizes[place])


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


@dataclass(frozen=True)
class SliceNoiseEstimate:
    """Standard deviations of the noise, None where no voxel tells it."""

    foreground: float | None
    background: float | None


class SliceNoiseEstimator:
    """Running estimate of the noise of one volume whose range is known.

    Both levels are in data units. In the foreground a filter removes what is smooth
    (`noise_response`), and the least is taken of what its median response tells, and the flattest
    tenth of the 5 × 5 voxels: structure only adds to either. Where structure is as fine as the
    voxels, it adds several times the noise, and nothing within a slice tells them apart.

    The background does. Its magnitudes have a Rayleigh distribution, whose quartiles are 0.907
    standard deviations of the noise apart. Where it was masked, or filtered until it has another
    shape, it tells nothing; nor does it where several coils were summed, which has another shape
    too.
    """

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

    def result(self) -> SliceNoiseEstimate:
        """Return what the slices tell."""
        foreground = self._foreground()
        background = self._background()
        if foreground is not None and background is not None:
            background = background if background <= _MOST_ABOVE * foreground else None
        return SliceNoiseEstimate(foreground, background)

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
