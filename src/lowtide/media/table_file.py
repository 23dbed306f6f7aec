"""Files of tables: CSV with commas, semicolons or tabs, Parquet, their rows, and their cells.

Cells are numbers or stamps; of the first that is neither, an error says the row.
"""

from __future__ import annotations

import contextlib
import csv
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.errors import InputError, shown
from lowtide.core.input_file import require_input
from lowtide.core.install_hints import install_extra
from lowtide.core.units import format_bytes
from lowtide.media.time_grid import fit_grid

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
_SEPARATORS = ",;\t"
_DECIMAL_COMMA = r"^\s*([+-]?\d+),(\d+)\s*$"
# Points that may be of thousands, and points that cannot be.
_GROUPS_OF_THREE = r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+$"
_DECIMAL_POINT = r"[+-]?(?:\d*\.(?:\d{1,2}|\d{4,})|(?:0\d*|\d{4,})\.\d{3})$"

_OFFSET = r"\s*(?:Z|[+-]\d{2}(?::?\d{2})?)$"
_WITH_OFFSET = rf"\d:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?{_OFFSET}"
_DAY_AND_MONTH = r"^(\d{1,2})[/.-](\d{1,2})[/.-](\d{4})(?:[ T](\d{1,2}:\d{2}(?::\d{2})?))?$"
_THOUSANDS = r"^\s*[+-]?\d{1,3}(?:[,.' \u00a0\u202f]\d{3})+(?:[.,]\d+)?\s*$"
_WITH_DECIMAL_COMMA = r"^\s*[+-]?\d+,\d+\s*$"
# pandas 2.3 ends the process at exponents of ten digits and more.
HUGE_EXPONENT = r"[eE](?<=[\d.,][eE])[+-]?\d{9}"
# Bytes that a table takes from its file to a forecast: measured were 75 to 212 for each cell of
# Parquet, and 8 to 11 for each byte of a CSV.
_CELL_BYTES, _BYTES_PER_BYTE = 200, 10
# pandas takes a minute to name a hundred thousand columns.
_MOST_NAMELESS = 1000
_WRITE_DATES = "write dates as 2026-01-31 or 2026-01-31 13:00, from 1678 to 2261"


def read_frame(path: Path, room: int = sys.maxsize) -> pd.DataFrame:
    """Return a file as a data frame.

    A CSV with more semicolons than commas in its header has decimal commas.

    Args:
        room: Bytes of memory that there are for the table and what is made of it.

    Raises:
        InputError: The file is not there or no table, or takes more than ``room``.
        RowError: A number may have a decimal point or one of thousands.
    """
    import pandas as pd

    require_input(path)
    if path.suffix.lower() in PARQUET:
        with _reading(path):
            _require_room(path, room, *_parquet_size(path))
        with _reading(path):
            return pd.read_parquet(path)
    size = path.stat().st_size
    _require_room(path, room, f"{size:,} bytes", size * _BYTES_PER_BYTE)
    with _reading(path):
        separator = _separator(path)
        _require_distinct(path, separator)
        _require_exponents(path)
        style: dict[str, Any] = {"decimal": ","} if separator == ";" else {}
        with warnings.catch_warnings():
            # Of rows that are longer than the header, whose last cells would be lost.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                path,
                sep=separator,
                encoding="utf-8-sig",
                index_col=False,
                low_memory=False,
                **style,
            )
    frame.columns = [str(name).strip() for name in frame]
    return _with_decimal_points(frame) if separator == ";" else frame


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Refuse a file that makes a reader fail, by whatever it raises: readers have no one error."""
    try:
        yield
    except (MemoryError, InputError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, KeyError):
            reason = f"without {reason}"
        hint = "save it as CSV in UTF-8" if isinstance(error, UnicodeError) else None
        if isinstance(error, ImportError):
            hint = install_extra("forecast")
        raise InputError(f"{path}: cannot be read as a table ({reason})", hint=hint) from error


def _parquet_size(path: Path) -> tuple[str, int]:
    """Return the rows and columns that a file's footer tells, in words, and the bytes they take."""
    import pyarrow.parquet

    footer = pyarrow.parquet.read_metadata(path)
    rows, columns = footer.num_rows, footer.num_columns
    groups = (footer.row_group(place) for place in range(footer.num_row_groups))
    # Lists have more values than rows.
    values = sum(one.column(place).num_values for one in groups for place in range(columns))
    return f"{rows:,} rows of {columns:,} columns", max(values, rows * columns) * _CELL_BYTES


def _require_room(path: Path, room: int, size: str, needed: int) -> None:
    if needed > room:
        raise InputError(
            f"{path}: {size} take up to {format_bytes(needed)} of memory, and there are"
            f" {format_bytes(room)}",
            hint="give fewer rows or columns, such as the last years or coarser steps",
        )


