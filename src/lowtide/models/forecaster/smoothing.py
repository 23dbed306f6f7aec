"""Exponential smoothing by statsforecast, where that is installed: a baseline of forecasting."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.models.forecaster.baselines import GaussianPaths
from lowtide.models.forecaster.distribution import Distribution
from lowtide.models.forecaster.paths import PathSampler

# Steps that a model is fitted to, the last: more take long.
_FITTED_STEPS = 1000
# AutoETS knows no longer seasons; each variable is fitted on its own, in seconds.
_LONGEST_SEASON, _MOST_VARIABLES = 24, 32
_FEWEST_SEASONS, _FEWEST_STEPS = 3, 30
# Half the width of the 90 % band, in standard deviations.
_BAND, _HALF_WIDTH = 90, 1.6448536269514722


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
