"""DLinear, trained in seconds: one linear layer for the trend of a look-back, one for the rest.

Zeng et al., "Are Transformers Effective for Time Series Forecasting?", arXiv:2205.13504. Both
layers see differences from the last value and have no bias, so that together they are one matrix.
"""

from __future__ import annotations

import math

import numpy as np

from lowtide.core.philox import philox
from lowtide.models.forecaster.direct import Direct, measured
from lowtide.models.forecaster.history import History
from lowtide.models.forecaster.paths import Scaler
from lowtide.models.forecaster.ridge import predict, ridge_configs
from lowtide.models.forecaster.windows import forward_fill

_KERNEL, _BATCH, _STEPS, _RATE = 25, 256, 400, 2e-3
# Share of the windows, the last, whose errors say how large errors are; they are not trained on.
_HELD_BACK = 0.2
_FEWEST_WINDOWS = 16
# Adam: how long means of gradients and of their squares remember, and what keeps rates finite.
_FIRST, _SECOND, _FLOOR = 0.9, 0.999, 1e-8
_PURPOSE = 0x646C696E  # "dlin", in the keys of generators


def fit_dlinear(history: History, horizon: int) -> Direct | None:
    """Train DLinear on windows that are always the same; None where there are too few steps."""
    steps, seen = len(history.values), np.isfinite(history.values)
    length = ridge_configs(steps, horizon, history.season)[0].look_back
    origins = np.arange(length, steps - horizon + 1)
    if len(origins) < _FEWEST_WINDOWS or not seen[length:].any():
        return None
    scaler = Scaler.fit(np.where(seen.any(axis=0), history.values, 0.0))
    values = forward_fill(scaler.transform(history.values))
    held = max(1, int(len(origins) * _HELD_BACK))
    # Targets of trained windows end where those of the held-back ones begin, where that leaves
    # enough to train on.
    trained = origins[: max(1, len(origins) - held - horizon)]
    matrix = _train(values, seen, trained, length, horizon)
    return measured(
        scaler,
        (matrix,),
        values,
        seen,
        lambda judged: predict(values, judged, matrix),
        int(origins[-held]),
    )


def _train(
    values: np.ndarray, seen: np.ndarray, origins: np.ndarray, length: int, horizon: int
) -> np.ndarray:
    """Return the matrix [L, H] after a fixed number of steps of Adam, rates falling to zero."""
    draw, average = philox(0, _PURPOSE, length, horizon), _moving_average(length)
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
