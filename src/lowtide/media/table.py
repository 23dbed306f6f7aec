"""Tables of time series: files and data frames, wide or long, on one time grid."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError, shown
from lowtide.core.install_hints import install_extra
from lowtide.media.calendars import Counted
from lowtide.media.table_columns import LONG, STAMPS, Columns, few, find_columns
from lowtide.media.table_dates import Stamps
from lowtide.media.table_file import TableSource, read_source
from lowtide.media.table_future import ends_of, find_future, find_shared
from lowtide.media.table_numbers import is_number_like, numbers
from lowtide.media.table_options import TableOptions
from lowtide.media.table_remarks import (
    empty_steps,
    listed,
    moved_rows,
    remarks,
    require_one_frequency,
    require_sizes,
)
from lowtide.media.table_rows import RowError
from lowtide.media.time_grid import TimeGrid, fit_grid, index_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TimeTable:
    """Several series on one time grid.

    Attributes:
        grid: Stamps [T], until the last value of any series.
        values: Values [T, D] in their own units, NaN where there is none.
        names: Names [D] of the series.
        columns: Names of the columns of series, stamp and value in a long frame.
        notes: Sentences on what was read, repaired or left out.
        known: Values [T + H, K] of columns that are known H steps ahead of the last value.
        known_names: Names [K] of those.
        long: Whether the values are one column of a long table.
        number_ids: Whether results have the names of series as whole numbers.
    """

    grid: TimeGrid
    values: np.ndarray
    names: tuple[str, ...]
    columns: tuple[str, str, str] = LONG[0]
    notes: tuple[str, ...] = ()
    known: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    known_names: tuple[str, ...] = ()
    long: bool = False
    number_ids: bool = False

    @property
    def ends(self) -> np.ndarray:
        """Step [D] after the last value of each series, where its forecast begins."""
        return ends_of(self.values)

    def index(self, name: str) -> int:
        """Return the place of a series among the names.

        Raises:
            UsageError: There is no series of this name.
        """
        return _place(name, self.names)

    def place_of_target(self, target: str | None) -> int | None:
        """Return the place of the one series that is wanted; None for all.

        In a long table the name of the column of values means all; raises as `index`.
        """
        if target is None or (self.long and target == self.columns[2] and target not in self.names):
            return None
        return self.index(target)

    def ahead(self, steps: int) -> list[pd.Index]:
        """Return the stamps of ``steps`` [D] after the last value of each series."""
        made = {end: self.grid.after(steps, end) for end in set(self.ends.tolist())}
        return [made[end] for end in self.ends.tolist()]

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
    options: TableOptions | None = None,
    *,
    room: int = sys.maxsize,
) -> TimeTable:
    """Read a table of series.

    Args:
        data: A file of CSV, Excel or Parquet, ``-`` for standard input, or a data frame. Wide: a
            column of stamps (``date``, ``ds`` or the first) and a column for each series. Long: a
            column of names of series besides, and one of values.
        options: How it is read where it does not say so itself.
        room: Bytes of memory that there are for a file's table and what is made of it.

    Raises:
        InputError: The file cannot be read, a cell is no number or no date, stamps are doubled or
            not evenly spaced.
        UsageError: A name in the options is not in the table, a package is not installed, or
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
    options = TableOptions() if options is None else options
    where = "the frame" if isinstance(data, pd.DataFrame) else str(Path(data))
    source = None
    try:
        if isinstance(data, pd.DataFrame):
            source = TableSource.of_frame(_flat(data))
        else:
            source = read_source(Path(data), room, options.decimal)
        return _read(source, options)
    except InputError as error:
        named = error.message.startswith(f"{where}: ")
        message = error.message if named else f"{where}: {error.message}"
        raise InputError(message, hint=error.hint) from error
    except RowError as error:
        assert source is not None
        message = f"{where}: {source.place(error.row)}, {error.message}"
        if error.first is not None:
            message += f", first in {source.place(error.first)}"
        raise InputError(message, hint=error.hint) from error


