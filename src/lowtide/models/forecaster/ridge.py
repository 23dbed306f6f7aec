"""Direct multi-step ridge regression on look-back windows, solved in closed form.

The regression has one matrix for all variables (channel independence) and works on differences from
the last known value, as NLinear does (Zeng et al., "Are Transformers Effective for Time Series
Forecasting?", arXiv:2205.13504). Its penalty is chosen on blocked folds of the series itself.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.windows import (
    forecast_differences,
    interpolate,
    look_backs,
    numbered_chunks,
    target_windows,
)

# Candidate penalties per window, in units of a standardized variable's variance.
_PENALTIES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0, 100.0)
_VARIANCE_FLOOR = 1e-3
# Rows that are multiplied at once where only sums are wanted.
_MOMENT_ROWS = 4096
# Windows of each fold that a penalty is judged by, fewer of more than 256 variables.
_JUDGED_WINDOWS, _JUDGED_ROWS = 256, 1 << 16

FOLDS = 4
# Steps that the four ridges see, where a series is long.
LOOK_BACKS = (336, 512)


@dataclass(frozen=True)
class RidgeConfig:
    """Settings of one ridge: look-back in steps, and whether calm windows weigh more.

    A weighted ridge divides each window's squared error by the variance of its look-back.
    """

    look_back: int
    weighted: bool = False


def ridge_configs(steps: int, horizon: int, season: int) -> list[RidgeConfig]:
    """Return the settings of the ridges of a series of ``steps``, shortest look-back first.

    Look-backs are whole seasons where they are longer than one.
    """
    lengths = []
    for longest, share in zip(LOOK_BACKS, (3, 2), strict=True):
        length = max(1, min(longest, (steps - horizon) // share))
        lengths.append(length - length % season if longest > length >= season else length)
    return [RidgeConfig(length, weighted) for length in lengths for weighted in (False, True)]


@dataclass(frozen=True)
class RidgeMoments:
    """Sums over windows that a ridge is solved from; they add up and subtract.

    ``gram`` [L, L] and ``cross`` [L, H] are weighted sums of products of look-backs with themselves
    and with targets, ``weight`` is the sum of the windows' weights.
    """

    gram: np.ndarray
    cross: np.ndarray
    weight: float

    def __add__(self, other: RidgeMoments) -> RidgeMoments:
        return RidgeMoments(
            self.gram + other.gram, self.cross + other.cross, self.weight + other.weight
        )

    def __sub__(self, other: RidgeMoments) -> RidgeMoments:
        return RidgeMoments(
            self.gram - other.gram, self.cross - other.cross, self.weight - other.weight
        )

    def solve(self, penalty: float) -> np.ndarray:
        """Return the matrix [L, H] of least penalized squared error."""
        ridge = penalty * max(self.weight, 1.0) * np.eye(len(self.gram))
        return np.linalg.solve(self.gram + ridge, self.cross)


def ridge_moments(
    values: np.ndarray,
    known: np.ndarray,
    aims: np.ndarray,
    origins: np.ndarray,
    config: RidgeConfig,
    horizon: int,
) -> RidgeMoments:
    """Return the moments of the windows at ``origins``.

    Args:
        values: Standardized series [T, D] without NaN.
        known: Mask [T, D] of values that were measured; the weight of a window is the share of its
            targets that were, squared.
        aims: Values [T, D] for targets; those that were not measured are interpolated.
        origins: Forecast origins [n].
        config: Settings of the ridge.
        horizon: Steps of a target, H.
    """
    length = config.look_back
    gram, cross, weight = np.zeros((length, length)), np.zeros((length, horizon)), 0.0
    for _, chunk in numbered_chunks(origins, values.shape[1], _MOMENT_ROWS):
        past = look_backs(values, chunk, length).reshape(-1, length)
        after = look_backs(aims, chunk + horizon, horizon).reshape(-1, horizon)
        weights = np.square(target_windows(known, chunk, horizon).mean(axis=1).T.reshape(-1))
        if config.weighted:
            weights /= past.var(axis=1) + _VARIANCE_FLOOR
        last = past[:, -1:]
        past = past - last
        weighted = past * weights[:, None]
        gram += weighted.T @ past
        cross += weighted.T @ (after - last)
        weight += float(weights.sum())
    return RidgeMoments(gram, cross, weight)


def ridge_forecasts(values: np.ndarray, origins: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return the forecasts [n, H, D] of ``matrix`` [L, H] at ``origins`` [n] of ``values`` [T, D].

    A forecast is bit-identical whatever others are computed with it.
    """
    length, horizon = matrix.shape
    return forecast_differences(values, origins, length, horizon, lambda past: past @ matrix)


