"""Rows at the edges of tables that are none of it: units, totals, footnotes, empty rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError
from lowtide.media.date_forms import month_of_name
from lowtide.media.table_dates import read_stamps
from lowtide.media.table_file import TableSource
from lowtide.media.table_numbers import is_number, is_text
from lowtide.media.table_options import TableOptions
from lowtide.media.table_words import RowError, few

if TYPE_CHECKING:
    import pandas as pd

_WORD = re.compile(r"[^\W\d_]{3,}")
_FEWEST_ROWS = 2


def without_others(source: TableSource, time: str, options: TableOptions) -> TableSource:
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
                notes.append(f"left out {side} date, from {source.place(part[0])}: {few(words)}")
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
    except RowError:
        pass
    foreign = any(not month_of_name(word.lower()) for word in _WORD.findall(text))
    return not foreign and any(map(is_number, row.drop(time)))