def _flat(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame whose columns have names, and an index of stamps or series among them."""
    import pandas as pd

    usual = {*STAMPS, *(name for names in LONG for name in names)}
    # Of an index that is a column too, the column counts.
    both = {str(name) for name in frame.index.names} & {str(name) for name in frame.columns}
    if isinstance(frame.index, pd.DatetimeIndex | pd.PeriodIndex):
        name = str(frame.index.name or "date")
        frame = frame.reset_index(names=name, drop=name in map(str, frame.columns))
    elif both:
        frame = frame.reset_index(drop=True)
    elif any(str(name).lower() in usual for name in frame.index.names):
        frame = frame.reset_index()
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    doubled = frame.columns[frame.columns.duplicated()]
    if len(doubled):
        raise InputError(f"two columns are called {shown(doubled[0])}")
    return frame.reset_index(drop=True)


def _read(source: TableSource, options: TableOptions) -> TimeTable:
    """Return the table of a source: what its columns are, their numbers, and their grid."""
    if not len(source.frame):
        raise InputError("0 rows are too few for a forecast", hint="give rows below the header")
    found = find_columns(source, options)
    missing: Counter[str] = Counter()
    notes = [*source.notes, *found.stamps.notes, *found.notes]
    wide = (_wide if found.series is None else _pivot)(source, found, options, missing)
    if missing:
        words = ", ".join(shown(word) for word, _ in missing.most_common(5))
        notes.append(f"{missing.total():,} cells count as missing: {words}")
    return _on_grid(wide, source, found, options, notes)


def _wide(
    source: TableSource, found: Columns, options: TableOptions, missing: Counter[str]
) -> pd.DataFrame:
    """Return a wide table's numbers, by stamp: of the columns wanted, and those known ahead."""
    import pandas as pd

    _require_once(found.stamps, found.stamps.numbers)
    frame = source.frame
    wanted = list(options.columns) or found.values
    chosen = [*wanted, *options.known, *([options.target] if options.target else [])]
    chosen = list(dict.fromkeys(chosen))
    for name in chosen:
        _place(name, found.values)
    # Others are looked at because they may be known ahead.
    others = [] if options.known else [name for name in found.values if name not in chosen]
    values = {name: numbers(frame[name], options.decimal, missing) for name in chosen}
    for name in others:
        if is_number_like(frame[name]):
            try:
                values[name] = numbers(frame[name], options.decimal)
            except RowError:
                continue
    return pd.DataFrame(values).set_axis(pd.Index(found.stamps.numbers), axis=0)


def _pivot(
    source: TableSource, found: Columns, options: TableOptions, missing: Counter[str]
) -> pd.DataFrame:
    """Return a long table's numbers with a column for each series, by stamp."""
    import pandas as pd

    assert found.series is not None
    value = found.values[0]
    stamps = found.stamps.numbers
    long = numbers(source.frame[value], options.decimal, missing).to_numpy()
    keys = pd.DataFrame({"series": found.series.to_numpy(object), "stamp": stamps})
    _require_once(found.stamps, keys)
    return keys.assign(value=long).pivot(index="stamp", columns="series", values="value")


def _require_once(stamps: Stamps, keys: pd.DataFrame | np.ndarray) -> None:
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
        raise RowError(row, f"{stamps.words(row)} is there twice", hint=hint, first=first)


def _place(name: str, names: Sequence[str]) -> int:
    """Return the place of a series among ``names``."""
    if name not in names:
        raise UsageError(f"there is no series {shown(name)}", hint=f"there are: {few(names)}")
    return list(names).index(name)


def _on_grid(
    wide: pd.DataFrame,
    source: TableSource,
    found: Columns,
    options: TableOptions,
    notes: list[str],
) -> TimeTable:
    """Return a table of numbers by stamp on its grid, without the rows of the future."""
    if not wide.index.is_monotonic_increasing:
        wide = wide.sort_index()
        notes.append("rows were put in the order of their stamps")
    stamps = given = wide.index.to_numpy(np.int64)
    if options.consecutive:
        if not found.stamps.counted:
            ends = " to ".join(str(one) for one in index_of(stamps[[0, -1]])) if len(stamps) else ""
            notes.append(
                f"rows are counted, whatever their distance: {ends} are 1 to {len(stamps)}"
            )
        stamps = np.arange(1, len(stamps) + 1)
        wide = wide.set_axis(stamps, axis=0)
    counted = found.stamps.counted or options.consecutive
    index = index_of(stamps, Counted() if counted else None)
    grid = fit_grid(index, options.frequency)
    grid = replace(grid, zone=None if counted else found.stamps.zone, own_season=options.own_season)
    empty = [str(name) for name in wide.columns if not np.isfinite(wide[name]).any()]
    if empty:
        notes.append(f"left out, without a single value: {few(empty)}")
        wide = wide.drop(columns=empty)
    names = [str(name) for name in wide.columns]
    rows = np.full((len(grid.stamps), len(names)), np.nan)
    moved = grid.calendar.nearest(stamps)
    kept = np.isin(moved, grid.numbers)
    notes += moved_rows(index, moved != stamps, ~kept, grid.frequency)
    places = np.searchsorted(grid.numbers, moved[kept])
    rows[places] = wide.to_numpy(float)[kept]
    present = np.isin(np.arange(len(rows)), places)
    infinite = int(np.isinf(rows).sum())
    if infinite:
        notes.append(f"{infinite:,} infinite values count as missing")
    rows[np.isinf(rows)] = np.nan
    if found.series is None:
        values, known = _ahead(rows, names, options, notes)
    else:
        steps = dict(zip(given[kept].tolist(), places.tolist(), strict=True))
        values, known = rows, _ahead_of_all(rows, source, (found, options), steps, notes)
    kept_names = [name for name in names if name not in known] if found.series is None else names
    if found.series is None and options.columns:
        used = {*options.columns, options.target}
        kept_names = [name for name in kept_names if name in used]
    if not kept_names:
        raise InputError("no series has a single value")
    values = values[:, [names.index(name) for name in kept_names]]
    return _table(grid, values, kept_names, (found, known), present, notes)


def _ahead(
    rows: np.ndarray, names: list[str], options: TableOptions, notes: list[str]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the rows of a wide table until its last value, and the columns known ahead."""
    # Of all that a model is of, the target alone says where the future begins.
    asked = [options.target] if options.target else list(options.columns)
    future = find_future(rows, names, [name for name in asked if name in names], options.known)
    notes += future.notes
    return rows[: future.steps], {names[place]: rows[:, place] for place in future.known}


def _ahead_of_all(
    rows: np.ndarray,
    source: TableSource,
    how: tuple[Columns, TableOptions],
    steps: dict[int, int],
    notes: list[str],
) -> dict[str, np.ndarray]:
    """Return the columns of a long table that are known ahead for all series alike.

    ``steps`` has the step of each stamp.
    """
    found, options = how
    last = int(ends_of(rows).max(initial=0))
    for name in options.known:
        _place(name, found.unused)
    looked_at = list(options.known)
    if len(rows) > last:
        notes.append(f"{len(rows) - last:,} rows after the last value are the future")
        of_numbers = [name for name in found.unused if is_number_like(source.frame[name])]
        looked_at = looked_at or of_numbers
    places = np.array([steps.get(stamp, 0) for stamp in found.stamps.numbers.tolist()])
    columns = {
        name: (places, numbers(source.frame[name], options.decimal).to_numpy())
        for name in looked_at
    }
    known, said = find_shared(columns, len(rows))
    unused = [name for name in found.unused if name not in looked_at]
    if unused:
        notes.append(f"columns of a long table that are not used: {few(unused)}")
    notes += said
    return known


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
        known=np.stack(list(known.values()), axis=1) if known else np.empty((steps, 0)),
        known_names=tuple(known),
        long=found.series is not None,
        number_ids=found.number_ids,
    )
