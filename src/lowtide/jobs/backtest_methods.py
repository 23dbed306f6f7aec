"""Methods that a backtest compares: the forecaster, what it is without its parts, baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowtide.jobs.forecast import fit_forecaster
from lowtide.media.table import TimeTable
from lowtide.models.forecaster.baselines import (
    Baseline,
    GaussianPaths,
    GaussianRidge,
    NaiveForecaster,
)
from lowtide.models.forecaster.distribution import Distribution
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.forecaster.paths import PATHS, PathSampler
from lowtide.models.forecaster.windows import forward_fill

MODEL = "ridge"


@dataclass(frozen=True)
class Method:
    """A forecaster in a backtest.

    Attributes:
        name: Its name in the report.
        predict: Returns distributions at forecast origins [n].
        sampler: Draws its standardized errors.
        joint_only: Whether its single steps are distributed as those of another.
    """

    name: str
    predict: Callable[[np.ndarray], Distribution]
    sampler: PathSampler
    joint_only: bool = False


def fit_methods(
    table: TimeTable, horizon: int, train: int, paths: str
) -> tuple[RidgeForecaster, list[Method]]:
    """Fit the forecaster and what it is compared with to the first ``train`` steps of a table.

    The methods are in the order of what they lack: the forecaster, its other paths, Gaussian
    errors, a single ridge, DLinear, and the naive ones.
    """
    model = fit_forecaster(table, horizon, train, paths)
    phases = table.grid.phases()

    def predict(origins: np.ndarray) -> Distribution:
        steps = origins[:, None] + np.arange(horizon)
        return model.predict(table.values, origins, phases[steps])

    methods = [Method(MODEL, predict, model.paths.sampler)]
    for name, sampler in PATHS.items():
        if name != model.paths.name:
            label = f"{MODEL}, {name} paths"
            methods.append(Method(label, predict, sampler(model.residuals), joint_only=True))
    methods.append(Method(f"{MODEL}, Gaussian errors", predict, GaussianPaths()))
    filled = forward_fill(table.values)
    for name, one in _baselines(table, horizon, train, len(model.ridges[0])).items():
        methods.append(Method(name, _bound(one, filled), one.sampler))
    return model, methods


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
    return {**found, "naive": NaiveForecaster.fit(values, season=1, horizon=horizon)}


def _bound(baseline: Baseline, values: np.ndarray) -> Callable[[np.ndarray], Distribution]:
    return lambda origins: baseline.predict(values, origins)