def place_of(path: Path | None, row: int) -> str:
    """Return where a row, from 0, is: its line in a CSV, its number elsewhere."""
    if path is None or path.suffix.lower() in PARQUET:
        return f"row {row}"
    with _cells_of(path, _separator(path)) as reader:
        last, seen = 0, -1
        for cells in reader:
            # Quoted cells may have several lines, and empty lines are no rows.
            seen += bool(cells)
            if seen > row:
                return f"line {last + 1}"
            last = reader.line_num
    return f"row {row}"


@contextlib.contextmanager
def _cells_of(path: Path, separator: str) -> Iterator[Any]:
    """Read the cells of a CSV, row by row, of any length; the module's limit is put back."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        limit = csv.field_size_limit(2**31 - 1)
        try:
            yield csv.reader(file, delimiter=separator)
        finally:
            csv.field_size_limit(limit)


def _separator(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        header = file.readline()
    return max(_SEPARATORS, key=header.count)


def _require_distinct(path: Path, separator: str) -> None:
    with _cells_of(path, separator) as reader:
        header = next((cells for cells in reader if cells), [])
    names = Counter(name.strip() for name in header)
    twice = [name for name, count in names.items() if count > 1 and name]
    if twice:
        raise ValueError(f"two columns are called {shown(twice[0])}")
    if names[""] > _MOST_NAMELESS:
        raise ValueError(f"{names['']:,} columns have no name")


def _require_exponents(path: Path) -> None:
    """Refuse numbers that end the process when pandas reads them."""
    huge = re.compile(HUGE_EXPONENT.encode())
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if found := huge.search(line):
                raise ValueError(f"line {number}: ...{found[0].decode()}... is out of all bounds")


def _with_decimal_points(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame whose columns of text have points in numbers with decimal commas.

    pandas leaves a column as text where one cell of it has a point or is no number.
    """
    import pandas as pd

    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]
    places = [place for place, skipped in enumerate(numeric) if not skipped]
    texts = [frame.iloc[:, place].astype(str).str.strip() for place in places]
    if not any(text.str.match(_DECIMAL_POINT).any() for text in texts):
        for place, text in zip(places, texts, strict=True):
            _require_no_groups(str(frame.columns[place]), text)
    for place in places:
        column = frame.iloc[:, place].replace(_DECIMAL_COMMA, r"\1.\2", regex=True)
        frame.isetitem(place, column.to_numpy())
    return frame


def _require_no_groups(name: str, text: pd.Series) -> None:
    unclear = text.str.match(_GROUPS_OF_THREE)
    if unclear.any():
        row = int(unclear.argmax())
        raise RowError(
            row,
            f"column {shown(name)}: {shown(text[row])} may have a decimal point or one of"
            " thousands",
            hint="a file with semicolons has decimal commas: write 1234 or 1,234",
        )


class RowError(Exception):
    """A row that cannot be used: its number from 0, what is wrong, and a hint.

    ``first`` is an earlier row that it contradicts.
    """

    def __init__(
        self, row: int, message: str, hint: str | None = None, first: int | None = None
    ) -> None:
        super().__init__(message)
        self.row, self.message, self.hint, self.first = row, message, hint, first


def numbers(column: pd.Series) -> pd.Series:
    """Return a column as float64; an empty cell is NaN, one that is no number an error."""
    import pandas as pd

    name = str(column.name)
    kinds = pd.api.types
    numeric = kinds.is_numeric_dtype(column) and not kinds.is_bool_dtype(column)
    text = kinds.is_object_dtype(column) or kinds.is_string_dtype(column)
    if kinds.is_complex_dtype(column) or not (numeric or text or _categories(column)):
        raise InputError(f"column {shown(name)} holds no numbers, but {column.dtype}")
    if numeric:
        return column.astype(float)
    if text:
        huge = column.astype(str).str.contains(HUGE_EXPONENT)
        if huge.any():
            row = int(huge.argmax())
            raise RowError(
                row, f"column {shown(name)}: {shown(column.iloc[row])} is too large or small"
            )
    found = pd.to_numeric(column, errors="coerce").astype(float)
    wrong = found.isna() & column.notna()
    if not wrong.any():
        return found
    row = int(wrong.argmax())
    cell = column.iloc[row]
    if pd.Series([str(cell)]).str.match(_THOUSANDS).all():
        message = f"column {shown(name)}: {shown(cell)} has a thousands separator"
        raise RowError(row, message, hint="write numbers without: 1234.5")
    if pd.Series([str(cell)]).str.match(_WITH_DECIMAL_COMMA).all():
        message = f"column {shown(name)}: {shown(cell)} has a decimal comma"
        raise RowError(row, message, hint="write 1.5, or separate columns by semicolons")
    message = f"column {shown(name)}: {shown(cell)} is no number"
    raise RowError(row, message, hint="leave cells without a value empty")


