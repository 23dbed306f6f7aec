"""Weighted fit of a line of variance over mean, which tells shot noise from the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TEXTURE = 0.2  # of the variance
_ROUNDS = 4  # the weights depend on the line


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
