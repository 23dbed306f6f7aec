"""What a forecast is made of: methods fitted to series that end together, or a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.forecast.trained import DIFFUSION, TrainedForecaster
from lowtide.media.table import read_table
from lowtide.media.table_frames import TableData
from lowtide.media.table_options import TableOptions
from lowtide.media.table_words import first_few, list_chosen_names
from lowtide.media.time_table import TimeTable
from lowtide.memory.process_memory import available_host_bytes, failing_beyond_container
from lowtide.models.forecaster.choice import ForecasterChoice, PerVariableForecaster, fit_model
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.forecaster.known_effects import KnownEffects
from lowtide.models.forecaster.methods import AUTO, METHODS
from lowtide.models.forecaster.paths import AUTO_PATHS, ForecastDistribution, PathChoice

# What a model may be besides a folder.
NAMES = (AUTO, *METHODS)


@dataclass(frozen=True)
class TableForecaster:
    """Forecaster of some series of a table.

    Attributes:
        table: The series, until their last value.
        places: Their places [d] in the whole table.
        forecaster: What was fitted to them.
        made: Their distribution of the steps ahead, of one window.
        paths: Sampler of their joint paths, by its name.
        choice: How methods were chosen; None of a trained model.
        effects: Those of columns that are known ahead, if there are any.
        until: Last stamp that a trained model was trained on.
        model_notes: Notes of a trained model, which samples may add to.
    """

    table: TimeTable
    places: np.ndarray
    forecaster: RidgeForecaster | PerVariableForecaster
    made: ForecastDistribution
    paths: PathChoice
    choice: ForecasterChoice | None = None
    effects: KnownEffects | None = None
    until: str | None = None
    model_notes: list[str] | tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What is to be said of methods, and of series that forecasts cannot be judged by."""
        found = [*(self.choice.notes if self.choice is not None else ()), *self.model_notes]
        if self.forecaster.unverified.any():
            names = list_chosen_names(self.table.names, self.forecaster.unverified)
            own = isinstance(self.forecaster, PerVariableForecaster)
            bands = "guesses" if own else "those of other series"
            found.append(f"too few values to judge forecasts by, bands are {bands}: {names}")
        return found


def table_forecasters(
    model: str | Path,
    data: TableData,
    steps: int,
    paths: str,
    options: TableOptions,
) -> tuple[TimeTable, list[TableForecaster]]:
    """Return the table of ``data`` and what forecasts it ``steps`` ahead.

    Series that end together have one source: the method called ``model``, or the best, is fitted
    to them until there. A trained model is one source of all.
    """
    if str(model) in NAMES:
        table = read_table(data, options, room=available_host_bytes())
        with failing_beyond_container():
            return table, [
                _fitted(table.of_series(places).until(end), places, str(model), steps, paths)
                for end, places in table.by_end()
            ]
    trained = TrainedForecaster.load(Path(model))
    trained.require_horizon(steps)
    table, name = trained.read_table(data, options), trained.path_name(paths)
    energy = {} if name == DIFFUSION else trained.ridge.paths.energy
    source = TableForecaster(
        table,
        np.arange(len(table.names)),
        trained.ridge,
        _from_own_ends(table, trained, steps),
        PathChoice(name, trained.sampler(name, table, steps), energy),
        until=trained.facts.until,
        model_notes=trained.denoiser.notes,
    )
    return table, [source]


def _fitted(
    table: TimeTable, places: np.ndarray, model: str, steps: int, paths: str
) -> TableForecaster:
    """Fit to series at ``places`` of a whole table, which end together."""
    table, effects = remove_known_effects(table)
    choice = choose_method(table, steps, model, paths=paths)
    end, by = len(table.values), choice.forecaster
    made = _from_end(table, end, by.predict, steps)
    if effects is not None:
        made = made.plus(effects.of(known_at(table, end, steps)))
    return TableForecaster(table, places, by, made, by.paths, choice, effects)


