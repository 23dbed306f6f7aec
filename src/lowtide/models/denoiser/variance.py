"""Variance of noise by brightness: a line fitted to it, and transforms that make it equal.

The line of variance over mean tells shot noise from the rest. After the transforms noise is of one
strength everywhere; their inverses are exact and unbiased.

For shot and read noise it is the generalized Anscombe transform, written from its zero so that pure
Gaussian noise is a case like any other. The mean of transformed values is not the transform of
their mean, and the plain inverse would darken shadows (Mäkitalo and Foi, "Optimal inversion of the
generalized Anscombe transformation for Poisson-Gaussian noise", 2013, the closed form).

For magnitudes m with Rician noise of standard deviation 1 in both parts, whose mean is μ(x) and
standard deviation s(x) at a clean value x, f(m) = ∫ dm / s(μ⁻¹(m)): its noise is nearly 1
everywhere, background included. A denoiser of it returns E[f(m)|x], and the inverse maps that to x:
the values are those of the signal, and not lifted by the noise as magnitudes are. The approach is
that of Foi, Noise estimation and removal in MR imaging: the variance-stabilization approach, ISBI
2011.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from lowtide.models.denoiser.noise_models import RicianNoise

_TEXTURE = 0.2  # of the variance
_ROUNDS = 4  # the weights depend on the line

_OFFSET = 3 / 8
_ROOT = math.sqrt(3 / 2)
# Transformed value of no photons and no read noise, below which the closed form is no inverse.
_LEAST = math.sqrt(3 / 2)
_STEP = 0.02
_LARGEST = 16.0  # above, the noise is Gaussian
_SPREAD = 8.0  # of magnitudes about the clean value


@dataclass(frozen=True)
class VarianceLine:
    """Line variance = ``slope``·mean + ``offset``, neither below 0, with standard errors.

    ``bend`` is how far a parabola leaves the line at the largest mean, as a share of the variance
    there; 0 unless that is more than four standard errors.
    """

    slope: float
    offset: float
    slope_error: float
    offset_error: float
    bend: float


def fit_line(
    means: np.ndarray, variances: np.ndarray, counts: np.ndarray, *, through_zero: bool = False
) -> VarianceLine:
    """Fit variances, each of ``counts`` independent values, over means.

    ``through_zero`` fixes the offset at 0. With fewer than two different means the slope is 0.
    """
    columns = [means] if through_zero else [means, np.ones_like(means)]
    if not through_zero and np.ptp(means) == 0:
        columns = columns[1:]
    found, errors = _solve(columns, variances, counts)
    if columns[0] is not means:
        return VarianceLine(0.0, float(found[0]), 0.0, float(errors[0]), 0.0)
    if through_zero:
        found, errors = np.append(found, 0), np.append(errors, 0)
    bend = _bend(columns, variances, counts)
    # A negative part is noise of the estimate: it is 0, and the other one is fitted alone.
    if found[0] < 0:
        found[0] = 0
        if not through_zero:
            found[1:], errors[1:] = _solve(columns[1:], variances, counts)
    elif found[1] < 0:
        found[1] = 0
        found[:1], errors[:1] = _solve(columns[:1], variances, counts)
    slope, offset = map(float, found)
    return VarianceLine(slope, max(offset, 0.0), float(errors[0]), float(errors[1]), bend)


def fit_lower_line(
    means: np.ndarray, variances: np.ndarray, counts: np.ndarray
) -> tuple[VarianceLine, float]:
    """Fit a line as `fit_line`, without variances far above it: texture only adds.

    Also returns the share of values (by ``counts``) that were left out.
    """
    kept = np.ones(len(means), bool)
    while True:
        line = fit_line(means[kept], variances[kept], counts[kept])
        predicted = line.slope * means + line.offset
        loose = np.maximum(4 * np.sqrt(2 / (counts - 1)), _TEXTURE)
        better = kept & (variances <= predicted * (1 + loose))
        if better.sum() in (0, kept.sum()):
            return line, 1 - float(counts[kept].sum() / counts.sum())
        kept = better


def _solve(
    columns: list[np.ndarray], variances: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and standard errors of weighted least squares.

    A variance of n values has a standard deviation of itself times √(2 / (n - 1)). Where the
    residuals are larger than that, so are the errors.
    """
    matrix = np.stack(columns, 1).astype(np.float64)
    # Columns of equal size, or the parabola's would be lost to rounding.
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1
    matrix /= scale
    predicted = np.full(len(variances), max(float(np.average(variances, weights=counts)), 1e-30))
    least = predicted[0] * 1e-3
    found = weights = spread = np.empty(0)
    for _ in range(_ROUNDS):
        weights = (counts - 1) / (2 * predicted**2)
        spread = np.linalg.pinv(matrix.T @ (matrix * weights[:, None]))
        found = spread @ (matrix.T @ (weights * variances))
        predicted = np.maximum(matrix @ found, least)
    left = len(variances) - matrix.shape[1]
    misfit = float(weights @ (variances - matrix @ found) ** 2) / left if left > 0 else 1.0
    errors = np.sqrt(np.diag(spread) * max(misfit, 1.0))
    return found / scale, errors / scale


