"""Tables of time series: CSV and Parquet files and data frames, wide or long, on one time grid."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.errors import InputError, UsageError
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
_FIRST_LINE = 2  # in a file with a header, of the first row


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

    name = "the frame" if isinstance(data, pd.DataFrame) else str(data)
    frame = data if isinstance(data, pd.DataFrame) else _read_file(Path(data))
    if isinstance(frame.index, pd.DatetimeIndex):
        frame = frame.reset_index(names=str(frame.index.name or "date"))
    try:
        wide, labels = _wide(frame)
        _require_columns(wide, columns)
        wide = wide[list(columns)] if columns else wide
        return _on_grid(wide, labels, frequency)
    except InputError as error:
        raise InputError(f"{name}: {error.message}", hint=error.hint) from error


def _read_file(path: Path) -> pd.DataFrame:
    import pandas as pd

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            return pd.read_parquet(path)
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline()
        semicolons = header.count(";") > header.count(",")
        style: dict[str, Any] = {"sep": ";", "decimal": ","} if semicolons else {}
        return pd.read_csv(path, encoding="utf-8-sig", **style)
    except (ValueError, OSError, UnicodeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{path}: cannot be read as a table ({reason})") from error


def _wide(frame: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, str, str]]:
    """Return a frame of numbers with stamps as index, and the names of a long frame's columns."""
    for labels in _LONG:
        if set(labels) <= set(frame.columns):
            series, stamp, value = labels
            stamps, values = _stamps(frame[stamp]), _numbers(frame[value])
            long = values.to_frame("value").assign(series=frame[series].astype(str), stamp=stamps)
            doubled = long.duplicated(["series", "stamp"])
            if doubled.any():
                row = int(doubled.argmax())
                raise InputError(f"line {row + _FIRST_LINE}: {stamps.iloc[row]} is there twice")
            return long.pivot(index="stamp", columns="series", values="value"), labels
    if len(frame.columns) < 2:
        raise InputError("a table has a column of dates and at least one of numbers")
    stamp = next((name for name in frame if str(name).lower() in _STAMPS), frame.columns[0])
    numbers = {str(name): _numbers(frame[name]) for name in frame if name != stamp}
    import pandas as pd

    wide = pd.DataFrame(numbers).set_axis(pd.DatetimeIndex(_stamps(frame[stamp])), axis=0)
    return wide, _LONG[0]


def _require_columns(wide: pd.DataFrame, columns: tuple[str, ...]) -> None:
    for name in columns:
        if name not in wide.columns:
            known = ", ".join(map(str, wide.columns[:20]))
            raise UsageError(f"there is no series {name!r}", hint=f"there are: {known}")


def _on_grid(wide: pd.DataFrame, labels: tuple[str, str, str], frequency: str | None) -> TimeTable:
    import pandas as pd

    notes = []
    if not wide.index.is_monotonic_increasing:
        wide = wide.sort_index()
        notes.append("rows were put in the order of their stamps")
    doubled = wide.index.duplicated()
    if doubled.any():
        raise InputError(f"{wide.index[int(doubled.argmax())]} is there twice")
    grid = fit_grid(pd.DatetimeIndex(wide.index), frequency)
    missing = len(grid.stamps) - len(wide)
    if missing:
        notes.append(f"{missing:,} steps without a row count as missing values")
    empty = [str(name) for name in wide.columns if not np.isfinite(wide[name]).any()]
    if empty:
        notes.append(f"left out, without a single value: {', '.join(empty)}")
        wide = wide.drop(columns=empty)
    if wide.shape[1] == 0:
        raise InputError("no series has a single value")
    values = wide.reindex(grid.stamps).to_numpy(float)
    values = np.where(np.isfinite(values), values, np.nan)
    return TimeTable(grid, values, tuple(map(str, wide.columns)), labels, tuple(notes))


def _numbers(column: pd.Series) -> pd.Series:
    """Return a column as float64; empty cells are NaN, and the first that is no number an error."""
    import pandas as pd

    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    wrong = numbers.isna() & column.notna()
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(
            f"line {row + _FIRST_LINE}, column {column.name!r}: {column.iloc[row]!r} is no number",
            hint="leave cells without a value empty",
        )
    return numbers


def _stamps(column: pd.Series) -> pd.Series:
    """Return a column as stamps without a time zone; whole numbers of four digits are years."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column):
        years = column.dropna()
        if len(years) < len(column) or not ((years % 1 == 0) & years.between(1000, 2261)).all():
            raise InputError(f"column {str(column.name)!r} holds numbers where dates are expected")
        column = column.astype(int).astype(str) + "-01-01"
    stamps = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    if stamps.isna().any():
        row = int(stamps.isna().argmax())
        raise InputError(
            f"line {row + _FIRST_LINE}, column {str(column.name)!r}:"
            f" {column.iloc[row]!r} is no date",
            hint="write dates as 2026-01-31 or 2026-01-31 13:00",
        )
    return stamps.dt.tz_localize(None)
