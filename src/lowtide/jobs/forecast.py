"""Forecast series: quantiles and sample paths of what comes after a table of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
from pydantic import BaseModel

from lowtide.core.atomic_file import require_distinct, require_name, require_output
from lowtide.core.errors import UsageError
from lowtide.core.figure_file import require_figure_name
from lowtide.core.option import MOST_COUNT, MOST_SEED
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes
from lowtide.jobs.forecast_frames import (
    quantile_frame,
    require_table_name,
    sample_frame,
    write_frame,
)
from lowtide.jobs.trained_forecaster import (
    DIFFUSION,
    TrainedForecaster,
    without_attention_warnings,
)
from lowtide.media.table import read_table
from lowtide.media.table_bytes import is_stdin
from lowtide.media.table_options import TableKeywords, TableOptions
from lowtide.media.table_words import listed
from lowtide.media.time_table import TimeTable
from lowtide.memory.memory_limits import failing_beyond_container
from lowtide.memory.process_memory import available_host_bytes
from lowtide.models.forecaster.forecaster import RidgeForecaster
from lowtide.models.forecaster.paths import AUTO_PATHS, PATHS, Distribution, PathSampler

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_LEVELS = (0.1, 0.5, 0.9)
RIDGE = "ridge"


class ForecastReport(BaseModel):
    """Report of a forecast.

    ``history`` counts the steps of the table, ``look_backs`` those that each ridge sees, and
    ``residual_paths`` the held-out errors that samples are drawn from, by the sampler ``paths``;
    ``path_energy`` has the energy scores it was chosen by. ``until`` is the last stamp that a
    trained ``model`` was trained on; without one, that is the end of the table. ``notes`` are
    sentences on what was repaired in the table or left out, and attention backends that cannot run.
    """

    schema_version: int = SCHEMA_VERSION
    model: str = RIDGE
    until: str | None = None
    series: int
    history: int
    frequency: str
    season: int
    horizon: int
    samples: int
    quantile_levels: tuple[float, ...]
    seed: int
    look_backs: tuple[int, ...]
    residual_paths: int
    paths: str
    path_energy: dict[str, float]
    outputs: list[str] = []
    notes: list[str] = []

    def __str__(self) -> str:
        series = f"{self.series} series" if self.series > 1 else "1 series"
        season = f"season of {self.season:,}" if self.season > 1 else "no season"
        origin = "fitted to the table itself"
        if self.until is not None:
            origin = f"{self.model}, trained on data until {self.until}"
        made = "learned from" if self.paths == DIFFUSION else "of"
        lines = [
            f"{series} of {self.history:,} steps ({self.frequency}, {season}),"
            f" {self.horizon:,} ahead",
            f"{origin}: ridges that see"
            f" {' and '.join(f'{length:,}' for length in sorted(set(self.look_backs)))} steps,"
            f" {self.paths} paths {made} {self.residual_paths:,} held-out errors",
        ]
        if self.path_energy:
            tried = ", ".join(f"{name} {score:.4g}" for name, score in self.path_energy.items())
            lines.append(f"paths chosen by energy score on blocked folds: {tried}")
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join([*lines, *(f"written: {path}" for path in self.outputs)])


@dataclass(frozen=True)
class Forecast:
    """A forecast of D series over H steps.

    Attributes:
        frame: One row for each series and step: mean and quantiles, in the units of the data.
        samples: Sample paths [S, H, D] in the units of the data.
        report: What it was made of.
    """

    frame: pd.DataFrame
    samples: np.ndarray
    report: ForecastReport


@without_attention_warnings()
def forecast(
    data: str | Path | pd.DataFrame,
    output: str | Path | None = None,
    *,
    model: str | Path = RIDGE,
    horizon: int | None = None,
    horizons: Sequence[int] = (),
    quantile_levels: Sequence[float] = DEFAULT_LEVELS,
    samples: int = 200,
    paths: str = AUTO_PATHS,
    seed: int = 0,
    samples_output: str | Path | None = None,
    plot: str | Path | None = None,
    force: bool = False,
    **reading: Unpack[TableKeywords],
) -> Forecast:
    """Forecast the series of a table, by a model fitted to the table itself or a trained one.

    Args:
        data: A CSV, Excel or Parquet file, ``-`` for standard input, or a data frame: wide, with a
            column of dates, or long, with a column of names of series besides.
        output: File of means and quantiles, CSV or Parquet.
        model: ``"ridge"``, fitted to the table, or a folder of `lowtide train forecast`.
        horizon: Steps to forecast, after the last value of each series.
        horizons: Several of them; the longest covers all.
        quantile_levels: Levels of quantiles, between 0 and 1.
        samples: Sample paths.
        paths: How steps and series move together in them: ``"bootstrap"``, ``"copula"``,
            ``"independent"``, or ``"auto"``, the best of them on blocked folds of the table; of a
            folder also ``"diffusion"``, which is its ``"auto"``.
        seed: Seed of the sample paths, from 0 to 2**63 - 1.
        samples_output: File of the sample paths, CSV or Parquet.
        plot: Picture of history, median and bands.
        force: Overwrite files that exist.
        reading: How the table is read, as `media.table_options.TableOptions` has it: ``columns``
            to use, by default all or those of the folder; ``target``, the one to forecast by a
            model of all; ``frequency``, ``season``, ``time_column``, ``id_column``, ``known``,
            ``date_format``, ``day_first``, ``decimal``, ``timezone``, ``consecutive``.

    Raises:
        InputError: The table cannot be used; the message has the line and the column.
        ModelError: A file of the folder is damaged.
        UsageError: An argument is invalid, or a file exists.
        OutputError: A file cannot be written.
    """
    steps = _horizon(horizon, horizons)
    levels = _levels(quantile_levels)
    require_sampling(samples, paths, seed, trained=model != RIDGE)
    tables = named_outputs(output, samples_output)
    for path in tables:
        require_table_name(path)
    wanted = require_outputs(data, tables, plot, force=force)
    options = TableOptions(**reading)
    source = _source(model, data, steps, paths, options)
    table = source.table
    require_room_for_paths(samples, steps, len(table.names))
    notes = [*table.notes, *_own_ends(table), *_unverified(table, source.ridge)]
    place = table.place_of_target(options.target)
    with failing_beyond_container():
        distribution = predict_from_ends(table, source, steps)
        drawn = distribution.sample(source.sampler, samples, seed=seed)[0]
    mean = distribution.mean[0]
    if place is not None:
        table = table.only(place)
        drawn, mean = drawn[..., place : place + 1], mean[:, place : place + 1]
    stamps = table.ahead(steps)
    frame = quantile_frame(table, stamps, mean, drawn, levels)
    report = ForecastReport(
        model=str(model),
        until=source.until,
        series=len(table.names),
        history=len(table.values),
        frequency=table.grid.frequency,
        season=table.grid.season,
        horizon=steps,
        samples=samples,
        quantile_levels=levels,
        seed=seed,
        look_backs=tuple(len(matrix) for matrix in source.ridge.ridges),
        residual_paths=len(source.ridge.residuals),
        paths=source.paths,
        path_energy={} if source.paths == DIFFUSION else source.ridge.paths.energy,
        outputs=[str(path) for path in wanted],
        notes=[*notes, *source.attention_notes],
    )
    if output is not None:
        write_frame(frame, Path(output), replace=force)
    if samples_output is not None:
        samples_frame = sample_frame(table, stamps, drawn)
        write_frame(samples_frame, Path(samples_output), replace=force)
    if plot is not None:
        from lowtide.jobs.forecast_plot import plot_forecast

        plot_forecast(Path(plot), table, frame, replace=force)
    return Forecast(frame, drawn, report)


@dataclass(frozen=True)
class _Source:
    """What a forecast is made of; ``paths`` is the name of ``sampler``.

    ``attention_notes`` are those of a trained model, which samples may add to.
    """

    table: TimeTable
    ridge: RidgeForecaster
    predict: Callable[[np.ndarray, np.ndarray, np.ndarray], Distribution]
    paths: str
    sampler: PathSampler
    until: str | None = None
    attention_notes: Sequence[str] = ()

    @property
    def context(self) -> int:
        """Steps before an origin that a forecast needs."""
        return self.ridge.context


def _source(
    model: str | Path,
    data: str | Path | pd.DataFrame,
    steps: int,
    paths: str,
    options: TableOptions,
) -> _Source:
    """Return the table of ``data`` and the forecaster fitted to it, or the trained one."""
    if model == RIDGE:
        table = read_table(data, options, room=available_host_bytes())
        with failing_beyond_container():
            ridge = fit_forecaster(table, steps, paths=paths)
        return _Source(table, ridge, ridge.predict, ridge.paths.name, ridge.paths.sampler)
    trained = TrainedForecaster.load(Path(model))
    trained.require_horizon(steps)
    table, name = trained.read_table(data, options), trained.path_name(paths)
    sampler = trained.sampler(name, table, steps)
    return _Source(
        table,
        trained.ridge,
        trained.predict,
        name,
        sampler,
        trained.facts.until,
        trained.denoiser.notes,
    )


def predict_from_ends(table: TimeTable, source: _Source, steps: int) -> Distribution:
    """Return the distribution of what follows the last value of each series, of one window.

    Series that end together are forecast together, from the table until there.
    """
    ends = table.ends
    made: Distribution | None = None
    for end in sorted(set(ends.tolist()), reverse=True):
        # A model looks back at more steps than a series may have had by then.
        short = max(0, source.context - end)
        values = np.pad(table.values[:end], ((short, 0), (0, 0)), constant_values=np.nan)
        phases = table.grid.phases(table.grid.after(steps, end))[None]
        found = source.predict(values, np.array([len(values)]), phases)
        if made is None:
            made = found
            continue
        here = ends == end
        made.mean[..., here], made.scale[..., here] = found.mean[..., here], found.scale[..., here]
    assert made is not None
    return made


def fit_forecaster(
    table: TimeTable, horizon: int, steps: int | None = None, paths: str = AUTO_PATHS
) -> RidgeForecaster:
    """Return a forecaster fitted to the first ``steps`` of a table, by default all."""
    return RidgeForecaster.fit(
        table.values[:steps],
        table.grid.phases()[:steps],
        horizon=horizon,
        season=table.grid.season,
        paths=paths,
    )


def _own_ends(table: TimeTable) -> list[str]:
    """Return what is to be said where series end at different steps."""
    if len(set(table.ends.tolist())) == 1:
        return []
    return ["each series is forecast from its own last value on"]


def _unverified(table: TimeTable, model: RidgeForecaster) -> list[str]:
    """Return what is to be said of series that have too few values to judge forecasts by."""
    if not model.unverified.any():
        return []
    names = listed(table.names, model.unverified)
    return [f"too few values to judge forecasts by, bands are those of other series: {names}"]


def require_sampling(samples: int, paths: str, seed: int, *, trained: bool) -> None:
    """Refuse settings of sample paths that make no sense, or need a model that is ``trained``."""
    if samples < 2:
        raise UsageError(f"{samples} samples are no distribution", hint="ask for 200")
    if samples > MOST_COUNT:
        raise UsageError(f"{samples:,} samples are too many", hint="ask for 200")
    if not 0 <= seed <= MOST_SEED:
        raise UsageError(f"a seed is from 0 to {MOST_SEED:,}, not {seed}", hint="--seed 0")
    if paths == DIFFUSION and not trained:
        raise UsageError(
            "diffusion paths are of a trained model",
            hint="lowtide train forecast DATA --horizons 96, then -m experiments/DATA-forecast",
        )
    if paths not in (AUTO_PATHS, *PATHS, DIFFUSION):
        known = ", ".join((AUTO_PATHS, *PATHS, DIFFUSION))
        raise UsageError(f"there are no {paths!r} paths", hint=f"--paths is one of {known}")


def named_outputs(*outputs: str | Path | None) -> list[Path]:
    """Return the paths of outputs that are wanted; raises `UsageError` for one without a name."""
    wanted = [path for path in outputs if path is not None]
    for path in wanted:
        require_name(path)
    return [Path(path) for path in wanted]


def require_room_for_paths(samples: int, steps: int, series: int) -> None:
    """Refuse sample paths that take more memory than there is, by `UsageError`."""
    # Sorted, and in rows of a table, there are copies of them.
    needed, room = samples * steps * series * 4 * 8, available_host_bytes()
    if needed > room:
        raise UsageError(
            f"{samples:,} samples of {steps:,} steps of {series:,} series take up to"
            f" {format_bytes(needed)} of memory, and there are {format_bytes(room)}",
            hint="--samples 200",
        )


def require_outputs(
    data: object, files: Iterable[Path], plot: str | Path | None, *, force: bool
) -> list[Path]:
    """Return the names of what is written: ``files`` and a ``plot``.

    Raises:
        UsageError: One exists, is the table ``data`` or another one, or is no name of a picture.
        OutputError: One cannot be written, as `require_output` says.
    """
    wanted = [*files, *named_outputs(plot)]
    for path in wanted:
        require_output(path, force=force)
    inputs = [Path(data)] if isinstance(data, str | Path) and not is_stdin(data) else []
    require_distinct(wanted, inputs)
    if plot is not None:
        require_figure_name(Path(plot))
    return wanted


def _horizon(horizon: int | None, horizons: Sequence[int]) -> int:
    wanted = [*horizons, *([horizon] if horizon is not None else [])]
    if not wanted:
        raise UsageError("no horizon is given", hint="--horizon 24")
    wrong = [steps for steps in wanted if steps < 1 or steps != int(steps)]
    if wrong:
        raise UsageError(f"a horizon of {wrong[0]} steps is none", hint="--horizon 24")
    return int(max(wanted))


def _levels(levels: Sequence[float]) -> tuple[float, ...]:
    wrong = [level for level in levels if not 0 < level < 1]
    if wrong or not levels:
        raise UsageError(
            f"quantile levels are between 0 and 1, not {wrong}", hint="--levels 0.1,0.5,0.9"
        )
    return tuple(sorted(set(levels)))
