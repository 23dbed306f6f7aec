"""Baselines of forecasting: naive, seasonal naive, one ridge with Gaussian errors, smoothing.

Exponential smoothing is by statsforecast, where that is installed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lowtide.models.forecaster.paths import (
    BootstrapPaths,
    Distribution,
    PathSampler,
    Scaler,
    drawn_chunks,
    fill_residuals,
)
from lowtide.models.forecaster.ridge import RidgeConfig, fit_ridge, held_out, predict
from lowtide.models.forecaster.windows import forward_fill, targets

# Windows whose errors stand for those of all.
_ERROR_WINDOWS = 512
_PURPOSE = 0x676175  # "gau", in the keys of generators

# Steps that a model is fitted to, the last: more take long.
_FITTED_STEPS = 1000
# AutoETS knows no longer seasons; each variable is fitted on its own, in seconds.
_LONGEST_SEASON, _MOST_VARIABLES = 24, 32
_FEWEST_SEASONS, _FEWEST_STEPS = 3, 30
# Half the width of the 90 % band, in standard deviations.
_BAND, _HALF_WIDTH = 90, 1.6448536269514722


class Baseline(Protocol):
    """A forecaster that others are compared with; ``sampler`` draws its standardized errors."""

    @property
    def sampler(self) -> PathSampler: ...

    def predict(self, values: np.ndarray, origins: np.ndarray) -> Distribution:
        """Return the distributions of what follows ``origins`` [n], ascending.

        ``values`` [T, D] are in the series' own units, without NaN.
        """
        ...


class GaussianPaths:
    """Standard normal errors, each step and variable on its own."""

    def sample(self, origin: int, paths: np.ndarray, *, seed: int) -> None:
        """Fill ``paths`` [S, H, D] for the window at ``origin``."""
        for part, draw in drawn_chunks(paths, seed, _PURPOSE, origin):
            part[:] = draw.standard_normal(part.shape, np.float32)


@dataclass(frozen=True)
class NaiveForecaster:
    """What was a season ago, or the last value for a season of 1, with errors that occurred.

    Attributes:
        season: Steps of a season.
        horizon: Steps ahead, H.
        deviation: Standard deviation [D] of each variable, the unit of the errors.
        sampler: Draws errors of whole windows.
    """

    season: int
    horizon: int
    deviation: np.ndarray
    sampler: PathSampler

    @classmethod
    def fit(cls, values: np.ndarray, *, season: int, horizon: int) -> NaiveForecaster:
        """Take the errors of windows of a series ``values`` [T, D], NaN where one is missing."""
        deviation, filled = Scaler.fit(values).deviation, forward_fill(values)
        origins = np.arange(season, len(values) - horizon + 1)
        origins = origins[:: -(-len(origins) // _ERROR_WINDOWS)]
        errors = targets(values, origins, horizon) - _ago(filled, origins, season, horizon)
        residuals = fill_residuals(errors / deviation)
        return cls(season, horizon, deviation, BootstrapPaths(residuals))

    def predict(self, values: np.ndarray, origins: np.ndarray) -> Distribution:
        """Return the distributions of what follows ``origins`` [n] of ``values`` [T, D]."""
        mean = _ago(values, origins, self.season, self.horizon)
        return Distribution(origins, mean, np.broadcast_to(self.deviation, mean.shape))


@dataclass(frozen=True)
class GaussianRidge:
    """One ridge, and Gaussian errors of the deviation that each step and variable had.

    Attributes:
        scaler: Standardizes a series in its own units.
        matrix: Matrix [L, H] of the ridge.
        deviation: Standard deviation [H, D] of held-out errors, in the series' units.
        sampler: Draws standard normal errors.
    """

    scaler: Scaler
    matrix: np.ndarray
    deviation: np.ndarray
    sampler: PathSampler

    @classmethod
    def fit(cls, values: np.ndarray, *, look_back: int, horizon: int) -> GaussianRidge:
        """Fit to a series ``values`` [T, D], NaN where a value is missing."""
        scaler, known = Scaler.fit(values), np.isfinite(values)
        filled = forward_fill(scaler.transform(values))
        fit = fit_ridge(filled, known, RidgeConfig(look_back), horizon)
        origins = np.arange(look_back, len(values) - horizon + 1)
        origins = origins[:: -(-len(origins) // _ERROR_WINDOWS)]
        errors = targets(filled, origins, horizon) - held_out(filled, origins, [fit])
        deviation = deviations(errors, targets(known, origins, horizon)) * scaler.deviation
        return cls(scaler, fit.matrix, deviation, GaussianPaths())

    def predict(self, values: np.ndarray, origins: np.ndarray) -> Distribution:
        """Return the distributions of what follows ``origins`` [n] of ``values`` [T, D]."""
        first = int(origins[0]) - len(self.matrix)
        past = self.scaler.transform(values[first : int(origins[-1])])
        mean = self.scaler.inverse(predict(past, origins - first, self.matrix))
        return Distribution(origins, mean, np.broadcast_to(self.deviation, mean.shape))


def deviations(errors: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return root mean squares [H, D] of ``errors`` [n, H, D] where they are ``seen``."""
    squares = np.where(seen, np.square(errors), 0.0).sum(axis=0)
    return np.sqrt(squares / np.maximum(seen.sum(axis=0), 1))


