"""Tables of time series: CSV and Parquet files and data frames, wide or long, on one time grid.

Series are refused, or remarked on, by their sizes, frequencies, holes and constants.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError, shorten, shown
from lowtide.core.install_hints import install_extra
from lowtide.media.table_file import RowError, numbers, place_of, read_frame, stamps
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
# What pandas calls a column of a CSV that has no name, such as an index that was written.
_NAMELESS = re.compile(r"Unnamed: \d+")

# Values that are too many to be at every k-th step by chance, and names that a note has.
_FEWEST_EVEN, _MOST_NAMES = 8, 12
# Sizes of values whose squares are numbers.
_LEAST, _GREATEST = 1e-100, 1e100


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

    def without(self, left_out: np.ndarray, reason: str) -> TimeTable:
        """Return the table without the series of a mask [D], and a note that has the reason.

        Raises:
            InputError: No series is left.
        """
        if left_out.all():
            raise InputError(f"no series is left: all are {reason}")
        if not left_out.any():
            return self
        note = f"left out, {reason}: {listed(self.names, left_out)}"
        names = tuple(np.array(self.names, object)[~left_out].tolist())
        values, notes = self.values[:, ~left_out], (*self.notes, note)
        return replace(self, values=values, names=names, notes=notes)


def read_table(
    data: str | Path | pd.DataFrame,
    *,
    columns: tuple[str, ...] = (),
    frequency: str | None = None,
    room: int = sys.maxsize,
) -> TimeTable:
    """Read a table of series.

    Args:
        data: A CSV or Parquet file, or a data frame. Wide: a column of stamps (``date``, ``ds`` or
            the first) and a column for each series. Long: ``unique_id, ds, y`` or ``item_id,
            timestamp, target``.
        columns: Names of the series to read; all by default.
        frequency: pandas' name of the distance of stamps; None finds it.
        room: Bytes of memory that there are for a file's table and what is made of it.

    Raises:
        InputError: The file cannot be read, a cell is no number or no date, stamps are doubled or
            not evenly spaced.
        UsageError: A name in ``columns`` is not in the table, pandas is not installed, or
            ``data`` is of another type.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError("tables need pandas", hint=install_extra("forecast")) from error

    if not isinstance(data, str | Path | pd.DataFrame):
        raise UsageError(
            f"a table is a file or a data frame, not of type {type(data).__name__}",
            hint='pandas.DataFrame({"ds": dates, "y": values})',
        )
    path = None if isinstance(data, pd.DataFrame) else Path(data)
    try:
        frame = _flat(data if isinstance(data, pd.DataFrame) else read_frame(Path(data), room))
        wide, labels, notes = _wide(frame)
        names = list(map(str, wide.columns))
        wide = wide.iloc[:, [_place(name, names) for name in columns]] if columns else wide
        return _on_grid(wide, labels, notes, frequency)
    except InputError as error:
        named = path is not None and error.message.startswith(f"{path}: ")
        message = error.message if named else f"{path or 'the frame'}: {error.message}"
        raise InputError(message, hint=error.hint) from error
    except RowError as error:
        place = place_of(path, error.row)
        message = f"{path or 'the frame'}: {place}, {error.message}"
        if error.first is not None:
            message += f", first in {place_of(path, error.first)}"
        raise InputError(message, hint=error.hint) from error


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame whose columns have names, and an index of stamps or series among them."""
    import pandas as pd

    if isinstance(frame.index, pd.DatetimeIndex | pd.PeriodIndex):
        frame = frame.reset_index(names=str(frame.index.name or "date"))
    elif set(frame.index.names) & {*_STAMPS, *(name for names in _LONG for name in names)}:
        frame = frame.reset_index()
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    doubled = frame.columns[frame.columns.duplicated()]
    if len(doubled):
        raise InputError(f"two columns are called {shown(doubled[0])}")
    return frame.reset_index(drop=True)


def _wide(frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, str, str], list[str]]:
    """Return numbers with stamps as index, the names of a long frame's columns, and notes."""
    names = [str(name) for name in frame]
    for labels in _LONG:
        if set(labels) <= set(names):
            wide, notes = _pivot(frame, labels)
            others = [name for name in names if name not in labels]
            unused = [f"columns of a long table that are not used: {few(others)}"] if others else []
            return wide, labels, [*notes, *unused]
    if len(names) < 2:
        raise InputError(
            "a table has a column of dates and at least one of numbers",
            hint="separate columns by commas, semicolons or tabs",
        )
    import pandas as pd

    stamp = next((name for name in names if name.lower() in _STAMPS), names[0])
    if re.match(r"\d{1,4}[-/.]\d", stamp):
        raise InputError(f"there is no header: {shown(stamp)} is no name of a column of dates")
    found, notes = stamps(frame[stamp])
    _require_once(found.to_frame(), found)
    nameless = [name for name in names if name != stamp and _NAMELESS.fullmatch(name)]
    if nameless:
        places = few([str(names.index(name)) for name in nameless])
        notes.append(f"left out, columns without a name, counted from 0: {places}")
    values = {name: numbers(frame[name]) for name in names if name not in (stamp, *nameless)}
    if not values:
        raise InputError("no column but that of dates has a name")
    return pd.DataFrame(values).set_axis(pd.DatetimeIndex(found), axis=0), _LONG[0], notes


