"""Tables of time series: files and data frames, wide or long, on one time grid."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError, install_extra, short_repr
from lowtide.media.calendars import NumberCalendar, isin_ascending
from lowtide.media.table_columns import TableColumns, find_columns, rows_with_dates, time_columns
from lowtide.media.table_dates import StampColumn
from lowtide.media.table_file import GivenTable, read_source
from lowtide.media.table_frames import TableData, frame_of
from lowtide.media.table_future import GridCells, KnownFuture, future_of_columns, future_of_series
from lowtide.media.table_numbers import numeric_column, numeric_column_if_any
from lowtide.media.table_options import TableOptions
from lowtide.media.table_remarks import (
    empty_steps,
    moved_rows,
    require_one_frequency,
    require_sizes,
    table_remarks,
)
from lowtide.media.table_words import TableRowError, first_few
from lowtide.media.time_grid import TimeGrid, fit_grid, stamp_index
from lowtide.media.time_table import TimeTable, ends_of, place_among

if TYPE_CHECKING:
    import pandas as pd


def read_table(
    data: TableData,
    options: TableOptions | None = None,
    *,
    room: int = sys.maxsize,
) -> TimeTable:
    """Read a table of series.

    Args:
        data: A file of CSV, Excel or Parquet, ``-`` for standard input, or a data frame: of pandas,
            or another that has ``to_pandas``, such as polars'. Wide: a column of stamps (``date``,
            ``ds`` or the first) and a column for each series. Long: a column of names of series
            besides, and one of values. Or a pandas Series that has stamps as its index.
        options: How it is read where it does not say so itself.
        room: Bytes of memory that there are for a file's table and what is made of it.

    Raises:
        InputError: The file cannot be read, a cell is no number or no date, stamps are doubled or
            not evenly spaced.
        UsageError: A name in the options is not in the table, a package is not installed, or
            ``data`` is of another type.
    """
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise UsageError("tables need pandas", hint=install_extra("forecast")) from error

    options = TableOptions() if options is None else options
    is_file = isinstance(data, str | Path)
    where = str(Path(data)) if is_file else "the frame"
    source = None
    try:
        if is_file:
            source = read_source(Path(data), room, options.decimal)
        else:
            source = GivenTable.of_frame(frame_of(data, counted=options.consecutive))
        if not len(source.frame):
            raise InputError("0 rows are too few for a forecast", hint="give rows below the header")
        time = time_columns(source, options)
        if time and not options.consecutive:
            source = rows_with_dates(source, time[0], options)
        return _read(source, time, options)
    except InputError as error:
        named = error.message.startswith(f"{where}: ")
        message = error.message if named else f"{where}: {error.message}"
        raise InputError(message, hint=error.hint) from error
    except TableRowError as error:
        assert source is not None
        message = f"{where}: {source.place(error.row)}, {error.message}"
        if error.first is not None:
            message += f", first in {source.place(error.first)}"
        raise InputError(message, hint=error.hint) from error


def _read(source: GivenTable, time: list[str], options: TableOptions) -> TimeTable:
    """Return the table of a source: what its columns are, their numbers, and their grid."""
    found = find_columns(source, time, options)
    missing: Counter[str] = Counter()
    notes = [*source.notes, *found.stamps.notes, *found.notes]
    wide = (_wide if found.series is None else _pivot)(found, options, missing)
    if missing:
        words = ", ".join(short_repr(word) for word, _ in missing.most_common(5))
        notes.append(f"{missing.total():,} cells count as missing: {words}")
    return table_on_grid(wide, found, options, notes)


def _wide(found: TableColumns, options: TableOptions, missing: Counter[str]) -> pd.DataFrame:
    """Return a wide table's numbers, by stamp: of the columns wanted, and those known ahead."""
    import pandas as pd

    _require_once(found.stamps, found.stamps.numbers)
    frame = found.source.frame
    wanted = list(options.columns) or found.values
    chosen = [*wanted, *options.known, *([options.target] if options.target else [])]
    for name in chosen:
        place_among(name, found.values)
    values = {name: numeric_column(frame[name], options.decimal, missing) for name in chosen}
    # Others are looked at because they may be known ahead.
    for name in [] if options.known else found.values:
        if (
            name not in values
            and (column := numeric_column_if_any(frame[name], options.decimal)) is not None
        ):
            values[name] = column
    return pd.DataFrame(values).set_axis(pd.Index(found.stamps.numbers), axis=0)


def _pivot(found: TableColumns, options: TableOptions, missing: Counter[str]) -> pd.DataFrame:
    """Return a long table's numbers with a column for each series that is wanted, by stamp."""
    import pandas as pd

    assert found.series is not None
    value = found.values[0]
    stamps = found.stamps.numbers
    long = numeric_column(found.source.frame[value], options.decimal, missing).to_numpy()
    keys = pd.DataFrame({"series": found.series.to_numpy(object), "stamp": stamps})
    _require_once(found.stamps, keys)
    wide = keys.assign(value=long).pivot(index="stamp", columns="series", values="value")
    names = [str(name) for name in wide.columns]
    places = [place_among(name, names) for name in options.columns]
    return wide.iloc[:, places] if places else wide


