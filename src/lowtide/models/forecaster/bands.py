"""Bands of a forecast: how large its errors will be at each step, from those that it made.

Errors of rolling origins overlap: n origins in a row are about n / H independent windows of H
steps. Where those are many, bands are of the errors that occurred. Where they are few, they are of
a Student distribution, whose deviation is drawn between the one the method claims and the one its
few held-out errors had, and whose steps move together as errors do that each step adds to.

`ErrorStdEstimator` is the size of the ridges' errors, log-linear in recent volatility, by step and
phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lowtide.core.philox import philox_generator
from lowtide.models.forecaster.paths import drawn_chunks
from lowtide.models.forecaster.windows import few_errors, past_means

# Independent windows from which on the errors that occurred are taken as they are.
ENOUGH_WINDOWS = 20
# What the deviation that a method claims counts for, in independent windows.
_CLAIM_WINDOWS = 4.0
_QUANTILE = 1.959964  # of a Gaussian, at .975
_MADE_PATHS, _FEWEST_PATHS, _MOST_NUMBERS = 512, 64, 1 << 25
_PURPOSE = 0x62616E64  # "band", in the keys of generators
_GAUSSIAN = 0x676175  # "gau"

# Weight of a step's variance over all phases, in windows, where a phase has few of its own.
_PRIOR_WINDOWS = 20.0
# Ridge on the log-linear coefficients, in windows: with few windows the scale stays the table's.
_SLOPE_PENALTY = 10.0
_FLOOR = 1e-3


class GaussianPathSampler:
    """Standard normal errors, each step and variable on its own."""

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``."""
        for part, draw in drawn_chunks(paths, seed, _GAUSSIAN, origin):
            part[:] = draw.standard_normal(part.shape, np.float32)