def _pivot(frame: pd.DataFrame, labels: tuple[str, str, str]) -> tuple[pd.DataFrame, list[str]]:
    """Return a long frame with a column for each series, and notes."""
    series, stamp, value = labels
    nameless = frame[series].isna()
    if nameless.any():
        raise RowError(int(nameless.argmax()), f"column {shown(series)} is empty")
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
        raise UsageError(f"there is no series {shown(name)}", hint=f"there are: {few(names)}")
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
        notes.append(f"left out, without a single value: {few(empty)}")
        wide = wide.drop(columns=empty)
    if wide.shape[1] == 0:
        raise InputError("no series has a single value")
    values, names = wide.reindex(grid.stamps).to_numpy(float), tuple(map(str, wide.columns))
    present = grid.stamps.isin(wide.index)
    infinite = int(np.isinf(values).sum())
    if infinite:
        notes.append(f"{infinite:,} infinite values count as missing")
    values = np.where(np.isfinite(values), values, np.nan)
    require_sizes(values, names)
    require_one_frequency(values, names)
    return TimeTable(grid, values, names, labels, (*notes, *remarks(values, present, names)))


def require_sizes(values: np.ndarray, names: tuple[str, ...]) -> None:
    """Refuse a series whose squares would be infinite or nothing."""
    peaks = np.nanmax(np.abs(values), axis=0)
    wrong = (peaks > _GREATEST) | ((peaks < _LEAST) & (peaks > 0))
    if wrong.any():
        place = int(wrong.argmax())
        raise InputError(
            f"series {shown(names[place])} has values up to {peaks[place]:.3g}, which cannot be"
            " squared",
            hint="use another unit",
        )


def require_one_frequency(values: np.ndarray, names: tuple[str, ...]) -> None:
    """Refuse a series that has a value at every k-th step alone."""
    for name, column in zip(names, values.T, strict=True):
        places = np.flatnonzero(np.isfinite(column))
        distance = int(np.gcd.reduce(np.diff(places))) if len(places) >= _FEWEST_EVEN else 1
        if distance > 1:
            raise InputError(
                f"series {shown(name)} has a value only once in {distance:,} steps of the others",
                hint="resample all series to one distance, or forecast them one by one",
            )


def remarks(values: np.ndarray, present: np.ndarray, names: tuple[str, ...]) -> list[str]:
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
            notes.append(f"{len(ragged):,} series {words}, in steps: {few(ragged)}")
    constant = np.nanmax(values, axis=0) == np.nanmin(values, axis=0)
    if constant.any():
        notes.append(f"a single value throughout: {listed(names, constant)}")
    return notes


def listed(names: Sequence[str], chosen: np.ndarray) -> str:
    """Return the names that a mask [D] has chosen, of many the first."""
    return few([names[one] for one in np.flatnonzero(chosen).tolist()])


def few(words: Sequence[str]) -> str:
    """Return the first of many words, and how many there are besides."""
    more = len(words) - _MOST_NAMES
    return ", ".join(map(shorten, words[:_MOST_NAMES])) + (
        f" and {more:,} more" if more > 0 else ""
    )
