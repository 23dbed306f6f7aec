"""Methods that a backtest compares: the forecaster, what it is without its parts, baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowtide.jobs.forecast import RIDGE, fit_forecaster
from lowtide.jobs.trained_forecaster import DIFFUSION, TrainedForecaster
from lowtide.media.time_table import TimeTable
from lowtide.models.forecaster.baselines import (
    Baseline,
    ExponentialSmoothing,
    GaussianPaths,
    GaussianRidge,
    NaiveForecaster,
    smoothing_refusal,
)
from lowtide.models.forecaster.paths import PATHS, Distribution, PathSampler
from lowtide.models.forecaster.windows import forward_fill

# The last value, with errors that occurred.
RANDOM_WALK = "naive (random walk)"
SMOOTHING = "AutoETS (statsforecast)"
# Steps of diffusion's sampler at most, which takes long.
_SAMPLING_STEPS = 10


@dataclass(frozen=True)
class Method:
    """A forecaster in a backtest.

    Attributes:
        name: Its name in the report.
        predict: Returns distributions at forecast origins [n].
        sampler: Draws its standardized errors.
        single_steps: Windows whose single steps are scored: all, those of joint scores alone where
            sampling takes long, or none, where they are distributed as another's.
    """

    name: str
    predict: Callable[[np.ndarray], Distribution]
    sampler: PathSampler
    single_steps: Literal["all", "joint", "none"] = "all"


@dataclass(frozen=True)
class FittedMethods:
    """The forecaster and what it is compared with.

    ``deviation`` [D] is the unit of scores, ``paths`` the forecaster's sampler, and ``path_energy``
    what it was chosen by. ``notes`` are sentences on what was left out.
    """

    methods: list[Method]
    deviation: np.ndarray
    paths: str
    path_energy: dict[str, float]
    notes: list[str]


def fit_methods(
    table: TimeTable,
    horizon: int,
    train: int,
    paths: str,
    trained: TrainedForecaster | None = None,
) -> FittedMethods:
    """Fit the forecaster and what it is compared with to the first ``train`` steps of a table.

    A ``trained`` forecaster is taken as it is. The methods are in the order of what they lack: the
    forecaster, its other paths, Gaussian errors, a single ridge, DLinear, and the naive ones.
    """
    model = fit_forecaster(table, horizon, train, paths) if trained is None else trained.ridge
    chosen = paths if trained is not None and paths in PATHS else model.paths.name
    forecast = model.predict if trained is None else trained.predict
    residuals = np.ascontiguousarray(model.residuals[:, :horizon])
    phases = table.grid.phases()

    def predict(origins: np.ndarray) -> Distribution:
        steps = origins[:, None] + np.arange(horizon)
        return forecast(table.values, origins, phases[steps])

    methods = [Method(RIDGE, predict, PATHS[chosen](residuals))]
    if trained is not None:
        sampler = trained.sampler(DIFFUSION, table, horizon, _SAMPLING_STEPS)
        methods.append(Method(f"{RIDGE}, {DIFFUSION} paths", predict, sampler, "joint"))
    for name, kind in PATHS.items():
        if name != chosen:
            methods.append(Method(f"{RIDGE}, {name} paths", predict, kind(residuals), "none"))
    methods.append(Method(f"{RIDGE}, Gaussian errors", predict, GaussianPaths()))
    filled = forward_fill(table.values)
    for name, one in _baselines(table, horizon, train, len(model.ridges[0])).items():
        methods.append(Method(name, _bound(one, filled), one.sampler))
    season = table.grid.season
    if refusal := smoothing_refusal(filled[:train], season):
        notes = [f"{SMOOTHING} is left out: {refusal}"]
    else:
        notes = [f"{SMOOTHING} is scored on the windows of joint scores alone"]
        ets = ExponentialSmoothing.fit(filled[:train], season=season, horizon=horizon)
        methods.append(Method(SMOOTHING, _bound(ets, filled), ets.sampler, "joint"))
    return FittedMethods(methods, model.scaler.deviation, chosen, model.paths.energy, notes)


def _baselines(table: TimeTable, horizon: int, train: int, look_back: int) -> dict[str, Baseline]:
    # Here, because it imports torch.
    from lowtide.models.forecaster.dlinear import DLinearForecaster

    values, season = table.values[:train], table.grid.season
    found: dict[str, Baseline] = {
        "one ridge, Gaussian errors": GaussianRidge.fit(
            values, look_back=look_back, horizon=horizon
        ),
        "DLinear": DLinearForecaster.fit(values, look_back=look_back, horizon=horizon),
    }
    if 1 < season <= train - horizon:
        found["seasonal naive"] = NaiveForecaster.fit(values, season=season, horizon=horizon)
    return {**found, RANDOM_WALK: NaiveForecaster.fit(values, season=1, horizon=horizon)}


def _bound(baseline: Baseline, values: np.ndarray) -> Callable[[np.ndarray], Distribution]:
    return lambda origins: baseline.predict(values, origins)
