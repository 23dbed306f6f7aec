"""Tables of time series: CSV and Parquet files and data frames, wide or long, on one time grid."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError
from lowtide.media.table_cells import RowError, numbers, stamps
from lowtide.media.table_file import place_of, read_frame
from lowtide.media.time_grid import TimeGrid, fit_grid

if TYPE_CHECKING:
    import pandas as pd

# Long frames: names of the columns of series, stamp and value. Nixtla's, Chronos-2's, ours.
_LONG = (
    ("unique_id", "ds", "y"),
    ("item_id", "timestamp", "target"),
    ("id", "timestamp", "target"),
)
_STAMPS = ("date", "ds", "timestamp", "datetime", "time", "year", "month")
# Values that are too many to be at every k-th step by chance, and names that a note has.
_FEWEST_EVEN, _MOST_NAMES = 8, 12


@dataclass(frozen=True)
class TimeTable:
    """Several series on one time grid.

    Attributes:
        grid: Stamps [T].
        values: Values [T, D] in their own units, NaN where there is none.
        names: Names [D] of the series.
        columns: Names of the columns of series, stamp and value in a long frame.
        notes: Sentences on what was repaired or left out.
    """

    grid: TimeGrid
    values: np.ndarray
    names: tuple[str, ...]
    columns: tuple[str, str, str] = _LONG[0]
    notes: tuple[str, ...] = ()

    def index(self, name: str) -> int:
        """Return the place of a series among the names.

        Raises:
            UsageError: There is no series of this name.
        """
        return _place(name, self.names)

    def only(self, place: int) -> TimeTable:
        """Return the table of one series."""
        part = slice(place, place + 1)
        return replace(self, values=self.values[:, part], names=self.names[part])


def read_table(
    data: str | Path | pd.DataFrame,
    *,
    columns: tuple[str, ...] = (),
    frequency: str | None = None,
) -> TimeTable:
    """Read a table of series.

    Args:
        data: A CSV or Parquet file, or a data frame. Wide: a column of stamps (``date``, ``ds`` or
            the first) and a column for each series. Long: ``unique_id, ds, y`` or ``item_id,
            timestamp, target``.
        columns: Names of the series to read; all by default.
        frequency: pandas' name of the distance of stamps; None finds it.

    Raises:
        InputError: The file cannot be read, a cell is no number or no date, stamps are doubled or
            not evenly spaced.
        UsageError: A name in ``columns`` is not in the table.
    """
    import pandas as pd

    path = None if isinstance(data, pd.DataFrame) else Path(data)
    frame = data if isinstance(data, pd.DataFrame) else read_frame(Path(data))
    if isinstance(frame.index, pd.DatetimeIndex):
        frame = frame.reset_index(names=str(frame.index.name or "date"))
    frame = frame.reset_index(drop=True)
    try:
        if not frame.columns.is_unique:
            raise InputError("two columns have one name")
        wide, labels, notes = _wide(frame)
        names = list(map(str, wide.columns))
        wide = wide.iloc[:, [_place(name, names) for name in columns]] if columns else wide
        return _on_grid(wide, labels, notes, frequency)
    except InputError as error:
        message, hint = error.message, error.hint
        raise InputError(f"{path or 'the frame'}: {message}", hint=hint) from error
    except RowError as error:
        place = place_of(path, error.row)
        message = f"{path or 'the frame'}: {place}, {error.message}"
        if error.first is not None:
            message += f", first in {place_of(path, error.first)}"
        raise InputError(message, hint=error.hint) from error


def _wide(frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, str, str], list[str]]:
    """Return numbers with stamps as index, the names of a long frame's columns, and notes."""
    for labels in _LONG:
        if set(labels) <= set(frame.columns):
            wide, notes = _pivot(frame, labels)
            return wide, labels, notes
    if len(frame.columns) < 2:
        raise InputError("a table has a column of dates and at least one of numbers")
    import pandas as pd

    stamp = next((name for name in frame if str(name).lower() in _STAMPS), frame.columns[0])
    if re.match(r"\d{1,4}[-/.]\d", str(stamp)):
        raise InputError(f"there is no header: {stamp!r} is no name of a column of dates")
    found, notes = stamps(frame[stamp])
    _require_once(found.to_frame(), found)
    values = {str(name): numbers(frame[name]) for name in frame if name != stamp}
    return pd.DataFrame(values).set_axis(pd.DatetimeIndex(found), axis=0), _LONG[0], notes


