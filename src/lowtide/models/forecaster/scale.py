"""Conditional scale of forecast errors: log-linear in recent volatility, by step and phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.windows import few_errors, past_means

# Weight of a step's variance over all phases, in windows, where a phase has few of its own.
_PRIOR_WINDOWS = 20.0
# Ridge on the log-linear coefficients, in windows: with few windows the scale stays the table's.
_SLOPE_PENALTY = 10.0
_FLOOR = 1e-3


@dataclass(frozen=True)
class ConditionalScale:
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
    ) -> ConditionalScale:
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