def choose_penalty(
    values: np.ndarray,
    known: np.ndarray,
    folds: list[tuple[np.ndarray, RidgeMoments]],
) -> float:
    """Return the penalty of least squared error on held-out folds.

    Args:
        values: Standardized series [T, D] without NaN.
        known: Mask [T, D] of values that were measured.
        folds: The origins of each fold and the moments of all windows outside it.
    """
    horizon = folds[0][1].cross.shape[1]
    most = max(1, min(_JUDGED_WINDOWS, _JUDGED_ROWS // values.shape[1]))
    errors = np.zeros(len(_PENALTIES))
    for origins, outside in folds:
        judged = origins[:: -(-len(origins) // most)]
        after, seen = (target_windows(array, judged, horizon) for array in (values, known))
        for number, penalty in enumerate(_PENALTIES):
            error = ridge_forecasts(values, judged, outside.solve(penalty)) - after
            errors[number] += float(np.square(error, where=seen, out=np.zeros_like(error)).sum())
    return _PENALTIES[int(errors.argmin())]


@dataclass(frozen=True)
class RidgeFold:
    """A stretch of origins, from ``first`` to before ``last``, and a ridge that saw none of it.

    ``matrix`` [L, H] is solved from the windows whose targets are outside the targets of the fold.
    """

    first: int
    last: int
    matrix: np.ndarray


@dataclass(frozen=True)
class RidgeFit:
    """A ridge fitted to a whole series, and its folds."""

    config: RidgeConfig
    penalty: float
    matrix: np.ndarray
    folds: tuple[RidgeFold, ...]


def fit_ridge(values: np.ndarray, known: np.ndarray, config: RidgeConfig, horizon: int) -> RidgeFit:
    """Fit a ridge and its folds.

    Args:
        values: Standardized series [T, D] without NaN.
        known: Mask [T, D] of values that were measured.
        config: Settings of the ridge.
        horizon: Steps ahead, H.
    """
    origins = np.arange(config.look_back, len(values) - horizon + 1)
    stretches = np.array_split(origins, FOLDS)
    aims = interpolate(values, known)
    inside = [ridge_moments(values, known, aims, stretch, config, horizon) for stretch in stretches]
    everything = functools.reduce(operator.add, inside)
    outside = []
    for stretch, own in zip(stretches, inside, strict=True):
        before = (origins > stretch[0] - horizon) & (origins < stretch[0])
        after = (origins > stretch[-1]) & (origins < stretch[-1] + horizon)
        near = ridge_moments(values, known, aims, origins[before | after], config, horizon)
        outside.append(everything - own - near)
    penalty = choose_penalty(values, known, list(zip(stretches, outside, strict=True)))
    folds = tuple(
        RidgeFold(int(stretch[0]), int(stretch[-1]) + 1, rest.solve(penalty))
        for stretch, rest in zip(stretches, outside, strict=True)
    )
    return RidgeFit(config, penalty, everything.solve(penalty), folds)


def held_out_means(
    values: np.ndarray, origins: np.ndarray, fits: list[RidgeFit], steps: int | None = None
) -> np.ndarray:
    """Return the mean [n, H, D] of the held-out forecasts of several ridges.

    ``steps`` is how many steps ahead are computed, by default all. Origins after the last fold get
    the forecast of the last.
    """
    ahead = fits[0].matrix[:, :steps].shape[1]
    total = np.zeros((len(origins), ahead, values.shape[1]))
    for fit in fits:
        for fold in fit.folds:
            below = np.inf if fold is fit.folds[-1] else fold.last
            inside = (origins >= fold.first) & (origins < below)
            matrix = np.ascontiguousarray(fold.matrix[:, :steps])
            total[inside] += ridge_forecasts(values, origins[inside], matrix)
    total /= len(fits)
    return total
