"""Ridges fitted on blocked folds, whose forecasts of their own fold are held out."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import numpy as np

from lowtide.models.forecaster.ridge import RidgeConfig, choose_penalty, moments, predict
from lowtide.models.forecaster.windows import interpolate

_FOLDS = 4


@dataclass(frozen=True)
class Fold:
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
    folds: tuple[Fold, ...]


def fit_ridge(values: np.ndarray, known: np.ndarray, config: RidgeConfig, horizon: int) -> RidgeFit:
    """Fit a ridge and its folds.

    Args:
        values: Standardized series [T, D] without NaN.
        known: Mask [T, D] of values that were measured.
        config: Settings of the ridge.
        horizon: Steps ahead, H.
    """
    origins = np.arange(config.look_back, len(values) - horizon + 1)
    stretches = np.array_split(origins, _FOLDS)
    aims = interpolate(values, known)
    inside = [moments(values, known, aims, stretch, config, horizon) for stretch in stretches]
    everything = functools.reduce(operator.add, inside)
    outside = []
    for stretch, own in zip(stretches, inside, strict=True):
        before = (origins > stretch[0] - horizon) & (origins < stretch[0])
        after = (origins > stretch[-1]) & (origins < stretch[-1] + horizon)
        near = moments(values, known, aims, origins[before | after], config, horizon)
        outside.append(everything - own - near)
    penalty = choose_penalty(values, known, list(zip(stretches, outside, strict=True)))
    folds = tuple(
        Fold(int(stretch[0]), int(stretch[-1]) + 1, rest.solve(penalty))
        for stretch, rest in zip(stretches, outside, strict=True)
    )
    return RidgeFit(config, penalty, everything.solve(penalty), folds)


def held_out(
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
            total[inside] += predict(values, origins[inside], matrix)
    total /= len(fits)
    return total
