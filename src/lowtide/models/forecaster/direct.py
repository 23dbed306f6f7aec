"""One matrix from a look-back to all steps ahead, of all variables: the ridges and DLinear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.history import History
from lowtide.models.forecaster.paths import Scaler
from lowtide.models.forecaster.ridge import RidgeConfig, fit_ridge, held_out, predict, ridge_configs
from lowtide.models.forecaster.windows import few_errors, forward_fill, targets

# Windows that a ridge is fitted to at least; its penalty is chosen on four folds of them.
_FEWEST_WINDOWS = 8
# Windows whose errors stand for those of all.
_ERROR_WINDOWS = 512
_SHORT_LOOK_BACK, _LONGEST_LOOK_BACK = 16, 336


@dataclass(frozen=True)
class Direct:
    """Mean of several matrices.

    Attributes:
        scaler: Standardizes a series in its own units.
        matrices: Matrix [L, H] of each.
        deviation: Standard deviation [D] of held-out errors one step ahead; NaN of a variable that
            has few of them.
        growth: Standard deviation [H, D] of held-out errors by step, in units of the first.
    """

    scaler: Scaler
    matrices: tuple[np.ndarray, ...]
    deviation: np.ndarray
    growth: np.ndarray

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        first = max(0, int(origins.min()) - max(len(one) for one in self.matrices))
        past = self.scaler.transform(values[first : int(origins.max())])
        total = predict(past, origins - first, self.matrices[0])
        for matrix in self.matrices[1:]:
            total += predict(past, origins - first, matrix)
        return self.scaler.inverse(total / len(self.matrices))


def fit_plain_ridge(history: History, horizon: int) -> Direct | None:
    """Fit one ridge of a short look-back; None where there are too few steps.

    The look-back is an eighth of the history, 16 steps at least where there are as many, 336 at
    most: of few rows a long one learns their past by heart.
    """
    steps = len(history.values) - horizon
    length = min(max(min(_SHORT_LOOK_BACK, steps // 3), steps // 8), _LONGEST_LOOK_BACK)
    length -= length % history.season if length >= history.season else 0
    return _fit(history, horizon, [RidgeConfig(max(1, length))])


def fit_four_ridges(history: History, horizon: int) -> Direct | None:
    """Fit the four ridges of `RidgeForecaster`; None where there are too few steps."""
    return _fit(history, horizon, ridge_configs(len(history.values), horizon, history.season))


def _fit(history: History, horizon: int, configs: list[RidgeConfig]) -> Direct | None:
    longest, steps = max(one.look_back for one in configs), len(history.values)
    seen = np.isfinite(history.values)
    few = steps - horizon + 1 - longest < _FEWEST_WINDOWS
    if few or not seen[longest:].any():
        return None
    scaler = Scaler.fit(np.where(seen.any(axis=0), history.values, 0.0))
    values = forward_fill(scaler.transform(history.values))
    fits = [fit_ridge(values, seen, config, horizon) for config in configs]
    matrices = tuple(one.matrix for one in fits)
    return measured(
        scaler, matrices, values, seen, lambda origins: held_out(values, origins, fits), longest
    )


def measured(
    scaler: Scaler,
    matrices: tuple[np.ndarray, ...],
    values: np.ndarray,
    seen: np.ndarray,
    forecast: Callable[[np.ndarray], np.ndarray],
    first: int,
) -> Direct:
    """Return matrices with the deviation of held-out forecasts from step ``first`` on.

    Args:
        scaler: Standardizes a series in its own units.
        matrices: Matrix [L, H] of each.
        values: Standardized series [T, D] without NaN.
        seen: Mask [T, D] of values that were measured.
        forecast: Returns held-out forecasts [n, H, D] at origins [n].
        first: The first origin that has one.
    """
    origins = np.arange(first, len(values) - matrices[0].shape[1] + 1)
    origins = origins[:: -(-len(origins) // _ERROR_WINDOWS)]
    errors = targets(values, origins, matrices[0].shape[1]) - forecast(origins)
    judged = targets(seen, origins, errors.shape[1])
    sizes = np.sqrt(
        np.where(judged, np.square(errors), 0.0).sum(axis=0) / np.maximum(judged.sum(axis=0), 1)
    )
    # Of few windows a later step may look easier than an earlier one, which it is not.
    sizes = np.maximum.accumulate(sizes, axis=0)
    growth = np.maximum(sizes / np.where(sizes[0] > 0, sizes[0], 1.0), 1.0)
    deviation = np.where(few_errors(judged.sum(axis=0))[0], np.nan, sizes[0] * scaler.deviation)
    return Direct(scaler, matrices, deviation, growth)