def _categories(column: pd.Series) -> bool:
    import pandas as pd

    return isinstance(column.dtype, pd.CategoricalDtype)


def stamps(column: pd.Series) -> tuple[pd.Series, list[str]]:
    """Return a column as stamps without a time zone, and notes on how it was read.

    Whole numbers of four digits are years. Stamps with an offset are converted to UTC, but for
    those that are all midnight where they are, which count as dates. Days and months that could be
    exchanged are distinguished where one reading alone is evenly spaced.
    """
    import pandas as pd

    if isinstance(column.dtype, pd.DatetimeTZDtype):
        utc = column.dt.tz_convert("UTC").dt.tz_localize(None)
        return _without_zone(column, utc, column.dt.tz_localize(None))
    if pd.api.types.is_datetime64_dtype(column):
        found = column.where(column.between(pd.Timestamp.min, pd.Timestamp.max)).dt.as_unit("ns")
        _require_stamps(column, found)
        return found, []
    if pd.api.types.is_numeric_dtype(column):
        return _years(column), []
    text = column.astype(str).str.strip()
    offsets = text.str.contains(_WITH_OFFSET)
    found = pd.to_datetime(text, errors="coerce", format="ISO8601", utc=True)
    found = found.dt.tz_localize(None)
    if found.isna().all() and len(found):
        return _days_and_months(column, text)
    _require_stamps(column, found)
    if not offsets.any():
        return found, []
    if not offsets.all():
        row = int((offsets != offsets.iloc[0]).argmax())
        has = "has an offset" if offsets.iloc[row] else "has no offset"
        raise RowError(row, f"{text.iloc[row]} {has} from UTC, unlike the rows before")
    local = text.str.replace(_OFFSET, "", regex=True)
    return _without_zone(column, found, pd.to_datetime(local, format="ISO8601"))


def _without_zone(
    column: pd.Series, utc: pd.Series, local: pd.Series
) -> tuple[pd.Series, list[str]]:
    _require_stamps(column, utc)
    if (local == local.dt.normalize()).all():
        return local, ["stamps are all midnight at their offset from UTC and count as dates"]
    return utc, ["stamps were converted to UTC, as are the results; hours of the day are UTC's"]


def _years(column: pd.Series) -> pd.Series:
    import pandas as pd

    years = column.dropna()
    if len(years) < len(column) or not ((years % 1 == 0) & years.between(1678, 2261)).all():
        raise InputError(
            f"column {shown(str(column.name))} holds numbers where dates are expected",
            hint=_WRITE_DATES,
        )
    return pd.to_datetime(column.astype(int).astype(str) + "-01-01")


def _days_and_months(column: pd.Series, text: pd.Series) -> tuple[pd.Series, list[str]]:
    """Read 31/1/2026 and 1/31/2026, with points and dashes too, by what is evenly spaced."""
    import pandas as pd

    parts = text.str.extract(_DAY_AND_MONTH)
    _require_stamps(column, parts[2])
    time = " " + parts[3].fillna("00:00").str.zfill(5)
    readings = {}
    for name, (day, month) in {"day/month": (0, 1), "month/day": (1, 0)}.items():
        written = parts[2] + "-" + parts[month].str.zfill(2) + "-" + parts[day].str.zfill(2) + time
        readings[name] = pd.to_datetime(written, errors="coerce", format="ISO8601")
    whole = {name: read for name, read in readings.items() if read.notna().all()}
    if not whole:
        fewest = min(readings.values(), key=lambda read: int(read.isna().sum()))
        _require_stamps(column, fewest)
    even = {name: read for name, read in whole.items() if _evenly_spaced(read)}
    if len(whole) == 2 and len(even) != 1:
        raise InputError(
            f"column {shown(str(column.name))}: {text.iloc[0]} may be of day and month or of month"
            " and day, and its distance to the others does not tell",
            hint=_WRITE_DATES,
        )
    name = next(iter(even or whole))
    return whole[name], [f"dates were read as {name}/year"]


def _evenly_spaced(read: pd.Series) -> bool:
    """Return whether stamps are of one distance, without a gap."""
    import pandas as pd

    distinct = pd.DatetimeIndex(np.unique(read.to_numpy()))
    try:
        return len(fit_grid(distinct).stamps) == len(distinct)
    except InputError:
        return False


def _require_stamps(column: pd.Series, found: pd.Series) -> None:
    """Name the first cell that is no date."""
    if found.isna().any():
        row = int(found.isna().argmax())
        message = f"column {shown(str(column.name))}: {shown(column.iloc[row])} is no date"
        raise RowError(row, message, hint=_WRITE_DATES)
