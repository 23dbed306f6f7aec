"""One matrix from a look-back to all steps ahead, of all variables: the ridges and DLinear.

DLinear is a linear layer for the trend of a look-back and one for the rest: Zeng et al., "Are
Transformers Effective for Time Series Forecasting?", arXiv:2205.13504. Both see differences from
the last value and have no bias, so that together they are one matrix. It is trained in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.core.philox import philox_generator
from lowtide.models.forecaster.paths import StandardScaler
from lowtide.models.forecaster.ridge import (
    RidgeConfig,
    fit_ridge,
    held_out_means,
    ridge_configs,
    ridge_forecasts,
)
from lowtide.models.forecaster.windows import (
    SeriesHistory,
    few_errors,
    forward_fill,
    target_windows,
)

# Windows that a ridge is fitted to at least; its penalty is chosen on four folds of them.
_FEWEST_WINDOWS = 8
# Windows whose errors stand for those of all.
_ERROR_WINDOWS = 512
_SHORT_LOOK_BACK, _LONGEST_LOOK_BACK = 16, 336

_KERNEL, _BATCH, _STEPS, _RATE = 25, 256, 400, 2e-3
# Share of the windows, the last, whose errors say how large errors are; they are not trained on.
_HELD_BACK = 0.2
_LEAST_WINDOWS = 16
# Adam: how long means of gradients and of their squares remember, and what keeps rates finite.
_FIRST, _SECOND, _FLOOR = 0.9, 0.999, 1e-8
_PURPOSE = 0x646C696E  # "dlin", in the keys of generators


@dataclass(frozen=True)
class DirectMethod:
    """Mean of several matrices.

    Attributes:
        scaler: Standardizes a series in its own units.
        matrices: Matrix [L, H] of each.
        deviation: Standard deviation [D] of held-out errors one step ahead; NaN of a variable that
            has few of them.
        growth: Standard deviation [H, D] of held-out errors by step, in units of the first.
    """

    scaler: StandardScaler
    matrices: tuple[np.ndarray, ...]
    deviation: np.ndarray
    growth: np.ndarray

    def predict(self, values: np.ndarray, origins: np.ndarray) -> np.ndarray:
        """Return forecasts [n, H, D] at ``origins`` [n] of ``values`` [T, D] without NaN."""
        first = max(0, int(origins.min()) - max(len(one) for one in self.matrices))
        past = self.scaler.transform(values[first : int(origins.max())])
        total = ridge_forecasts(past, origins - first, self.matrices[0])
        for matrix in self.matrices[1:]:
            total += ridge_forecasts(past, origins - first, matrix)
        return self.scaler.inverse(total / len(self.matrices))


def fit_plain_ridge(history: SeriesHistory, horizon: int) -> DirectMethod | None:
    """Fit one ridge of a short look-back; None where there are too few steps.

    The look-back is an eighth of the history, 16 steps at least where there are as many, 336 at
    most: of few rows a long one learns their past by heart.
    """
    steps = len(history.values) - horizon
    length = min(max(min(_SHORT_LOOK_BACK, steps // 3), steps // 8), _LONGEST_LOOK_BACK)
    length -= length % history.season if length >= history.season else 0
    return _fit(history, horizon, [RidgeConfig(max(1, length))])


def fit_four_ridges(history: SeriesHistory, horizon: int) -> DirectMethod | None:
    """Fit the four ridges of `RidgeForecaster`; None where there are too few steps."""
    return _fit(history, horizon, ridge_configs(len(history.values), horizon, history.season))


def _fit(history: SeriesHistory, horizon: int, configs: list[RidgeConfig]) -> DirectMethod | None:
    longest, steps = max(one.look_back for one in configs), len(history.values)
    seen = np.isfinite(history.values)
    few = steps - horizon + 1 - longest < _FEWEST_WINDOWS
    if few or not seen[longest:].any():
        return None
    scaler = StandardScaler.fit(np.where(seen.any(axis=0), history.values, 0.0))
    values = forward_fill(scaler.transform(history.values))
    fits = [fit_ridge(values, seen, config, horizon) for config in configs]
    matrices = tuple(one.matrix for one in fits)
    return with_held_out_deviation(
        scaler,
        matrices,
        values,
        seen,
        lambda origins: held_out_means(values, origins, fits),
        longest,
    )


def with_held_out_deviation(
    scaler: StandardScaler,
    matrices: tuple[np.ndarray, ...],
    values: np.ndarray,
    seen: np.ndarray,
    forecast: Callable[[np.ndarray], np.ndarray],
    first: int,
) -> DirectMethod:
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
    errors = target_windows(values, origins, matrices[0].shape[1]) - forecast(origins)
    judged = target_windows(seen, origins, errors.shape[1])
    sizes = np.sqrt(
        np.where(judged, np.square(errors), 0.0).sum(axis=0) / np.maximum(judged.sum(axis=0), 1)
    )
    # Of few windows a later step may look easier than an earlier one, which it is not.
    sizes = np.maximum.accumulate(sizes, axis=0)
    growth = np.maximum(sizes / np.where(sizes[0] > 0, sizes[0], 1.0), 1.0)
    deviation = np.where(few_errors(judged.sum(axis=0))[0], np.nan, sizes[0] * scaler.deviation)
    return DirectMethod(scaler, matrices, deviation, growth)


def fit_dlinear(history: SeriesHistory, horizon: int) -> DirectMethod | None:
    """Train DLinear on windows that are always the same; None where there are too few steps."""
    steps, seen = len(history.values), np.isfinite(history.values)
    length = ridge_configs(steps, horizon, history.season)[0].look_back
    origins = np.arange(length, steps - horizon + 1)
    if len(origins) < _LEAST_WINDOWS or not seen[length:].any():
        return None
    scaler = StandardScaler.fit(np.where(seen.any(axis=0), history.values, 0.0))
    values = forward_fill(scaler.transform(history.values))
    held = max(1, int(len(origins) * _HELD_BACK))
    # Targets of trained windows end where those of the held-back ones begin, where that leaves
    # enough to train on.
    trained = origins[: max(1, len(origins) - held - horizon)]
    matrix = _train(values, seen, trained, length, horizon)
    return with_held_out_deviation(
        scaler,
        (matrix,),
        values,
        seen,
        lambda judged: ridge_forecasts(values, judged, matrix),
        int(origins[-held]),
    )


def _train(
    values: np.ndarray, seen: np.ndarray, origins: np.ndarray, length: int, horizon: int
) -> np.ndarray:
    """Return the matrix [L, H] after a fixed number of steps of Adam, rates falling to zero."""
    draw, average = philox_generator(0, _PURPOSE, length, horizon), _moving_average(length)
    series, mask = (np.ascontiguousarray(array.T, np.float32) for array in (values, seen))
    steps = np.arange(-length, horizon)
    layers = np.full((2, length, horizon), 1 / length, np.float32)
    first, second = np.zeros_like(layers), np.zeros_like(layers)
    for step in range(1, _STEPS + 1):
        variables = draw.integers(len(series), size=_BATCH)[:, None]
        places = draw.choice(origins, _BATCH)[:, None] + steps
        window = series[variables, places]
        window -= window[:, length - 1 : length]
        past, after = window[:, :length], window[:, length:]
        trend = past @ average
        parts = np.stack([trend, past - trend])
        error = (parts @ layers).sum(axis=0) - after
        error *= mask[variables, places[:, length:]] * np.float32(2 / error.size)
        gradient = parts.transpose(0, 2, 1) @ error
        first += (1 - _FIRST) * (gradient - first)
        second += (1 - _SECOND) * (np.square(gradient) - second)
        rate = _RATE * (1 + math.cos(math.pi * (step - 1) / _STEPS)) / 2
        rate *= math.sqrt(1 - _SECOND**step) / (1 - _FIRST**step)
        layers -= np.float32(rate) * first / (np.sqrt(second) + np.float32(_FLOOR))
    return (average @ layers[0] + layers[1] - average @ layers[1]).astype(float)


def _moving_average(length: int) -> np.ndarray:
    """Return the matrix [L, L] of means over 25 steps; beyond an end its value goes on."""
    average, half = np.zeros((length, length), np.float32), _KERNEL // 2
    for step in range(length):
        places = np.clip(np.arange(step - half, step + half + 1), 0, length - 1)
        np.add.at(average[:, step], places, np.float32(1 / _KERNEL))
    return average
