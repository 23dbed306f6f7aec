"""Numbers of tables on their time grid: rows in order, what is left out, and the future apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError
from lowtide.media.calendars import Counted, among
from lowtide.media.table_columns import Columns
from lowtide.media.table_future import Cells, Future, future_of_columns, future_of_series
from lowtide.media.table_options import TableOptions
from lowtide.media.table_remarks import (
    empty_steps,
    moved_rows,
    remarks,
    require_one_frequency,
    require_sizes,
)
from lowtide.media.table_words import few
from lowtide.media.time_grid import TimeGrid, fit_grid, index_of
from lowtide.media.time_table import TimeTable, ends_of

if TYPE_CHECKING:
    import pandas as pd


def table_on_grid(
    wide: pd.DataFrame,
    found: Columns,
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
        notes.append(f"left out, without a single value: {few(empty)}")
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
    cells = Cells(used, steps[used], series[used])
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


def _table(
    grid: TimeGrid,
    values: np.ndarray,
    how: tuple[Columns, Future],
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
    notes += [*empty_steps(grid, present), *remarks(values, present, series)]
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
