"""Files of tables: CSV with commas or semicolons, Parquet, and the lines of a CSV's rows."""

from __future__ import annotations

import csv
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

_PARQUET = (".parquet", ".pq")


def read_frame(path: Path) -> pd.DataFrame:
    """Return a file as a data frame.

    A CSV with more semicolons than commas in its header has decimal commas.

    Raises:
        InputError: The file is not there or no table.
    """
    import pandas as pd

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix.lower() in _PARQUET:
            return pd.read_parquet(path)
        separator = _separator(path)
        _require_distinct(path, separator)
        style: dict[str, Any] = {"sep": ";", "decimal": ","} if separator == ";" else {}
        with warnings.catch_warnings():
            # Of rows that are longer than the header, whose last cells would be lost.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(
                path, encoding="utf-8-sig", index_col=False, low_memory=False, **style
            )
    except (ValueError, OSError, UnicodeError, ImportError, csv.Error, Warning) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: cannot be read as a table ({reason})") from error


def place_of(path: Path | None, row: int) -> str:
    """Return where a row, from 0, is: its line in a CSV, its number elsewhere."""
    if path is None or path.suffix.lower() in _PARQUET:
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
    return ";" if header.count(";") > header.count(",") else ","


def _require_distinct(path: Path, separator: str) -> None:
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next((cells for cells in csv.reader(file, delimiter=separator) if cells), [])
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise ValueError(f"two columns are called {twice[0]!r}")
