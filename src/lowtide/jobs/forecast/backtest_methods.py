"""Methods that a backtest compares: the forecaster, its other paths, and each method alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.forecast.command import path_floors
from lowtide.jobs.forecast.source import choose_method, known_notes, remove_known_effects
from lowtide.jobs.forecast.trained import DIFFUSION, TrainedForecaster
from lowtide.media.time_table import TimeTable
from lowtide.models.forecaster.bands import GaussianPathSampler
from lowtide.models.forecaster.choice import ForecasterChoice, fit_model
from lowtide.models.forecaster.known_effects import KnownEffects
from lowtide.models.forecaster.methods import METHODS, NAIVE, RIDGE
from lowtide.models.forecaster.paths import PATHS, ForecastDistribution, PathSampler, StandardScaler

# The last value, with errors that occurred.
RANDOM_WALK = "naive (random walk)"
# Steps of diffusion's sampler at most, which takes long.
_SAMPLING_STEPS = 10


@dataclass(frozen=True)
class BacktestMethod:
    """A forecaster in a backtest.

    Attributes:
        name: Its name in the report.
        predict: Returns distributions at forecast origins [n].
        sampler: Draws its standardized errors.
        single_steps: Windows whose single steps are scored: all, those of joint scores alone where
            sampling takes long, or none, where they are distributed as another's.
    """

    name: str
    predict: Callable[[np.ndarray], ForecastDistribution]
    sampler: PathSampler
    single_steps: Literal["all", "joint", "none"] = "all"


@dataclass(frozen=True)
class FittedMethods:
    """The forecaster and what it is compared with.

    ``deviation`` [D] is the unit of scores, and ``unit`` [D] that of scaled errors, the absolute
    error of repeating the last season in the training part. ``paths`` is the sampler,
    ``path_energy`` what that was chosen by, and ``chosen`` the method that the forecaster has for
    each series, empty of a trained one. ``notes`` are sentences on what was left out.
    """

    methods: list[BacktestMethod]
    deviation: np.ndarray
    unit: np.ndarray
    paths: str
    path_energy: dict[str, float]
    chosen: dict[str, str]
    notes: list[str]


def fit_backtest_methods(
    table: TimeTable,
    horizon: int,
    train: int,
    model: str,
    paths: str,
    trained: TrainedForecaster | None = None,
) -> FittedMethods:
    """Fit the forecaster and what it is compared with to the first ``train`` steps of a table.

    A ``trained`` forecaster is taken as it is and called ``ridge``. After the forecaster come its
    other paths, it with Gaussian errors, every other method by its name, and the last value.
    """
    deviation = StandardScaler.fit(table.values[:train]).deviation
    season = table.grid.season if table.grid.season < train else 1
    changes = np.abs(table.values[season:train] - table.values[: train - season])
    known = np.isfinite(changes)
    unit = np.where(known, changes, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    if trained is None:
        table, effects = remove_known_effects(table, train)
        bound = _Binding(table, horizon, train, effects)
        choice = choose_method(table, horizon, model, steps=train, paths=paths)
        methods = [bound.method(model, choice)]
        name, forecaster, predict = model, choice.forecaster, methods[0].predict
        chosen = dict(zip(table.names, choice.chosen, strict=True))
        notes, drawn = list(choice.notes), choice.paths.name
        notes += known_notes(table, 0, [] if effects is None else [effects])
    else:
        bound = _Binding(table, horizon, train)
        name, forecaster, chosen = RIDGE, trained.ridge, {}
        notes = known_notes(table, 0, [])
        predict, drawn = bound.predict(trained.predict), paths
        if paths not in PATHS:
            drawn = trained.ridge.paths.name
        residuals = np.ascontiguousarray(forecaster.residuals[:, :horizon])
        sampler = trained.sampler(DIFFUSION, table, horizon, _SAMPLING_STEPS)
        methods = [
            BacktestMethod(name, predict, PATHS[drawn](residuals)),
            BacktestMethod(f"{name}, {DIFFUSION} paths", predict, sampler, "joint"),
        ]
    residuals = np.ascontiguousarray(forecaster.residuals[:, :horizon])
    for other, kind in PATHS.items():
        if other != drawn:
            methods.append(
                BacktestMethod(f"{name}, {other} paths", predict, kind(residuals), "none")
            )
    methods.append(BacktestMethod(f"{name}, Gaussian errors", predict, GaussianPathSampler()))
    for other in METHODS:
        if other != name:
            try:
                choice = choose_method(table, horizon, other, steps=train)
                methods.append(bound.method(other, choice))
            except InputError as error:
                notes.append(f"not scored: {error.message}")
    methods.append(bound.method(RANDOM_WALK, bound.last_value()))
    return FittedMethods(methods, deviation, unit, drawn, forecaster.paths.energy, chosen, notes)


class _Binding:
    """Forecasts of a table as functions of origins alone, at 0 or above where its first part is."""

    def __init__(
        self, table: TimeTable, horizon: int, train: int, effects: KnownEffects | None = None
    ) -> None:
        """Bind to a table whose values are without ``effects`` of columns that are known ahead."""
        self._table, self._horizon, self._train = table, horizon, train
        self._phases = table.grid.phases()
        self._effects = None if effects is None else effects.of(table.known[: len(table.values)])
        whole = table.values if self._effects is None else table.values + self._effects
        self._floor = path_floors(replace(table, values=whole[:train]), None)

    def predict(
        self, forecast: Callable[[np.ndarray, np.ndarray, np.ndarray], ForecastDistribution]
    ) -> Callable[[np.ndarray], ForecastDistribution]:
        def at(origins: np.ndarray) -> ForecastDistribution:
            targets = origins[:, None] + np.arange(self._horizon)
            found = forecast(self._table.values, origins, self._phases[targets])
            found = found if self._effects is None else found.plus(self._effects[targets])
            return found.above(self._floor)

        return at

    def method(self, name: str, choice: ForecasterChoice) -> BacktestMethod:
        return BacktestMethod(name, self.predict(choice.forecaster.predict), choice.paths.sampler)

    def last_value(self) -> ForecasterChoice:
        first = self._table.values[: self._train]
        phases = self._phases[: self._train]
        return fit_model(NAIVE, first, phases, horizon=self._horizon, season=1)
