"""Rows of the future in tables, and columns that are known ahead: holidays, prices, plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.errors import short_repr, shorten_middle
from lowtide.media.table_columns import TableColumns
from lowtide.media.table_numbers import numeric_column, numeric_column_if_any
from lowtide.media.table_options import TableOptions
from lowtide.media.table_words import TableRowError, first_few
from lowtide.media.time_table import ends_of, place_among

# Names of what is forecast, beside which columns that go on are known ahead.
_FORECAST = ("y", "target", "value", "sales", "demand", "load")
_MOST_OF_SWITCH = 2


@dataclass(frozen=True)
class GridCells:
    """Where n rows of a table are on its grid: their numbers, steps and places of series, [n]."""

    rows: np.ndarray
    steps: np.ndarray
    series: np.ndarray


@dataclass(frozen=True)
class KnownFuture:
    """What of a table is known ahead.

    Attributes:
        series: Names of the series.
        known: Columns by name, [T, D], or [T, 1] if all series have the same.
        ends: Steps [D] that the futures of the series begin at.
        notes: Sentences on the columns.
    """

    series: list[str]
    known: dict[str, np.ndarray]
    ends: np.ndarray
    notes: tuple[str, ...] = ()

    def words(self, cells: GridCells) -> list[str]:
        """Return notes on the rows of the future, and what is known of them."""
        later = int((cells.steps >= self.ends[cells.series]).sum())
        found = [f"{later:,} rows after the last value are the future"] if later else []
        return (
            found
            + [*self.notes]
            + [f"known ahead: {first_few(list(self.known))}"] * bool(self.known)
        )


def future_of_columns(
    values: np.ndarray, names: list[str], options: TableOptions, cells: GridCells
) -> KnownFuture:
    """Return the future of a wide table, whose columns are series or known ahead.

    Args:
        values: Columns of numbers [T, columns] on the table's grid, NaN where there is none.
        names: Their names.
        options: What is asked for; columns that are complete beside it go on where it ends.
        cells: Where rows are, all of one series.

    Raises:
        RowError: A column that is said to be known ahead lacks a value.
    """
    columns = {name: values[:, place, None] for place, name in enumerate(names)}
    # Of all that a model is of, the target alone says where the future begins.
    asked = [options.target] if options.target else list(options.columns)
    asked = [name for name in asked if name in names]
    ends, known, notes = dict(zip(names, ends_of(values), strict=True)), {}, ()
    if options.known:
        known = complete_columns({name: columns[name] for name in options.known}, cells, asked=True)
    elif not asked:
        known, notes = _by_content(complete_columns(columns, cells), ends, len(values))
    elif max(ends[name] for name in asked) < len(values):
        known = complete_columns({one: columns[one] for one in names if one not in asked}, cells)
    used = {*options.columns, options.target} if options.columns else {*names}
    series = [name for name in names if name in used and name not in known]
    last = max((ends[name] for name in (asked or series) if name not in known), default=0)
    return KnownFuture(series, known, np.array([last]), notes)


def _by_content(
    whole: dict[str, np.ndarray], ends: Mapping[str, int], rows: int
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return what is known ahead where nothing is asked for, and notes.

    Columns that all end together, beside others without a hole, leave rows of the future: where the
    others are switches, such as holidays, or those that end have names of what is forecast.
    """
    early = {name: end for name, end in ends.items() if name not in whole}
    last = max(early.values(), default=0)
    together = set(early.values()) == {last} and rows / 2 <= last < rows
    if not whole or not together:
        return {}, ()
    switches = all(
        len(np.unique(one[np.isfinite(one)])) <= _MOST_OF_SWITCH for one in whole.values()
    )
    if switches or all(name.lower() in _FORECAST for name in early):
        return whole, ()
    return {}, (
        f"some go on after the others; if known ahead: --known {shorten_middle(','.join(whole))}",
    )


def future_of_series(
    values: np.ndarray,
    names: Sequence[str],
    found: TableColumns,
    options: TableOptions,
    cells: GridCells,
) -> KnownFuture:
    """Return the future of a long table, whose series have their own values of other columns.

    Columns that have a number in each row are known, if series have rows after their last value.
    Arguments and errors as of `future_of_columns`.
    """
    ends = ends_of(values)
    for name in options.known:
        place_among(name, found.unused, "column")
    columns = {}
    for name in options.known or (
        found.unused if (cells.steps >= ends[cells.series]).any() else ()
    ):
        column, decimal = found.source.frame[name], options.decimal
        cell = (
            numeric_column(column, decimal)
            if options.known
            else numeric_column_if_any(column, decimal)
        )
        if cell is not None:
            columns[name] = np.full(values.shape, np.nan)
            columns[name][cells.steps, cells.series] = cell.to_numpy()[cells.rows]
            low, high = np.fmin.reduce(columns[name], 1), np.fmax.reduce(columns[name], 1)
            columns[name] = columns[name] if (low < high).any() else low[:, None]
    known = complete_columns(columns, cells, asked=bool(options.known))
    unused = [
        f"{name} (empty in {_missing(columns[name], cells).sum():,} rows)"
        if name in columns
        else name
        for name in found.unused
        if name not in known
    ]
    notes = [f"columns of a long table that are not used: {first_few(unused)}"] if unused else []
    return KnownFuture(list(names), known, ends, tuple(notes))


def complete_columns(
    columns: Mapping[str, np.ndarray], cells: GridCells, *, asked: bool = False
) -> dict[str, np.ndarray]:
    """Return those of ``columns`` that have a value in each row; ``asked`` refuses the others."""
    found = {}
    for name, column in columns.items():
        missing = _missing(column, cells)
        if not missing.any():
            found[name] = column
        elif asked:
            row, what = (
                int(cells.rows[missing.argmax()]),
                f"column {short_repr(name)}, which is known",
            )
            hint = "fill it, or leave it out of --known"
            raise TableRowError(row, f"{what} ahead, has no value", hint=hint)
    return found


def _missing(column: np.ndarray, cells: GridCells) -> np.ndarray:
    return ~np.isfinite(column[cells.steps, cells.series % column.shape[1]])
