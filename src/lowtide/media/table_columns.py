"""What the columns and edges of a table are: dates, names of series, values, and what is left out.

Columns go by their names where those are usual, and by their content where one reading alone
works: dates that are there twice are of several series, whose names make each of them unique.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, short_repr
from lowtide.media.date_forms import month_of_name
from lowtide.media.series_columns import LONG, is_nameless, series_columns, value_column
from lowtide.media.table_dates import StampColumn, read_stamps, reads_as_stamps
from lowtide.media.table_file import GivenTable
from lowtide.media.table_numbers import NUMERIC, is_number, is_number_like, is_text
from lowtide.media.table_options import TableOptions, split_names
from lowtide.media.table_words import STAMPS, TableRowError, first_few
from lowtide.media.time_table import place_among

if TYPE_CHECKING:
    import pandas as pd


# Columns that are a date or a time together.
_PARTS = (("month", "quarter", "week"), ("day",), ("hour", "time"))
_STEP = "step"

_WORD = re.compile(r"[^\W\d_]{3,}")
_FEWEST_ROWS = 2


@dataclass(frozen=True)
class TableColumns:
    """What a table's columns are.

    Attributes:
        source: The table, without rows that are none of it.
        stamps: The stamps of its rows.
        names: Names of the columns of series, stamp and value that results have.
        series: Names of the rows' series as text, in a long table; None in a wide one.
        values: Names of the columns of values: one in a long table.
        notes: Sentences on what was read and left out.
        unused: Names of columns that a long table has besides.
        number_ids: Whether names of series are whole numbers in a data frame.
    """

    source: GivenTable
    stamps: StampColumn
    names: tuple[str, str, str]
    series: pd.Series | None
    values: list[str]
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    number_ids: bool = False


def find_columns(source: GivenTable, time: Sequence[str], options: TableOptions) -> TableColumns:
    """Return what the columns of a table are, of which ``time`` has the stamps.

    Raises:
        InputError: No reading works, or several do.
        RowError: A row cannot be used.
        UsageError: A column that an option names is not there.
    """
    names = [str(name) for name in source.frame]
    usual = _usual(names, options)
    stamps, name = _stamps_of(source, time, options)
    rest = [one for one in names if one not in time]
    ids = split_names(options.id_column) or ([usual[0]] if usual else [])
    for one in ids:
        place_among(one, names, "column")
    if not ids:
        ids = series_columns(source, stamps, rest, options)
    if not ids:
        return _wide(source, stamps, name, rest, options)
    others = [one for one in rest if one not in ids]
    value = usual[2] if usual else value_column(source.frame, stamps, others, options)
    return _long(source, stamps, (ids, name, value), rest)


def _usual(names: list[str], options: TableOptions) -> tuple[str, str, str] | None:
    """Return the columns of a long table by their usual names, whatever their case."""
    if options.time_column or options.id_column:
        return None
    lower = {name.lower(): name for name in reversed(names)}
    for labels in LONG:
        if set(labels) <= set(lower):
            series, stamp, value = (lower[label] for label in labels)
            wanted = options.target
            return series, stamp, wanted if wanted in names and wanted is not None else value
    return None


def time_columns(source: GivenTable, options: TableOptions) -> list[str]:
    """Return the columns that have the stamps: by option, by name, else the first with dates.

    None has them where rows are counted and all columns are of numbers; raises as `find_columns`.
    """
    names = [str(name) for name in source.frame]
    usual = _usual(names, options)
    if len(names) < 2 and not (options.consecutive and names):
        raise InputError(
            "a table has a column of dates and at least one of numbers",
            hint="separate columns by commas, semicolons or tabs",
        )
    if wanted := split_names(options.time_column):
        for one in wanted:
            place_among(one, names, "column")
        return wanted
    if usual is not None:
        return [usual[1]]
    ids = split_names(options.id_column)
    by_name = [name for name in names if name.lower().strip() in STAMPS and name not in ids]
    # Names are as usual in the order of the list: the first column with one of them.
    chosen = by_name[0] if by_name else None
    if chosen is None:
        chosen = _dates_by_content(source, [name for name in names if name not in ids], options)
    if chosen is None:
        return []
    return [chosen, *_parts_of(source.frame, chosen, names)]


def _dates_by_content(source: GivenTable, names: list[str], options: TableOptions) -> str | None:
    """Return the first column, or where it has no dates the only one that has."""
    first = names[0]
    if re.match(r"\d{1,4}[-/.]\d", first):
        raise InputError(f"there is no header: {short_repr(first)} is no name of a column of dates")

    def has_dates(name: str) -> bool:
        part = rows_with_dates(source, name, options)
        return reads_as_stamps(part.text([name])[name], options)

    if has_dates(first):
        return first
    with_dates = [
        name
        for name in names[1:]
        if source.frame[name].dtype.kind not in NUMERIC and has_dates(name)
    ]
    if len(with_dates) > 1:
        raise InputError(
            f"several columns are of dates: {first_few(with_dates)}",
            hint=f"--time-column {with_dates[0]}",
        )
    if with_dates:
        return with_dates[0]
    return None if options.consecutive and is_number_like(source.frame[first]) else first


def _parts_of(frame: pd.DataFrame, time: str, names: list[str]) -> list[str]:
    """Return the columns that a date goes on in: the month of a year, the hour of a day."""
    lower = {name.lower().strip(): name for name in reversed(names) if name != time}
    kind = time.lower().strip()
    if not frame[time].duplicated().any():
        return []
    parts = []
    if kind in ("year", "jahr"):
        parts = [next((lower[one] for one in group if one in lower), None) for group in _PARTS]
        parts = parts if parts[0] else []
    elif kind in ("date", "day", "datum"):
        parts = [next((lower[one] for one in _PARTS[2] if one in lower), None)]
    return [part for part in parts if part]


def _stamps_of(
    source: GivenTable, time: Sequence[str], options: TableOptions
) -> tuple[StampColumn, str]:
    """Return the stamps of the rows, and the name of their column."""
    import pandas as pd

    if not time:
        return StampColumn(np.arange(1, len(source.frame) + 1), counted=True), _STEP
    written = source.text(time)
    if len(time) == 1:
        column = written[time[0]]
        try:
            return read_stamps(column, options), time[0]
        except (TableRowError, InputError):
            if not options.consecutive:
                raise
            return StampColumn(np.arange(1, len(column) + 1), counted=True), time[0]
    joined = written[time[0]].astype(str).str.replace(r"\.0+$", "", regex=True).str.strip()
    for name in time[1:]:
        part = written[name].astype(str).str.strip().str.replace(r"\.0+$", "", regex=True)
        kind = name.lower().strip()
        if kind == "quarter":
            joined = joined + "Q" + part.str.replace(r"\D", "", regex=True)
        elif kind == "week":
            joined = joined + "-W" + part.str.zfill(2)
        elif kind in _PARTS[2] or part.str.contains(":").any():
            joined = joined + " " + part.where(part.str.contains(":"), part.str.zfill(2) + ":00")
        else:
            joined = joined + "-" + part.str.zfill(2)
    name = "date" if time[0].lower() not in STAMPS[:5] else time[0]
    stamps = read_stamps(pd.Series(joined, name=" ".join(time)), options)
    stamps.notes.append(f"dates are columns together: {first_few(time)}")
    return stamps, name


def _long(
    source: GivenTable, stamps: StampColumn, columns: tuple[list[str], str, str], rest: list[str]
) -> TableColumns:
    """Return the columns of a long table, whose names of series are text as it is written."""
    ids, name, value = columns
    written = source.text(ids)
    for one in ids:
        empty = written[one].isna() | (written[one].astype(str).str.strip() == "")
        if empty.any():
            raise TableRowError(int(empty.argmax()), f"column {short_repr(one)} is empty")
    parts = [written[one].astype(str).str.strip() for one in ids]
    series = parts[0]
    for part in parts[1:]:
        series = series + "/" + part
    unused = [one for one in rest if one not in (*ids, value)]
    notes = []
    if (*ids, name, value) not in LONG:
        notes = [f"a long table: series by {first_few(ids)}, dates in {name}, values in {value}"]
    numbered = len(ids) == 1 and written[ids[0]].dtype.kind in "iu"
    names = ("/".join(ids), name, value)
    return TableColumns(source, stamps, names, series, [value], notes, unused, numbered)


def _wide(
    source: GivenTable, stamps: StampColumn, name: str, rest: list[str], options: TableOptions
) -> TableColumns:
    """Return the columns of a wide table: a series each, but for text that is not asked for."""
    frame = source.frame
    asked = [*options.columns, *([options.target] if options.target else []), *options.known]
    notes = []
    nameless = [one for one in rest if is_nameless(one)]
    if nameless:
        places = first_few([str(list(frame).index(one)) for one in nameless])
        notes.append(f"left out, columns without a name, counted from 0: {places}")
    named = [one for one in rest if one not in nameless]
    if not named:
        raise InputError("no column but that of dates has a name")
    text = [one for one in named if one not in asked and not is_number_like(frame[one])]
    # Where nothing else is left, what is wrong with the first is told.
    values = [one for one in named if one not in text] or named[:1]
    left_out = [one for one in text if one not in values]
    if left_out:
        notes.append(f"left out, columns without numbers: {first_few(left_out)}")
    names = LONG[0]
    return TableColumns(source, stamps, (names[0], names[1], names[2]), None, values, notes)


def rows_with_dates(source: GivenTable, time: str, options: TableOptions) -> GivenTable:
    """Return the table of the rows that have a date, and of those that are to be refused.

    The others are empty rows, and above the first date and below the last one rows that cannot have
    one: those without a number, and those with a word for a date that is none of a month. A row in
    the middle stays, as does one with numbers beside a date that is missing or misspelled.

    Args:
        source: The table.
        time: Name of its column of dates.
        options: How dates are read.
    """
    frame = source.frame
    filled = frame[time].notna().to_numpy(copy=True)
    filled[~filled] = frame[~filled].notna().any(axis=1)
    empty = int((~filled).sum())
    notes = [f"left out, empty rows: {empty:,}"] if empty else []
    rows = np.flatnonzero(filled)
    if is_text(frame[time]):

        def outside(places: np.ndarray) -> int:
            """Return how many rows come before the first that belongs to the table."""
            found = (
                one for one, row in enumerate(places) if _belongs(frame.iloc[row], time, options)
            )
            return next(found, len(places))

        first, last = outside(rows), len(rows) - outside(rows[::-1])
        if last - first < _FEWEST_ROWS:
            return source
        for part, side in ((rows[:first], "above the first"), (rows[last:], "below the last")):
            if len(part):
                words = [str(frame.iloc[row].dropna().iloc[0]) for row in part]
                notes.append(
                    f"left out {side} date, from {source.place(part[0])}: {first_few(words)}"
                )
        rows = rows[first:last]
    return source.of_rows(rows, notes) if notes else source


def _belongs(row: pd.Series, time: str, options: TableOptions) -> bool:
    """Return whether a row has a date in the column ``time``, or should have one."""
    import pandas as pd

    cell = row[time]
    text = "" if pd.isna(cell) else str(cell)
    try:
        if text:
            read_stamps(pd.Series([cell]), options)
            return True
    except InputError:
        return True  # of several readings
    except TableRowError:
        pass
    foreign = any(not month_of_name(word.lower()) for word in _WORD.findall(text))
    return not foreign and any(map(is_number, row.drop(time)))