def _bend(columns: list[np.ndarray], variances: np.ndarray, counts: np.ndarray) -> float:
    means = columns[0]
    if np.unique(means).size < len(columns) + 2:
        return 0.0
    found, errors = _solve([*columns, means**2], variances, counts)
    if abs(found[-1]) <= 4 * errors[-1]:
        return 0.0
    largest = float(means.max())
    line = sum(c * v for c, v in zip(found, [largest, 1.0][: len(columns)], strict=False))
    return float(found[-1] * largest**2 / max(abs(line), 1e-30))


@dataclass(frozen=True)
class VarianceStabilizer:
    """Transform for noise of variance ``a``·x + ``b``² at a value of x.

    0 becomes 0 and ``top`` becomes 1, whose noise has the standard deviation `sigma` everywhere
    where x is not much below 0.
    """

    a: float
    b: float
    top: float = 1.0

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.b >= 0 and self.a + self.b > 0 and self.top > 0):
            raise ValueError(f"no noise to stabilize: {self}")

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise of transformed values."""
        return 1 / float(self._stabilized(np.array(self.top)))

    def value_at_sigma(self, sigma: float) -> float:
        """Return the ``top`` with which transformed noise would have this standard deviation."""
        stable = 1 / sigma
        return stable * (math.sqrt(self._floor) + self.a / 4 * stable)

    @property
    def _floor(self) -> float:
        """Variance at 0, with what the transform of Poisson counts adds to it."""
        return _OFFSET * self.a**2 + self.b**2

    def _stabilized(self, values: np.ndarray) -> np.ndarray:
        root = np.sqrt(np.maximum(self.a * values + self._floor, 0))
        least = -self._floor / self.a if self.a else -np.inf
        return 2 * np.maximum(values, least) / (root + math.sqrt(self._floor))

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Return transformed values, float32, of linear ones of any shape."""
        return (self._stabilized(values) * self.sigma).astype(np.float32)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Return the linear values, float32, whose noisy ones have these transformed means."""
        stable, floor = values / np.float32(self.sigma), math.sqrt(self._floor)
        found = stable * (floor + self.a / 4 * stable)
        if self.a:
            # The transform in units of photons: what the plain inverse lacks depends on it alone.
            photons = 1 / np.maximum(2 * floor / self.a + stable, _LEAST)
            lacking = _ROOT / 4 - photons * (11 / 8 - photons * (5 / 8 * _ROOT))
            found = found + self.a * (1 / 4 + photons * lacking)
        return found.astype(np.float32)


class RicianStabilizer:
    """Transform of magnitudes with Rician noise of ``std`` to noise of 1, and back."""

    def __init__(self, std: float) -> None:
        self.std = std
        self._magnitudes, self._transformed, self._clean, self._expected = _tables()

    def forward(self, magnitudes: np.ndarray) -> np.ndarray:
        """Transform magnitudes, of any shape; those below 0 keep their sign."""
        scaled = np.abs(magnitudes.astype(np.float64)) / self.std
        found = _interpolate(scaled, self._magnitudes, self._transformed)
        return np.copysign(found, magnitudes)

    def inverse(self, expected: np.ndarray) -> np.ndarray:
        """Return the clean values, at least 0, of denoised transformed ones."""
        return self.std * _interpolate(expected, self._expected, self._clean)


def _interpolate(values: np.ndarray, places: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Interpolate in a table that goes on with a slope of 1 above, and ends below."""
    return np.interp(values, places, table) + np.maximum(values - places[-1], 0)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return magnitudes and their transform, clean values and its expectation."""
    noise = RicianNoise(std=1)
    clean = np.arange(0, _LARGEST + _SPREAD, _STEP)
    magnitudes = clean
    # Below the mean of pure noise the slope is that of pure noise.
    slopes = 1 / np.interp(magnitudes, noise.mean(clean), noise.sigma(clean))
    steps = (slopes[1:] + slopes[:-1]) / 2 * _STEP
    transformed = np.concatenate([[0.0], np.cumsum(steps)])
    clean = clean[clean <= _LARGEST]
    expected = np.array([_expectation(one, magnitudes, transformed) for one in clean])
    return magnitudes, transformed, clean, expected


def _expectation(clean: float, magnitudes: np.ndarray, transformed: np.ndarray) -> float:
    """Return the mean of the transform at a clean value, over the Rice distribution."""
    import torch

    bessel = torch.special.i0e(torch.from_numpy(magnitudes * clean)).numpy()
    density = magnitudes * np.exp(-((magnitudes - clean) ** 2) / 2) * bessel
    return float(density @ transformed / density.sum())