def error_scale(errors: np.ndarray, deviation: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """Return the scale [H, D] of errors.

    Args:
        errors: Held-out errors [n, H, D] at origins in a row, NaN without a target; n may be 0.
        deviation: Standard deviation [D] of errors one step ahead that the method claims.
        growth: Standard deviation [H, D] by step that it claims, in units of the first.
    """
    seen = np.isfinite(errors)
    count = seen.sum(axis=0)
    squares = np.where(seen, np.square(errors), 0.0).sum(axis=0) / np.maximum(count, 1)
    # A method that claims to make no errors, as of a constant that has changed, is not believed.
    claimed = np.where(deviation > 0, deviation, np.sqrt(squares.mean(axis=0))) * growth
    if len(errors) >= ENOUGH_WINDOWS * len(growth):
        scale = np.where(count < ENOUGH_WINDOWS, claimed, np.sqrt(squares))
    else:
        independent = count / np.arange(1, len(growth) + 1)[:, None]
        shares = squares / np.square(np.where(claimed > 0, claimed, 1.0))
        total = (independent * shares).sum(axis=0) + _CLAIM_WINDOWS
        scale = claimed * np.sqrt(total / (independent.sum(axis=0) + _CLAIM_WINDOWS))
    return np.where(np.isnan(scale), np.nan, np.maximum(scale, np.finfo(float).tiny))


def share_held(errors: np.ndarray, deviation: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """Return the share [D] of later errors that 95 % bands of the earlier ones hold.

    NaN where the earlier half of ``errors`` is less than two windows. Arguments as `error_scale`.
    """
    half = len(errors) // 2
    windows = half / max(1, len(growth))
    if windows < 2:
        return np.full(len(deviation), np.nan)
    scale = error_scale(errors[:half], deviation, growth) * student_widening(windows)
    seen = np.isfinite(errors[half:])
    inside = np.where(seen, np.abs(errors[half:]) <= _QUANTILE * scale, False)
    count = seen.sum(axis=(0, 1))
    return np.where(count > 0, inside.sum(axis=(0, 1)) / np.maximum(count, 1), np.nan)


def crps(errors: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the mean CRPS [D] of Gaussian bands of ``scale`` [..., H, D].

    Windows count alike, whatever targets they have; NaN for a variable without any error. The
    formula is Gneiting and Raftery's, "Strictly Proper Scoring Rules", 2007.
    """
    from scipy.special import ndtr

    ratio = errors / scale
    density = np.exp(-np.square(ratio) / 2) / math.sqrt(2 * math.pi)
    found = scale * (ratio * (2 * ndtr(ratio) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    seen = np.isfinite(found)
    count = seen.sum(axis=1)
    windows = np.where(seen, found, 0.0).sum(axis=1) / np.maximum(count, 1)
    judged = (count > 0).sum(axis=0)
    return np.where(judged > 0, windows.sum(axis=0) / np.maximum(judged, 1), np.nan)


def standardized_errors(residuals: np.ndarray, windows: float) -> np.ndarray:
    """Return errors [n, H, D] in units of their scale, around 0 and without NaN, as float32.

    They are widened as those of a Student distribution of as many independent ``windows`` are.
    """
    centered = residuals - residuals.mean(axis=0)
    return (centered * student_widening(windows)).astype(np.float32)


def student_widening(windows: float) -> float:
    """Return by how much a 95 % band of Student's distribution is wider than a Gaussian one."""
    from scipy.special import stdtrit

    return float(stdtrit(max(windows, 2.0), 0.975)) / _QUANTILE


def student_paths(first: np.ndarray, growth: np.ndarray, windows: float) -> np.ndarray:
    """Return paths [N, H, D] of errors in units of their scale, each step's a Student distribution.

    Args:
        first: Held-out errors [n, D] one step ahead, whose correlation the variables have; NaN
            without a target.
        growth: Standard deviation [H, D] of errors by step, in units of the first.
        windows: Independent windows of errors that the scale is from.
    """
    from scipy.special import stdtrit

    horizon, variables = growth.shape
    count = max(_FEWEST_PATHS, min(_MADE_PATHS, _MOST_NUMBERS // growth.size))
    draw = philox_generator(0, _PURPOSE, horizon, variables)
    known = np.where(np.isfinite(first), first, 0.0)
    size = np.sqrt(np.square(known).sum(axis=0))
    directions = known / np.where(size > 0, size, 1.0)
    # Of few origins a correlation is mostly chance.
    together = len(first) / (len(first) + 20) if variables > 1 else 0.0
    own = draw.standard_normal((count, horizon, variables), np.float32)
    own *= np.sqrt(1 - together * (size > 0)).astype(np.float32)
    if together:
        common = draw.standard_normal((count, horizon, len(first)), np.float32)
        own += common @ (math.sqrt(together) * directions).astype(np.float32)
    later = np.sqrt(np.maximum(np.diff(np.square(growth), axis=0), 0.0)).astype(np.float32)
    scores = own.copy()
    for lag, reply in enumerate(later, start=1):
        scores[:, lag:] += reply * own[:, :-lag]
    ranks = scores.argsort(axis=0).argsort(axis=0)
    levels = (np.arange(count) + 0.5) / count
    return stdtrit(2.5 + windows, levels).astype(np.float32)[ranks]


@dataclass(frozen=True)
class ErrorStdEstimator:
    """Standard deviation of the error of a forecast, known at its origin.

    Attributes:
        table: Standard deviations [H, P, D] by step, phase of the target in its season, variable.
        center: Means [F, D] of the features.
        low: Least features [F, D] seen; others are clipped, so that nothing is extrapolated.
        high: Greatest features [F, D] seen.
        slopes: Intercepts and slopes [F + 1, H, D] of the logarithm of the scale.
    """

    table: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray
    slopes: np.ndarray

    @classmethod
    def fit(
        cls, errors: np.ndarray, phases: np.ndarray, features: np.ndarray, phase_count: int
    ) -> ErrorStdEstimator:
        """Fit to held-out errors.

        Args:
            errors: Errors [n, H, D], NaN where the target is missing; a variable that has few at a
                step gets the mean of the others.
            phases: Phase [n, H] of each target in its season, 0 to ``phase_count`` - 1.
            features: Features [n, F, D], see `volatility_features`.
            phase_count: Phases of a season, P.
        """
        table = _standard_deviations(errors, phases, phase_count)
        center, low, high = features.mean(0), features.min(0), features.max(0)
        base = _at_phases(table, phases)
        design = np.concatenate(
            [np.ones((len(errors), 1, errors.shape[2])), features - center], axis=1
        )
        logs = np.log(np.abs(errors) / base + 1e-2)
        seen = np.isfinite(logs)
        logs = np.where(seen, logs, _means(logs, seen))
        ridge = _SLOPE_PENALTY * np.eye(design.shape[1])
        ridge[0, 0] = 1e-9
        gram = np.einsum("nfd,ngd->dfg", design, design) + ridge
        cross = np.einsum("nfd,nhd->dfh", design, logs)
        slopes = np.linalg.solve(gram, cross).transpose(1, 2, 0)
        unscaled = cls(table, center, low, high, slopes)
        ratio = errors / unscaled(phases, features)
        # A regression of logarithms is off by a constant: the ratios get a mean square of one.
        squares = np.where(seen.any(axis=0), _means(np.square(ratio), seen), 1.0)
        slopes[0] += 0.5 * np.log(squares + 1e-12)
        return cls(table, center, low, high, slopes)

    def __call__(self, phases: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Return scales [n, H, D] for targets at ``phases`` [n, H] with ``features`` [n, F, D]."""
        centered = np.clip(features, self.low, self.high) - self.center
        logs = np.repeat(self.slopes[:1], len(features), axis=0)
        for number, slopes in enumerate(self.slopes[1:]):
            logs += centered[:, number, None] * slopes
        return _at_phases(self.table, phases) * np.exp(logs)


def volatility_features(
    values: np.ndarray, verified: np.ndarray, origins: np.ndarray, length: int
) -> np.ndarray:
    """Return logarithms [n, 3, D] of three measures of volatility in the ``length`` last steps.

    They are the mean absolute difference of neighboring steps, the standard deviation, and the mean
    absolute error of the forecasts that could be verified by then.

    Args:
        values: Standardized series [T, D] without NaN.
        verified: Errors [T, D] known at each step, see `RidgeForecaster`.
        origins: Forecast origins [n], each at least ``length``.
        length: Steps that are looked back at.
    """
    differences = np.abs(np.diff(values, axis=0, prepend=values[:1]))
    means = past_means(values, origins, length)
    squares = past_means(np.square(values), origins, length)
    deviation = np.sqrt(np.maximum(squares - np.square(means), 0.0))
    recent = past_means(differences, origins, length), deviation
    return np.log(np.stack([*recent, past_means(verified, origins, length)], axis=1) + _FLOOR)


def _standard_deviations(errors: np.ndarray, phases: np.ndarray, phase_count: int) -> np.ndarray:
    """Return standard deviations [H, P, D], drawn to those of a step where a phase has few."""
    seen = np.isfinite(errors)
    squares = np.where(seen, np.square(errors), 0.0)
    overall = _means(squares, seen)
    judged = ~few_errors(seen.sum(0))
    others = np.where(judged, overall, 0.0).sum(1) / np.maximum(judged.sum(1), 1)
    overall = np.where(judged, overall, others[:, None])
    table = np.empty((errors.shape[1], phase_count, errors.shape[2]))
    for step, prior in enumerate(_PRIOR_WINDOWS * overall):
        chosen = (phases[:, step] == np.arange(phase_count)[:, None]).astype(float)
        total, count = chosen @ squares[:, step], chosen @ seen[:, step].astype(float)
        table[step] = (total + prior) / (count + _PRIOR_WINDOWS)
    return np.sqrt(table) + 1e-12


def _means(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return means [H, D] of ``values`` [n, H, D] where they are ``seen``; 0 without any."""
    return np.where(seen, values, 0.0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)


def _at_phases(table: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """Return the entries [n, H, D] of ``table`` [H, P, D] for ``phases`` [n, H]."""
    return table[np.arange(phases.shape[1]), phases]