def _pivot(frame: pd.DataFrame, labels: tuple[str, str, str]) -> tuple[pd.DataFrame, list[str]]:
    """Return a long frame with a column for each series, and notes."""
    series, stamp, value = labels
    nameless = frame[series].isna()
    if nameless.any():
        raise RowError(int(nameless.argmax()), f"column {series!r} is empty")
    found, notes = stamps(frame[stamp])
    long = numbers(frame[value]).to_frame("value")
    long = long.assign(series=frame[series].astype(str), stamp=found)
    _require_once(long[["series", "stamp"]], found)
    return long.pivot(index="stamp", columns="series", values="value"), notes


def _require_once(keys: pd.DataFrame, found: pd.Series) -> None:
    """Refuse a stamp that is there twice, in one series."""
    doubled = keys.duplicated()
    if doubled.any():
        row = int(doubled.argmax())
        same = (keys == keys.iloc[row]).to_numpy().all(axis=1)
        raise RowError(
            row,
            f"{found.iloc[row]} is there twice",
            hint="keep one; an hour that a clock repeats needs its offset: 2026-10-25 02:00+01:00",
            first=int(same.argmax()),
        )


def _place(name: str, names: Sequence[str]) -> int:
    """Return the place of a series among ``names``."""
    if name not in names:
        raise UsageError(f"there is no series {name!r}", hint=f"there are: {', '.join(names[:20])}")
    return names.index(name)


def _on_grid(
    wide: pd.DataFrame, labels: tuple[str, str, str], notes: list[str], frequency: str | None
) -> TimeTable:
    import pandas as pd

    notes = list(notes)
    if not wide.index.is_monotonic_increasing:
        wide = wide.sort_index()
        notes.append("rows were put in the order of their stamps")
    grid = fit_grid(pd.DatetimeIndex(wide.index), frequency)
    missing = len(grid.stamps) - len(wide)
    if missing:
        notes.append(f"{missing:,} steps without a row count as missing values")
    empty = [str(name) for name in wide.columns if not np.isfinite(wide[name]).any()]
    if empty:
        notes.append(f"left out, without a single value: {_few(empty)}")
        wide = wide.drop(columns=empty)
    if wide.shape[1] == 0:
        raise InputError("no series has a single value")
    values, names = wide.reindex(grid.stamps).to_numpy(float), tuple(map(str, wide.columns))
    present = grid.stamps.isin(wide.index)
    infinite = int(np.isinf(values).sum())
    if infinite:
        notes.append(f"{infinite:,} infinite values count as missing")
    values = np.where(np.isfinite(values), values, np.nan)
    _require_one_frequency(values, names)
    return TimeTable(grid, values, names, labels, (*notes, *_remarks(values, present, names)))


def _require_one_frequency(values: np.ndarray, names: tuple[str, ...]) -> None:
    """Refuse a series that has a value at every k-th step alone."""
    for name, column in zip(names, values.T, strict=True):
        places = np.flatnonzero(np.isfinite(column))
        distance = int(np.gcd.reduce(np.diff(places))) if len(places) >= _FEWEST_EVEN else 1
        if distance > 1:
            raise InputError(
                f"series {name!r} has a value only once in {distance:,} steps of the others",
                hint="resample all series to one distance, or forecast them one by one",
            )


def _remarks(values: np.ndarray, present: np.ndarray, names: tuple[str, ...]) -> list[str]:
    """Return notes on holes, ragged ends and constant series.

    Args:
        values: Values [T, D], NaN where there is none; every series has one.
        present: Mask [T] of steps that have a row.
        names: Names [D] of the series.
    """
    known, notes = np.isfinite(values), []
    holes, step = (known.argmax(0), known[::-1].argmax(0)), np.arange(len(values))[:, None]
    between = (step >= holes[0]) & (step < len(values) - holes[1]) & present[:, None]
    inside = int((between & ~known).sum())
    if inside:
        notes.append(f"{inside:,} cells without a value, between others, count as missing")
    for steps, words in zip(holes, ("begin later than the table", "end before it"), strict=True):
        ragged = [f"{names[one]} by {steps[one]:,}" for one in np.flatnonzero(steps)]
        if ragged:
            notes.append(f"{len(ragged):,} series {words}, in steps: {_few(ragged)}")
    constant = np.nanmax(values, axis=0) == np.nanmin(values, axis=0)
    if constant.any():
        same = [names[one] for one in np.flatnonzero(constant)]
        notes.append(f"a single value throughout: {_few(same)}")
    return notes


def _few(words: list[str]) -> str:
    """Return the first of many words, and how many there are besides."""
    more = len(words) - _MOST_NAMES
    return ", ".join(words[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