def _ago(filled: np.ndarray, origins: np.ndarray, season: int, horizon: int) -> np.ndarray:
    """Return what was whole seasons before each target: [n, H, D] of ``filled`` [T, D]."""
    return filled[origins[:, None] - season + np.arange(horizon) % season]


@dataclass(frozen=True)
class ExponentialSmoothing:
    """AutoETS of each variable: level, trend and season chosen by AICc, errors Gaussian.

    Attributes:
        horizon: Steps ahead, H.
        first: Step that the fitted states are of, where what a forecast sees begins.
        models: statsforecast's fitted model of each variable.
        sampler: Draws standard normal errors.
    """

    horizon: int
    first: int
    models: tuple[Any, ...]
    sampler: PathSampler

    @classmethod
    def fit(cls, values: np.ndarray, *, season: int, horizon: int) -> ExponentialSmoothing:
        """Fit to the last steps of a series ``values`` [T, D] without NaN."""
        from statsforecast.models import AutoETS  # pyright: ignore[reportMissingImports]

        period = season if season <= _LONGEST_SEASON else 1
        first = max(0, len(values) - _FITTED_STEPS)
        past = values[first:].T.copy()
        models = [AutoETS(season_length=period, model="AZZ").fit(one) for one in past]
        return cls(horizon, first, tuple(models), GaussianPaths())

    def predict(self, values: np.ndarray, origins: np.ndarray) -> Distribution:
        """Return the distributions of what follows ``origins`` [n] of ``values`` [T, D]."""
        mean = np.empty((len(origins), self.horizon, len(self.models)))
        scale = np.empty_like(mean)
        for row, origin in enumerate(origins.tolist()):
            past = values[self.first : origin].T.copy()
            for variable, model in enumerate(self.models):
                made = model.forward(past[variable], h=self.horizon, level=[_BAND])
                mean[row, :, variable] = made["mean"]
                width = made[f"hi-{_BAND}"] - made[f"lo-{_BAND}"]
                scale[row, :, variable] = width / (2 * _HALF_WIDTH)
        return Distribution(origins, mean, scale)


def smoothing_refusal(values: np.ndarray, season: int) -> str | None:
    """Return why exponential smoothing cannot be fitted to ``values`` [T, D]; None if it can."""
    if importlib.util.find_spec("statsforecast") is None:
        return "statsforecast is not installed: pip install statsforecast"
    if values.shape[1] > _MOST_VARIABLES:
        return f"it is fitted to each series alone, and {values.shape[1]:,} would take long"
    period = season if season <= _LONGEST_SEASON else 1
    if len(values) < max(_FEWEST_STEPS, _FEWEST_SEASONS * period):
        return f"{len(values):,} steps are too few"
    return None
