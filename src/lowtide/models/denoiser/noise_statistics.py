"""Running statistics of noise by brightness: of flat frames, pairs, single images and series.

A filter, [1 -2 1]ᵀ[1 -2 1] / 6, has noise as its response (`noise_response`). It removes what is
smooth and keeps the standard deviation of white noise, of which 0.674490 is the median absolute
response.

In a series a volume's voxels are predicted from the 3 × 3 voxels around the same place in the
volumes before and after (Noise2Noise), by ridge regression with the noisy volume itself as target.
The noise of the neighbors is independent of the target's, so that the prediction cannot follow it.
What the neighbors do not explain, such as another direction of diffusion, is smooth: the filter
removes it from the residual. It leaves the target's white noise and, through the weights w, that of
the neighbors: σ²·(1 + |v|²), where v is w after the filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.models.denoiser.noise_models import RicianNoise

NORMAL_MEDIAN = 0.674490

_BINS = 64
_FLATNESS = 256
_LEVELS = 4096
_LARGEST = 16 / 6  # of the filter's response to values in 0..1
_LEAST = 200  # pixels of a bin that counts
_DIAGONAL_EDGE = 6  # pixels of a mosaic that are needed at each side
_MOST_CLIPPED = 1e-3  # share of pixels: more would change the variance
# Neighbors of a pixel share the filter's terms: about every fourth response is independent, and a
# median tells a variance 2.7 times worse than its mean square.
_PER_PIXEL = 1 / (4 * 2.7)

_RIDGE = 1e-6  # of the mean variance of the inputs: equal volumes are collinear
_ROUNDS = 20
_FILTER = np.outer([1, -2, 1], [1, -2, 1]) / 6
_REACH = 5  # of the filter over predictions of 3 × 3 voxels
# A median absolute deviation tells a standard deviation with 1.65 times the error of the
# mean square's 1 / √(2n).
_MEDIAN_ERROR = 1.65 / math.sqrt(2)


def noise_response(values: np.ndarray) -> np.ndarray:
    """Return the response (H - 2, W - 2, ...) to values (H, W, ...), both at least 3 long."""
    return second_difference(second_difference(values, 0), 1) / 6


def second_difference(values: np.ndarray, axis: int) -> np.ndarray:
    """Return first - 2 · middle + last of each three neighbors along ``axis``."""
    first, middle, last = neighbor_views(values, axis)
    return first - 2 * middle + last


def neighbor_views(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of all but two along ``axis``: from the first, second and third place on."""
    size = values.shape[axis] - 2
    at = [slice(None)] * values.ndim
    views = []
    for start in range(3):
        at[axis] = slice(start, start + size)
        views.append(values[tuple(at)])
    return views[0], views[1], views[2]


