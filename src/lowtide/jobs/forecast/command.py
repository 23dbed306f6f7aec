"""Forecast series: quantiles and sample paths of what comes after a table of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from lowtide.core.atomic_file import require_distinct, require_name, require_output
from lowtide.core.errors import UsageError
from lowtide.core.figure_file import require_figure_name
from lowtide.core.units import format_bytes
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.forecast.frames import (
    quantile_columns,
    quantile_frame,
    require_table_name,
    sample_frame,
    write_frame,
)
from lowtide.jobs.forecast.report import ForecastReport, source_facts
from lowtide.jobs.forecast.settings import ForecastKeywords, ForecastSettings, SeriesSettings
from lowtide.jobs.forecast.source import NAMES, TableForecaster, known_notes, table_forecasters
from lowtide.jobs.forecast.trained import (
    DIFFUSION,
    without_attention_warnings,
)
from lowtide.media.table_bytes import is_stdin
from lowtide.media.table_frames import TableData
from lowtide.media.table_words import list_chosen_names
from lowtide.media.time_table import TimeTable
from lowtide.memory.process_memory import available_host_bytes, failing_beyond_container

if TYPE_CHECKING:
    import pandas as pd


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


@show_keywords(ForecastSettings, ForecastKeywords)
@without_attention_warnings()
def forecast(
    data: TableData,
    output: str | Path | None = None,
    *,
    force: bool = False,
    **settings: Unpack[ForecastKeywords],
) -> Forecast:
    """Forecast the series of a table, by a model fitted to the table itself or a trained one.

    Args:
        data: A CSV, Excel or Parquet file, ``-`` for standard input, a data frame of pandas or
            polars, or a Series with dates as its index. Wide, with a column of dates, or long, with
            a column of names of series besides.
        output: File of means and quantiles, CSV or Parquet.
        force: Overwrite files that exist.
        settings: How the table is read, model, horizon, levels, sample paths and all else, as
            fields of `ForecastSettings`.

    Raises:
        InputError: The table cannot be used; the message has the line and the column.
        ModelError: A file of the folder is damaged.
        UsageError: An argument is invalid, or a file exists.
        OutputError: A file cannot be written.
    """
    chosen = ForecastSettings.of(**settings)
    require_paths(chosen)
    steps, levels, bands = max(chosen.wanted), chosen.levels, chosen.bands
    tables = named_outputs(output, chosen.samples_output)
    for path in tables:
        require_table_name(path)
    wanted = require_outputs(data, tables, chosen.plot, force=force)
    table, sources = table_forecasters(chosen.model, data, steps, chosen.paths, chosen)
    require_room_for_paths(chosen.samples, steps, len(table.names))
    place = table.place_of_target(chosen.target)
    floor = path_floors(table, chosen.non_negative)
    with failing_beyond_container():
        mean, drawn = _mean_and_samples(sources, floor, steps, chosen.samples, chosen.seed)
    cut = np.atleast_1d((drawn <= floor).any(axis=(0, 1)) & (chosen.non_negative is None))
    notes = _notes(table, sources, steps, cut)
    if place is not None:
        table = table.of_series([place])
        drawn, mean = drawn[..., [place]], mean[:, [place]]
    report = ForecastReport(
        model=str(chosen.model),
        series=len(table.names),
        history=len(table.values),
        frequency=table.grid.frequency,
        season=table.grid.season,
        horizon=steps,
        samples=chosen.samples,
        quantile_levels=levels,
        intervals=bands,
        seed=chosen.seed,
        **source_facts(sources, place),
        outputs=[str(path) for path in wanted],
        notes=notes,
    )
    stamps, quantiles = table.ahead(steps), quantile_columns(levels, bands)
    frame = quantile_frame(table, stamps, mean, drawn, quantiles)
    if output is not None:
        write_frame(frame, Path(output), replace=force)
    if chosen.samples_output is not None:
        write_frame(sample_frame(table, stamps, drawn), chosen.samples_output, replace=force)
    if chosen.plot is not None:
        from lowtide.jobs.forecast.plot import plot_forecast

        plot_forecast(chosen.plot, table, frame, quantiles, replace=force)
    return Forecast(frame, drawn, report)


def _notes(
    table: TimeTable, sources: Sequence[TableForecaster], steps: int, cut: np.ndarray
) -> list[str]:
    """Return what is to be said of a table and its forecast, of which 0 ``cut`` [D] series."""
    notes = list(dict.fromkeys([*table.notes, *(text for one in sources for text in one.notes)]))
    notes += known_notes(table, steps, [one.effects for one in sources if one.effects is not None])
    if len(table.by_end()) > 1:
        notes.append("each series is forecast from its own last value on")
    if cut.any():
        names = list_chosen_names(table.names, cut)
        notes.append(f"bands end at 0, below which the data never were: {names}")
    return notes


def _mean_and_samples(
    sources: Sequence[TableForecaster], floor: np.ndarray, steps: int, samples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean [H, D] and sample paths [S, H, D] of all series, none below ``floor`` [D]."""
    mean, drawn = np.empty((steps, len(floor))), np.empty((samples, steps, len(floor)))
    for source in sources:
        made = source.made.above(floor[source.places])
        mean[:, source.places] = made.mean[0]
        drawn[..., source.places] = made.sample(source.paths.sampler, samples, seed=seed)[0]
    return mean, drawn


def require_paths(settings: SeriesSettings) -> None:
    """Refuse paths of diffusion of a model that is not trained."""
    if settings.paths == DIFFUSION and str(settings.model) in NAMES:
        raise UsageError(
            "diffusion paths are of a trained model",
            hint="lowtide train forecast DATA --horizons 96, then -m experiments/DATA-forecast",
        )


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


def path_floors(table: TimeTable, non_negative: bool | None) -> np.ndarray:
    """Return what no path [D] is below: 0, or nothing; None is 0 where no value is below it."""
    if non_negative is None:
        return np.where(np.nanmin(table.values, axis=0) >= 0, 0.0, -np.inf)
    return np.full(len(table.names), 0.0 if non_negative else -np.inf)
