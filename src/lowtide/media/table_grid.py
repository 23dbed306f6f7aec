"""Numbers of tables on their time grid: rows in order, what is left out, and the future apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, shown
from lowtide.media.calendars import Counted, among
from lowtide.media.table_columns import Columns
from lowtide.media.table_future import column_of_series, ends_of, find_future, known_words
from lowtide.media.table_numbers import is_number_like, numbers
from lowtide.media.table_options import TableOptions
from lowtide.media.table_remarks import (
    empty_steps,
    moved_rows,
    remarks,
    require_one_frequency,
    require_sizes,
)
from lowtide.media.table_rows import RowError
from lowtide.media.table_words import few
from lowtide.media.time_grid import TimeGrid, fit_grid, index_of
from lowtide.media.time_table import TimeTable, place_among

if TYPE_CHECKING:
    import pandas as pd


def table_on_grid(
    wide: pd.DataFrame,
    found: Columns,
    options: TableOptions,
    notes: list[str],
) -> TimeTable:
    """Return a table of numbers by stamp on its grid, without the rows of the future."""
    if not wide.index.is_monotonic_increasing:
        wide = wide.sort_index()
        notes.append("rows were put in the order of their stamps")
    empty = [str(name) for name in wide.columns if not np.isfinite(wide[name]).any()]
    stamps = wide.index.to_numpy(np.int64)
    grid, places = _grid(stamps, found, options, notes)
    if empty:
        notes.append(f"left out, without a single value: {few(empty)}")
        wide = wide.drop(columns=empty)
    names = [str(name) for name in wide.columns]
    rows = np.full((len(grid.stamps), len(names)), np.nan)
    rows[places[places >= 0]] = wide.to_numpy(float)[places >= 0]
    infinite = int(np.isinf(rows).sum())
    if infinite:
        notes.append(f"{infinite:,} infinite values count as missing")
    rows[np.isinf(rows)] = np.nan
    if found.series is None:
        rows, known = _ahead(rows, names, options, notes)
        used = {*options.columns, options.target} if options.columns else set(names)
        series = [name for name in names if name in used and name not in known]
    else:
        row_places = places[np.searchsorted(stamps, found.stamps.numbers)]
        known = _ahead_of_series(rows, names, (found, options), row_places, notes)
        series = names
    if not series:
        raise InputError("no series has a single value")
    values = rows[:, [names.index(name) for name in series]]
    present = np.zeros(len(rows), bool)
    present[places[(places >= 0) & (places < len(rows))]] = True
    return _table(grid, values, series, (found, known), present, notes)


def _grid(
    stamps: np.ndarray, found: Columns, options: TableOptions, notes: list[str]
) -> tuple[TimeGrid, np.ndarray]:
    """Return the grid of ``stamps`` [rows], and the step [rows] of each, -1 for none."""
    counted = found.stamps.counted or options.consecutive
    if options.consecutive:
        if not found.stamps.counted:
            ends = " to ".join(str(one) for one in index_of(stamps[[0, -1]]))
            notes.append(
                f"rows are counted, whatever their distance: {ends} are 1 to {len(stamps):,}"
            )
        stamps = np.arange(1, len(stamps) + 1)
    index = index_of(stamps, Counted() if counted else None)
    grid = fit_grid(index, options.frequency)
    moved = grid.calendar.nearest(stamps)
    on_grid = among(moved, grid.numbers)
    notes += moved_rows(index, moved != stamps, ~on_grid, grid.frequency)
    zone = None if counted else found.stamps.zone
    places = np.where(on_grid, np.searchsorted(grid.numbers, moved), -1)
    return replace(grid, zone=zone, own_season=options.own_season), places


def _ahead(
    rows: np.ndarray, names: list[str], options: TableOptions, notes: list[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the rows of a wide table until its last value, and the columns known ahead."""
    # Of all that a model is of, the target alone says where the future begins.
    asked = [options.target] if options.target else list(options.columns)
    future = find_future(rows, names, [name for name in asked if name in names], options.known)
    notes += future.notes
    return rows[: future.steps], {names[place]: rows[:, place, None] for place in future.known}


def _ahead_of_series(
    rows: np.ndarray,
    names: list[str],
    how: tuple[Columns, TableOptions],
    places: np.ndarray,
    notes: list[str],
) -> dict[str, np.ndarray]:
    """Return the columns of a long table that are known ahead, of each series its own.

    Columns that have a number in each row are, where a series has rows after its last value.

    Args:
        rows: Values of the series on the grid [T, D].
        names: Their names [D].
        how: What its columns are, and how they are read.
        places: Step of each row of the table, -1 for none.
        notes: Sentences, to which those on what was found are added.
    """
    import pandas as pd

    found, options = how
    assert found.series is not None
    series = pd.Index(names).get_indexer(pd.Index(found.series))
    used = np.flatnonzero((places >= 0) & (series >= 0))
    steps, series = places[used], series[used]
    later = int((steps >= ends_of(rows)[series]).sum())
    if later:
        notes.append(f"{later:,} rows after the last value of their series are the future")
    for name in options.known:
        place_among(name, found.unused, "column")
    known: dict[str, np.ndarray] = {}
    unused = {name: name for name in found.unused}
    for name in options.known or (found.unused if later else ()):
        column = _numbers_if_any(found, name, options)
        if column is None:
            continue
        column = column_of_series(column[used], steps, series, rows.shape)
        missing = ~np.isfinite(column[steps, series % column.shape[1]])
        if not missing.any():
            known[unused.pop(name)] = column
            continue
        unused[name] = f"{name} (empty in {missing.sum():,} rows)"
        if options.known:
            raise RowError(
                int(used[missing.argmax()]),
                f"column {shown(name)}, which is known ahead, has no value",
                hint="fill it, or leave it out of --known",
            )
    if unused:
        notes.append(f"columns of a long table that are not used: {few(list(unused.values()))}")
    if known:
        notes.append(known_words(list(known)))
    return known


def _numbers_if_any(found: Columns, name: str, options: TableOptions) -> np.ndarray | None:
    """Return a column [rows] of numbers; None for another that nobody asked for."""
    column, asked = found.source.frame[name], name in options.known
    try:
        if asked or is_number_like(column):
            return numbers(column, options.decimal).to_numpy()
    except RowError:
        if asked:
            raise
    return None


def _table(
    grid: TimeGrid,
    values: np.ndarray,
    names: list[str],
    how: tuple[Columns, dict[str, np.ndarray]],
    present: np.ndarray,
    notes: list[str],
) -> TimeTable:
    """Return the table of ``values`` [T + H, D], cut after the last of them."""
    found, known = how
    steps, series = int(ends_of(values).max(initial=0)), tuple(names)
    values, present = values[:steps], present[:steps]
    grid = replace(grid, stamps=grid.stamps[:steps])
    require_sizes(values, series)
    require_one_frequency(values, series)
    notes += [*empty_steps(grid, present), *remarks(values, present, series)]
    return TimeTable(
        grid,
        values,
        series,
        found.names,
        tuple(notes),
        known=np.stack(np.broadcast_arrays(*known.values()), axis=-1)
        if known
        else np.empty((steps, 1, 0)),
        known_names=tuple(known),
        long=found.series is not None,
        number_ids=found.number_ids,
    )
