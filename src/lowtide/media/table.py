"""Tables of time series: files and data frames, wide or long, on one time grid."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError, shown
from lowtide.core.install_hints import install_extra
from lowtide.media.table_columns import Columns, find_columns, time_columns
from lowtide.media.table_dates import Stamps
from lowtide.media.table_edges import without_others
from lowtide.media.table_file import TableSource, read_source
from lowtide.media.table_frames import TableData, frame_of
from lowtide.media.table_grid import table_on_grid
from lowtide.media.table_numbers import numbers, numbers_if_any
from lowtide.media.table_options import TableOptions
from lowtide.media.table_words import RowError
from lowtide.media.time_table import TimeTable, place_among

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
            source = TableSource.of_frame(frame_of(data, counted=options.consecutive))
        if not len(source.frame):
            raise InputError("0 rows are too few for a forecast", hint="give rows below the header")
        time = time_columns(source, options)
        if time and not options.consecutive:
            source = without_others(source, time[0], options)
        return _read(source, time, options)
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


def _read(source: TableSource, time: list[str], options: TableOptions) -> TimeTable:
    """Return the table of a source: what its columns are, their numbers, and their grid."""
    found = find_columns(source, time, options)
    missing: Counter[str] = Counter()
    notes = [*source.notes, *found.stamps.notes, *found.notes]
    wide = (_wide if found.series is None else _pivot)(found, options, missing)
    if missing:
        words = ", ".join(shown(word) for word, _ in missing.most_common(5))
        notes.append(f"{missing.total():,} cells count as missing: {words}")
    return table_on_grid(wide, found, options, notes)


def _wide(found: Columns, options: TableOptions, missing: Counter[str]) -> pd.DataFrame:
    """Return a wide table's numbers, by stamp: of the columns wanted, and those known ahead."""
    import pandas as pd

    _require_once(found.stamps, found.stamps.numbers)
    frame = found.source.frame
    wanted = list(options.columns) or found.values
    chosen = [*wanted, *options.known, *([options.target] if options.target else [])]
    for name in chosen:
        place_among(name, found.values)
    values = {name: numbers(frame[name], options.decimal, missing) for name in chosen}
    # Others are looked at because they may be known ahead.
    for name in [] if options.known else found.values:
        if (
            name not in values
            and (column := numbers_if_any(frame[name], options.decimal)) is not None
        ):
            values[name] = column
    return pd.DataFrame(values).set_axis(pd.Index(found.stamps.numbers), axis=0)


def _pivot(found: Columns, options: TableOptions, missing: Counter[str]) -> pd.DataFrame:
    """Return a long table's numbers with a column for each series that is wanted, by stamp."""
    import pandas as pd

    assert found.series is not None
    value = found.values[0]
    stamps = found.stamps.numbers
    long = numbers(found.source.frame[value], options.decimal, missing).to_numpy()
    keys = pd.DataFrame({"series": found.series.to_numpy(object), "stamp": stamps})
    _require_once(found.stamps, keys)
    wide = keys.assign(value=long).pivot(index="stamp", columns="series", values="value")
    names = [str(name) for name in wide.columns]
    places = [place_among(name, names) for name in options.columns]
    return wide.iloc[:, places] if places else wide


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
