"""Files of tables: CSV with commas, semicolons, tabs, bars or spaces, Excel, Parquet."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.errors import InputError, UsageError, install_extra
from lowtide.media.table_bytes import EXCEL, TableBytes, require_room
from lowtide.media.table_numbers import HUGE_EXPONENT, settle_decimals
from lowtide.media.table_words import (
    LOOKED_AT,
    TableRowError,
    header_row,
    require_distinct,
    text_above_header,
)

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
_SEPARATORS = ",;\t|"
# Bytes that a cell of Parquet takes from its file to a forecast: measured were 75 to 212.
_CELL_BYTES = 200
# pandas takes a minute to name a hundred thousand columns.
_MOST_NAMELESS = 1000
_CHUNK, _LONGEST_NUMBER = 1 << 20, 64


@dataclass(frozen=True)
class GivenTable:
    """A table as it was given.

    Attributes:
        frame: The table, its columns of the kinds that pandas finds.
        text: Returns columns as they are written, as text where they come from a text file.
        place: Says where a row, counted from 0, is.
        notes: Sentences on how it was read.
    """

    frame: pd.DataFrame
    text: Callable[[Sequence[str]], pd.DataFrame]
    place: Callable[[int], str] = "row {}".format
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_frame(cls, frame: pd.DataFrame) -> GivenTable:
        """Return the source of a data frame."""
        return cls(frame, lambda names: frame[list(names)])

    def of_rows(self, rows: np.ndarray, notes: list[str]) -> GivenTable:
        """Return the source of some rows, and ``notes`` on the others."""
        return replace(
            self,
            notes=[*self.notes, *notes],
            frame=self.frame.iloc[rows].reset_index(drop=True),
            text=lambda names: self.text(names).iloc[rows].reset_index(drop=True),
            place=lambda row: self.place(int(rows[row])),
        )


def read_source(path: Path, room: int = sys.maxsize, decimal: str | None = None) -> GivenTable:
    """Return the table of a file.

    A CSV with more semicolons than commas in its header has decimal commas.

    Args:
        path: The file; ``-`` is standard input.
        room: Bytes of memory that there are for the table and what is made of it.
        decimal: What separates decimals, if that is said.

    Raises:
        InputError: The file is not there or no table, or takes more than ``room``.
        UsageError: A package is needed to read it.
        RowError: A number may have a decimal point or one of thousands.
    """
    source = TableBytes.of(path, room)
    with _reading(path):
        if source.suffix in PARQUET:
            return GivenTable.of_frame(_parquet(source, room))
        if source.suffix in EXCEL:
            return _excel(source)
        return _csv(source, decimal)


def _parquet(source: TableBytes, room: int) -> pd.DataFrame:
    import pandas as pd

    with source.open() as file:
        size, needed = _parquet_size(file)
        require_room(source.path, room, size, needed)
        return pd.read_parquet(file)


def _parquet_size(file: Any) -> tuple[str, int]:
    """Return the rows and columns that a file's footer tells, in words, and the bytes they take."""
    import pyarrow.parquet

    footer = pyarrow.parquet.read_metadata(file)
    rows, columns = footer.num_rows, footer.num_columns
    groups = (footer.row_group(place) for place in range(footer.num_row_groups))
    # Lists have more values than rows.
    values = sum(one.column(place).num_values for one in groups for place in range(columns))
    return f"{rows:,} rows of {columns:,} columns", max(values, rows * columns) * _CELL_BYTES


def _excel(source: TableBytes) -> GivenTable:
    """Read the first sheet of a workbook."""
    import pandas as pd

    try:
        import openpyxl  # noqa: F401  # pyright: ignore[reportMissingModuleSource]
    except ImportError as error:
        raise UsageError(
            f"{source.path}: Excel files need openpyxl", hint=install_extra("excel")
        ) from error

    with source.open() as file, pd.ExcelFile(io.BytesIO(file.read()), engine="openpyxl") as book:
        sheet = str(book.sheet_names[0])
        style = {"sheet_name": sheet, "dtype": str, "keep_default_na": False}
        first = pd.read_excel(book, header=None, nrows=LOOKED_AT, **style).to_numpy().tolist()
        skipped = header_row(first) or 0
        frame = pd.read_excel(book, sheet_name=sheet, header=skipped)
        written = pd.read_excel(book, header=skipped, **style)
    names = [str(name).strip() for name in frame]
    frame.columns = written.columns = names
    require_distinct(names)
    sheets = len(book.sheet_names)
    notes = [f"of {sheets} sheets the first was read, {sheet}"] if sheets > 1 else []
    if skipped:
        notes.append(
            f"the header is row {skipped + 1}; above it: {text_above_header(first[:skipped])}"
        )

    # Dates are cells of their own kind in a workbook, as are numbers: names alone are text.
    def text(wanted: Sequence[str]) -> pd.DataFrame:
        dates = {name: frame[name] for name in wanted if frame[name].dtype.kind == "M"}
        return written[list(wanted)].assign(**dates)

    return GivenTable(frame, text, lambda row: f"row {row + skipped + 2}", notes)