def block_statistics(
    first: np.ndarray, second: np.ndarray, white: float, side: int = 32
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return means and variances (N,) of the blocks of two planes (H, W) of the same scene.

    Also the number of pixels in a block, and how many blocks were left out since a value is 0 or
    reaches ``white``. The variance is half that of the difference, so that patterns cancel.
    """
    side = min(side, *first.shape)
    height, width = (size - size % side for size in first.shape)
    blocks = [
        plane[:height, :width]
        .astype(np.float64)
        .reshape(height // side, side, width // side, side)
        .swapaxes(1, 2)
        .reshape(-1, side * side)
        for plane in (first, second)
    ]
    whole = np.all([(one > 0) & (one < white) for one in blocks], (0, 2))
    one, other = (block[whole] for block in blocks)
    variances = (one - other).var(1, ddof=1) / 2
    return (one + other).mean(1) / 2, variances, side * side, int((~whole).sum())


def _bin_of(values: np.ndarray) -> np.ndarray:
    """Return bins of values in 0..1: narrower in the dark, where linear images have most pixels."""
    return np.minimum(np.sqrt(values.clip(0, 1)) * _BINS, _BINS - 1).astype(np.int64)


class PairVarianceStatistics:
    """Variance of noisy images about clean ones, by clean value."""

    def __init__(self) -> None:
        self._sums = np.zeros((5, _BINS))

    def add(self, noisy: np.ndarray, clean: np.ndarray) -> None:
        """Add a noisy and a clean image of one shape, float32 in 0..1."""
        places = _bin_of(clean).ravel()
        noise = (noisy.astype(np.float64) - clean).ravel()
        clipped = (noisy <= 0) | (noisy >= 1)
        values = (None, clean.ravel(), noise, noise**2, clipped.ravel())
        for sums, weights in zip(self._sums, values, strict=True):
            sums += np.bincount(places, weights, _BINS)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return means, variances and counts of the bins that clipping has not touched."""
        counts, clean, noise, squares, clipped = self._sums
        used = (counts >= _LEAST) & (clipped <= _MOST_CLIPPED * counts)
        counts = counts[used]
        variances = squares[used] / counts - (noise[used] / counts) ** 2
        return clean[used] / counts, variances * counts / (counts - 1), counts

    @property
    def offset(self) -> float:
        """Largest mean difference of noisy and clean in such a bin, as a share of the value."""
        counts, clean, noise, _, clipped = self._sums
        used = (counts >= _LEAST) & (clipped <= _MOST_CLIPPED * counts) & (clean > 0.05 * counts)
        return float(np.max(np.abs(noise[used] / clean[used]), initial=0.0))

    @property
    def clipped(self) -> float:
        """Share of pixels at 0 or 1."""
        return float(self._sums[4].sum() / max(self._sums[0].sum(), 1))


class ImageVarianceStatistics:
    """Variance of single noisy images by local mean, at their flattest pixels.

    Noise is what the filter [1 -2 1]ᵀ[1 -2 1] / 6 leaves, its scale the median in each bin. Flat is
    a pixel whose surroundings differ less than those of half of the pixels of its bin: that is
    judged by 25 pixels next to the filter's nine, so that choosing does not bias the noise.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((_BINS, _LEVELS), np.int64)
        self._sums = np.zeros((3, _BINS))

    def add(self, plane: np.ndarray) -> None:
        """Add one channel (H, W) of an image, float32 in 0..1; smaller than 11 × 11 adds none."""
        if min(plane.shape) < 11:
            return
        means = _box_means(plane.astype(np.float64), 5)
        across = np.abs(means[3:-3, 6:] - means[3:-3, :-6])
        change = across + np.abs(means[6:, 3:-3] - means[:-6, 3:-3])
        inner = plane[5:-5, 5:-5]
        response = np.abs(noise_response(plane)[4:-4, 4:-4])
        self._count(means[3:-3, 3:-3], change, response, (inner <= 0) | (inner >= 1))

    def add_diagonals(self, mosaic: np.ndarray, parity: int) -> None:
        """Add the color of a mosaic (H, W) that has every place of row plus column ``parity``.

        The filter lies along the diagonals, where such pixels are closer to each other than along
        rows: texture leaves less in it than in the color's planes.
        """
        edge = _DIAGONAL_EDGE
        if min(mosaic.shape) < 2 * edge + 2:
            return
        values = mosaic.astype(np.float64)

        def at(y: int, x: int) -> np.ndarray:
            return values[
                edge + y : values.shape[0] - edge + y, edge + x : values.shape[1] - edge + x
            ]

        def near(y: int, x: int) -> np.ndarray:
            return at(y - 1, x - 1) + at(y - 1, x + 1) + at(y + 1, x - 1) + at(y + 1, x + 1)

        def mean(y: int, x: int) -> np.ndarray:
            return (at(y, x) + near(y, x)) / 5

        inner, beside = at(0, 0), near(0, 0)
        beyond = at(-2, 0) + at(2, 0) + at(0, -2) + at(0, 2)
        change = np.abs(mean(-4, 0) - mean(4, 0)) + np.abs(mean(0, -4) - mean(0, 4))
        rows, columns = np.indices(inner.shape)
        own = (rows + columns) % 2 == parity  # the edge is even
        self._count(
            ((inner + beside + beyond) / 9)[own],
            change[own],
            np.abs(4 * inner - 2 * beside + beyond)[own] / 6,
            ((inner <= 0) | (inner >= 1))[own],
        )

    def _count(
        self, centers: np.ndarray, change: np.ndarray, response: np.ndarray, clipped: np.ndarray
    ) -> None:
        """Count responses of flat pixels: their local means, and what is around them."""
        places = _bin_of(centers)
        flat = change <= _thresholds(places, change)[places]
        for sums, weights in zip(self._sums, (None, centers, clipped), strict=True):
            chosen = None if weights is None else weights[flat]
            sums += np.bincount(places[flat], chosen, _BINS)
        levels = np.minimum(np.sqrt(response / _LARGEST) * _LEVELS, _LEVELS - 1).astype(np.int64)
        joint = places[flat] * _LEVELS + levels[flat]
        self._counts += np.bincount(joint, minlength=_BINS * _LEVELS).reshape(_BINS, _LEVELS)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return means, variances and effective counts of the bins that are not clipped."""
        counts, means, clipped = self._sums
        used = (counts >= _LEAST) & (clipped <= _MOST_CLIPPED * counts)
        counts = counts[used]
        sums = np.cumsum(self._counts[used], 1)
        variances = [_median_response(one) ** 2 / NORMAL_MEDIAN**2 for one in sums]
        return means[used] / counts, np.array(variances), counts * _PER_PIXEL

    @property
    def clipped(self) -> float:
        """Share of flat pixels at 0 or 1."""
        return float(self._sums[2].sum() / max(self._sums[0].sum(), 1))


def _median_response(sums: np.ndarray) -> float:
    """Return the median of counted responses from their running sums."""
    half = sums[-1] / 2
    place = int(np.searchsorted(sums, half))
    before = sums[place - 1] if place else 0
    within = (half - before) / (sums[place] - before)
    return float((place + within) / _LEVELS) ** 2 * _LARGEST


def _thresholds(places: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Return, for each bin, about the median of ``change`` in it."""
    levels = np.minimum(np.sqrt(change / 2) * _FLATNESS, _FLATNESS - 1).astype(np.int64)
    counts = np.bincount((places * _FLATNESS + levels).ravel(), minlength=_BINS * _FLATNESS)
    sums = np.cumsum(counts.reshape(_BINS, _FLATNESS), 1)
    middle = (sums < (sums[:, -1:] + 1) // 2).sum(1)
    return 2 * ((middle + 1) / _FLATNESS) ** 2


def _box_means(plane: np.ndarray, side: int) -> np.ndarray:
    """Return the means of all ``side`` × ``side`` windows inside a plane."""
    sums = np.pad(plane, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    rows = sums[side:] - sums[:-side]
    return (rows[:, side:] - rows[:, :-side]) / side**2


@dataclass(frozen=True)
class NeighborNoiseEstimate:
    """Standard deviation of the Rician noise of a volume in data units, with its error."""

    std: float
    error: float
    voxels: int


class NeighborNoiseEstimator:
    """Voxels of one volume with those of its neighbors, every ``stride``-th of the foreground."""

    def __init__(self, threshold: float, stride: int) -> None:
        self._threshold, self._stride, self._seen = threshold, stride, 0
        self._inputs: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []

    def add(self, target: np.ndarray, neighbors: Sequence[np.ndarray]) -> None:
        """Add a slice (H, W) and the same of neighboring volumes, float32 in data units.

        Voxels closer than two to an edge are left out.
        """
        if min(target.shape) < _REACH:
            return
        height, width = (size - _REACH + 1 for size in target.shape)
        places = np.arange(-self._seen % self._stride, height * width, self._stride)
        self._seen += height * width
        at = np.unravel_index(places, (height, width))
        around = np.stack([_windows(one, _REACH)[at] for one in neighbors], 1, dtype=np.float64)
        own = _windows(target[1:-1, 1:-1], 3)[at].astype(np.float64)
        finite = np.isfinite(around).all((1, 2, 3)) & np.isfinite(own).all((1, 2))
        around[~finite] = 0
        # Chosen by the neighbors alone: the target's noise must not decide.
        used = finite & (around.mean((1, 2, 3)) > self._threshold)
        self._inputs.append(around[used])
        self._targets.append(own[used])

    def result(self) -> NeighborNoiseEstimate | None:
        """Return the noise, or None where fewer than 10 voxels a weight are foreground."""
        if not self._inputs:
            return None
        inputs, targets = np.concatenate(self._inputs), np.concatenate(self._targets)
        voxels, volumes = inputs.shape[:2]
        if voxels < 10 * 9 * volumes:
            return None
        weights, offset = _ridge(inputs[:, :, 1:-1, 1:-1].reshape(voxels, -1), targets[:, 1, 1])
        weights = weights.reshape(volumes, 3, 3)
        # The prediction at the center and the eight voxels around it.
        windows = np.lib.stride_tricks.sliding_window_view(inputs, (3, 3), axis=(2, 3))
        predicted = np.einsum("nvyxij,vij->nyx", windows, weights) + offset
        residual = np.abs(np.einsum("nyx,yx->n", targets - predicted, _FILTER))
        spread = float(np.median(residual)) / NORMAL_MEDIAN
        spread /= math.sqrt(1 + _squared_norm(weights))
        std = _rician_std(spread, predicted[:, 1, 1])
        return NeighborNoiseEstimate(std, std * _MEDIAN_ERROR / math.sqrt(voxels), voxels)


def _windows(image: np.ndarray, side: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(image, (side, side))


def _ridge(inputs: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the weights (K,) and the offset that predict ``wanted`` (N,) from inputs (N, K)."""
    means, mean = inputs.mean(0), float(wanted.mean())
    centered = inputs - means
    gram = centered.T @ centered
    ridge = _RIDGE * np.trace(gram) / len(gram) + np.finfo(float).tiny
    weights = np.linalg.solve(gram + ridge * np.eye(len(gram)), centered.T @ (wanted - mean))
    return weights, mean - float(means @ weights)


def _squared_norm(weights: np.ndarray) -> float:
    """Return the sum of squares of weights (V, 3, 3) after the filter."""
    padded = np.pad(weights, ((0, 0), (2, 2), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return float((np.einsum("vyxij,ij->vyx", windows, _FILTER) ** 2).sum())


def _rician_std(spread: float, means: np.ndarray) -> float:
    """Return the parameter of Rician noise whose magnitudes of these means spread that much.

    At a mean m the clean value is about √(m² - std²).
    """
    std = spread
    if std <= 0:
        return 0.0
    for _ in range(_ROUNDS):
        clean = np.sqrt(np.maximum(means**2 - std**2, 0))
        shares = RicianNoise(std=std).sigma(clean) / std
        std = spread / math.sqrt(float(np.mean(shares**2)))
    return std