def _require_once(stamps: StampColumn, keys: pd.DataFrame | np.ndarray) -> None:
    """Refuse a stamp that is there twice, in one series."""
    import pandas as pd

    keys = pd.DataFrame(keys)
    doubled = keys.duplicated()
    if doubled.any():
        row = int(doubled.argmax())
        same = (keys == keys.iloc[row]).to_numpy().all(axis=1)
        hint = "keep one, or name the column that tells series apart: --id-column"
        if not stamps.counted and stamps.zone is None and (stamps.numbers % 86_400_000_000).any():
            hint += "; an hour that a clock repeats needs its zone (--timezone) or its offset"
        first = int(same.argmax())
        raise TableRowError(row, f"{stamps.words(row)} is there twice", hint=hint, first=first)


def table_on_grid(
    wide: pd.DataFrame,
    found: TableColumns,
    options: TableOptions,
    notes: list[str],
) -> TimeTable:
    """Return a table of numbers by stamp on its grid, without the rows of the future."""
    import pandas as pd

    if not wide.index.is_monotonic_increasing:
        wide = wide.sort_index()
        notes.append("rows were put in the order of their stamps")
    empty = [str(name) for name in wide.columns if not np.isfinite(wide[name]).any()]
    stamps = wide.index.to_numpy(np.int64)
    grid, places = _grid(stamps, found, options, notes)
    if empty:
        notes.append(f"left out, without a single value: {first_few(empty)}")
        wide = wide.drop(columns=empty)
    names = [str(name) for name in wide.columns]
    rows = np.full((len(grid.stamps), len(names)), np.nan)
    rows[places[places >= 0]] = wide.to_numpy(float)[places >= 0]
    infinite = int(np.isinf(rows).sum())
    if infinite:
        notes.append(f"{infinite:,} infinite values count as missing")
    rows[np.isinf(rows)] = np.nan
    steps = places[np.searchsorted(stamps, found.stamps.numbers)]
    series = np.zeros_like(steps)
    if found.series is not None:
        series = pd.Index(names).get_indexer(pd.Index(found.series))
    used = np.flatnonzero((steps >= 0) & (series >= 0))
    cells = GridCells(used, steps[used], series[used])
    if found.series is None:
        future = future_of_columns(rows, names, options, cells)
        rows = rows[: int(future.ends[0])]
    else:
        future = future_of_series(rows, names, found, options, cells)
    notes += future.words(cells)
    if not future.series:
        raise InputError("no series has a single value")
    values = rows[:, [names.index(name) for name in future.series]]
    present = np.zeros(len(rows), bool)
    present[places[(places >= 0) & (places < len(rows))]] = True
    return _table(grid, values, (found, future), present, notes)


def _grid(
    stamps: np.ndarray, found: TableColumns, options: TableOptions, notes: list[str]
) -> tuple[TimeGrid, np.ndarray]:
    """Return the grid of ``stamps`` [rows], and the step [rows] of each, -1 for none."""
    counted = found.stamps.counted or options.consecutive
    if options.consecutive:
        if not found.stamps.counted:
            ends = " to ".join(str(one) for one in stamp_index(stamps[[0, -1]]))
            notes.append(
                f"rows are counted, whatever their distance: {ends} are 1 to {len(stamps):,}"
            )
        stamps = np.arange(1, len(stamps) + 1)
    index = stamp_index(stamps, NumberCalendar() if counted else None)
    grid = fit_grid(index, options.frequency)
    moved = grid.calendar.nearest(stamps)
    on_grid = isin_ascending(moved, grid.numbers)
    notes += moved_rows(index, moved != stamps, ~on_grid, grid.frequency)
    zone = None if counted else found.stamps.zone
    places = np.where(on_grid, np.searchsorted(grid.numbers, moved), -1)
    return replace(grid, zone=zone, own_season=options.own_season), places


def _table(
    grid: TimeGrid,
    values: np.ndarray,
    how: tuple[TableColumns, KnownFuture],
    present: np.ndarray,
    notes: list[str],
) -> TimeTable:
    """Return the table of ``values`` [T + H, D], cut after the last of them."""
    found, future = how
    steps, series = int(ends_of(values).max(initial=0)), tuple(future.series)
    values, present = values[:steps], present[:steps]
    grid = replace(grid, stamps=grid.stamps[:steps])
    columns = future.known.values()
    require_sizes(values, series)
    require_one_frequency(values, series)
    notes += [*empty_steps(grid, present), *table_remarks(values, present, series)]
    return TimeTable(
        grid,
        values,
        series,
        found.names,
        tuple(notes),
        known=np.stack(np.broadcast_arrays(*columns), axis=-1) if columns else np.empty((0, 1, 0)),
        known_names=tuple(future.known),
        long=found.series is not None,
        number_ids=found.number_ids,
    )
