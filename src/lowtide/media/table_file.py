"""Files of tables: CSV with commas, semicolons or tabs, Parquet, and the lines of a CSV's rows."""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import InputError
from lowtide.media.table_cells import HUGE_EXPONENT, RowError

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
_SEPARATORS = ",;\t"
_DECIMAL_COMMA = r"^\s*([+-]?\d+),(\d+)\s*$"
# Points that may be of thousands, and points that cannot be.
_GROUPS_OF_THREE = r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+$"
_DECIMAL_POINT = r"[+-]?(?:\d*\.(?:\d{1,2}|\d{4,})|(?:0\d*|\d{4,})\.\d{3})$"


def read_frame(path: Path) -> pd.DataFrame:
    """Return a file as a data frame.

    A CSV with more semicolons than commas in its header has decimal commas.

    Raises:
        InputError: The file is not there or no table.
        RowError: A number may have a decimal point or one of thousands.
    """
    import pandas as pd

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix.lower() in PARQUET:
            return pd.read_parquet(path)
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
    except (ValueError, OSError, ImportError, csv.Error, Warning) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "save it as CSV in UTF-8" if isinstance(error, UnicodeError) else None
        if isinstance(error, ImportError):
            hint = "pip install 'lowtide[forecast]'"
        raise InputError(f"{path}: cannot be read as a table ({reason})", hint=hint) from error
    frame.columns = [str(name).strip() for name in frame]
    return _with_decimal_points(frame) if separator == ";" else frame


def place_of(path: Path | None, row: int) -> str:
    """Return where a row, from 0, is: its line in a CSV, its number elsewhere."""
    if path is None or path.suffix.lower() in PARQUET:
        return f"row {row}"
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, last, seen = csv.reader(file, delimiter=_separator(path)), 0, -1
        for cells in reader:
            # Quoted cells may have several lines, and empty lines are no rows.
            seen += bool(cells)
            if seen > row:
                return f"line {last + 1}"
            last = reader.line_num
    return f"row {row}"


def _separator(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        header = file.readline()
    return max(_SEPARATORS, key=header.count)


def _require_distinct(path: Path, separator: str) -> None:
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next((cells for cells in csv.reader(file, delimiter=separator) if cells), [])
    names = Counter(name.strip() for name in header)
    twice = [name for name, count in names.items() if count > 1 and name]
    if twice:
        raise ValueError(f"two columns are called {twice[0]!r}")


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
            f"column {name!r}: {text[row]!r} may have a decimal point or one of thousands",
            hint="a file with semicolons has decimal commas: write 1234 or 1,234",
        )