def _csv(source: TableBytes, decimal: str | None) -> GivenTable:
    """Read a text file, and again what of it is wanted as text."""

    layout = _Layout.of(source)
    header = [cell.strip() for cell in layout.header()]
    require_distinct(header)
    if header.count("") > _MOST_NAMELESS:
        raise ValueError(f"{header.count(''):,} columns have no name")
    _require_exponents(layout)
    found = decimal or ("," if layout.separator == ";" else ".")
    frame = layout.read(decimal=found)
    names = [str(name).strip() for name in frame]
    frame.columns = names

    def text(wanted: Sequence[str]) -> pd.DataFrame:
        places = [names.index(name) for name in wanted]
        made = layout.read(usecols=places, dtype=str, keep_default_na=False, na_filter=False)
        made.columns = [names[place] for place in sorted(places)]
        return made[list(wanted)]

    # Of rows that cannot be used the line is known even before there is a table.
    with layout.naming_rows():
        frame = frame if decimal else settle_decimals(frame, layout.separator)
    notes = []
    if layout.skipped:
        first = replace(layout, skipped=0).first_rows(layout.skipped)
        notes.append(f"the header is {layout.place(-1)}; above it: {text_above_header(first)}")
    if layout.encoding == "cp1252":
        notes.append("the file is no UTF-8 and was read as Windows-1252")
    return GivenTable(frame, text, layout.place, notes)


@dataclass(frozen=True)
class _Layout:
    """How the text of a file is to be taken apart.

    Attributes:
        source: The file.
        encoding: That of its text.
        separator: What stands between cells.
        skipped: Rows above the header.
    """

    source: TableBytes
    encoding: str
    separator: str
    skipped: int = 0

    @classmethod
    def of(cls, source: TableBytes) -> _Layout:
        encoding = source.encoding()
        with source.open() as file, io.TextIOWrapper(file, encoding) as text:
            lines = [line.strip("\n\r") for line in itertools.islice(text, LOOKED_AT)]
        lines = [line for line in lines if line.strip()]
        if not lines:
            raise ValueError("the file is empty")
        if lines[0].lstrip()[:1] in ("{", "["):
            raise ValueError("it looks like JSON; save it as CSV")
        # The header tells what separates cells, and which line is the header, how they are.
        separators = list(dict.fromkeys(map(_separator, lines)))
        for separator in separators:
            layout = cls(source, encoding, separator)
            place = header_row(layout.first_rows())
            if place is not None:
                return replace(layout, skipped=place)
        return cls(source, encoding, separators[0])

    def first_rows(self, count: int = LOOKED_AT) -> list[list[str]]:
        """Return the first rows, empty ones too."""
        with self.cells() as reader:
            return list(itertools.islice(reader, count))

    def read(self, **style: Any) -> pd.DataFrame:
        """Return the whole file, or those columns that ``style`` says, with what pandas finds."""
        import pandas as pd

        separator = r"\s+" if self.separator == " " else self.separator
        try:
            with warnings.catch_warnings(), self.source.open() as file:
                # Of rows that are longer than the header, whose last cells would be lost.
                warnings.simplefilter("error", pd.errors.ParserWarning)
                return pd.read_csv(
                    file,
                    sep=separator,
                    encoding=self.encoding,
                    index_col=False,
                    low_memory=False,
                    skiprows=self.skipped,
                    **style,
                )
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            raise ValueError(self._odd_row()) from error

    def header(self) -> list[str]:
        """Return the cells of the header."""
        return next(cells for cells in self.first_rows() if cells)

    @contextlib.contextmanager
    def cells(self) -> Iterator[Any]:
        """Read the cells from the header on, row by row, of any length."""
        limit = csv.field_size_limit(2**31 - 1)
        try:
            with self.source.open() as file:
                lines = io.TextIOWrapper(file, self.encoding, newline="")
                reader = csv.reader(
                    lines, delimiter=self.separator, skipinitialspace=self.separator == " "
                )
                for _ in range(self.skipped):
                    next(reader)
                yield reader
        finally:
            csv.field_size_limit(limit)  # that of the module, put back

    def place(self, row: int) -> str:
        """Return the line of a row, counted from 0."""
        with self.cells() as reader:
            last, seen = reader.line_num, -1
            for cells in reader:
                # Quoted cells may have several lines, and empty lines are no rows.
                seen += bool(cells)
                if seen > row:
                    return f"line {last + 1}"
                last = reader.line_num
        return f"row {row}"

    @contextlib.contextmanager
    def naming_rows(self) -> Iterator[None]:
        """Refuse rows by their line."""
        try:
            yield
        except TableRowError as error:
            message = f"{self.source.path}: {self.place(error.row)}, {error.message}"
            raise InputError(message, hint=error.hint) from error

    def _odd_row(self) -> str:
        """Return which row cannot be taken apart."""
        names, last = len(self.header()), 0
        with self.cells() as reader:
            for cells in reader:
                if len(cells) > names:
                    return f"line {last + 1} has {len(cells):,} cells, and the header {names:,}"
                last = reader.line_num
        return "a quote is opened and never closed"


def _separator(line: str) -> str:
    """Return what stands between the cells of a line."""
    separator = max(_SEPARATORS, key=line.count)
    return " " if separator not in line and len(line.split()) > 1 else separator


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Refuse a file that makes a reader fail, by whatever it raises: readers have no one error."""
    try:
        yield
    except (MemoryError, InputError, UsageError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, KeyError):
            reason = f"without {reason}"
        hint = "save it as CSV in UTF-8" if isinstance(error, UnicodeError) else None
        if isinstance(error, ImportError):
            hint = install_extra("forecast")
        raise InputError(f"{path}: cannot be read as a table ({reason})", hint=hint) from error


def _require_exponents(layout: _Layout) -> None:
    """Refuse numbers that end the process when pandas reads them."""
    huge = re.compile(HUGE_EXPONENT)
    with layout.source.open() as file, io.TextIOWrapper(file, layout.encoding) as text:
        line, rest = 1, ""
        while chunk := text.read(_CHUNK):
            if found := huge.search(rest + chunk):
                line += (rest + chunk).count("\n", 0, found.start())
                raise ValueError(f"line {line}: ...{found[0]}... is out of all bounds")
            whole = rest + chunk
            rest = whole[-_LONGEST_NUMBER:]
            line += whole.count("\n", 0, len(whole) - len(rest))