def _from_own_ends(
    table: TimeTable, trained: TrainedForecaster, steps: int
) -> ForecastDistribution:
    """Return what a model of all series says of what follows the last value of each."""
    context = trained.ridge.context
    parts = [
        (places, _from_end(table, end, trained.predict, steps, context))
        for end, places in table.by_end()
    ]
    made = parts[0][1]
    for places, found in parts[1:]:
        made.mean[..., places] = found.mean[..., places]
        made.scale[..., places] = found.scale[..., places]
    return made


def _from_end(
    table: TimeTable,
    end: int,
    predict: Callable[[np.ndarray, np.ndarray, np.ndarray], ForecastDistribution],
    steps: int,
    context: int = 0,
) -> ForecastDistribution:
    """Return the distribution of ``steps`` from ``end`` on, of one window.

    Where a model looks back at more steps than there are, ``context``, they are missing values.
    """
    short = max(0, context - end)
    values = np.pad(table.values[:end], ((short, 0), (0, 0)), constant_values=np.nan)
    phases = table.grid.phases(table.grid.after(steps, end))[None]
    return predict(values, np.array([len(values)]), phases)


def remove_known_effects(
    table: TimeTable, steps: int | None = None
) -> tuple[TimeTable, KnownEffects | None]:
    """Return the table less the effects of columns that are known ahead, and these.

    They are fitted to its first ``steps``, by default all.
    """
    if not table.known_names:
        return table, None
    known = table.known[: len(table.values)]
    effects = KnownEffects.fit(table.values[:steps], known[:steps], table.grid.season)
    return replace(table, values=table.values - effects.of(known)), effects


def known_at(table: TimeTable, first: int, count: int) -> np.ndarray:
    """Return what is known of ``count`` steps from ``first`` on, as `TimeTable.known`."""
    there = table.known[first : first + count]
    return np.pad(there, ((0, count - len(there)), (0, 0), (0, 0)), constant_values=np.nan)


def known_notes(table: TimeTable, steps: int, effects: Sequence[KnownEffects]) -> list[str]:
    """Return what is to be said of columns that are known ahead of a forecast."""
    if not table.known_names:
        return []
    if not effects:
        return [f"known ahead, but of no use to a trained model: {first_few(table.known_names)}"]
    used = np.any([one.used for one in effects], axis=0)
    notes = []
    if not used.all():
        names = list_chosen_names(table.known_names, ~used)
        notes.append(f"known ahead, but without a clear effect, so not used: {names}")
    ahead = [known_at(table.of_series(places), end, steps) for end, places in table.by_end()]
    there = np.isfinite(np.concatenate(ahead, axis=1)[..., used]).all(axis=-1).sum(axis=0)
    if used.any() and there.min() < steps:
        count = " to ".join(f"{one:,}" for one in np.unique([there.min(), there.max()]))
        notes.append(
            f"known ahead for {count} of {steps:,} steps: after them columns are at their mean"
        )
    return notes


def choose_method(
    table: TimeTable,
    horizon: int,
    model: str,
    *,
    steps: int | None = None,
    paths: str = AUTO_PATHS,
) -> ForecasterChoice:
    """Return the method called ``model``, or the best, of the first ``steps`` of a table."""
    values = table.values[:steps]
    if len(values) < 2:
        raise InputError("1 row is too few for a forecast", hint="give 2 rows at least")
    return fit_model(
        model,
        values,
        table.grid.phases()[:steps],
        horizon=horizon,
        season=table.grid.season,
        paths=paths,
    )


def fit_forecaster(
    table: TimeTable, horizon: int, steps: int | None = None, paths: str = AUTO_PATHS
) -> RidgeForecaster:
    """Return the four ridges fitted to the first ``steps`` of a table, by default all."""
    return RidgeForecaster.fit(
        table.values[:steps],
        table.grid.phases()[:steps],
        horizon=horizon,
        season=table.grid.season,
        paths=paths,
    )
