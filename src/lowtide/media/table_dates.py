"""Dates of tables: columns as stamps, or as numbers of steps, and in what zone they are.

Nothing is guessed: of several readings the one that is evenly spaced counts, or an option's.
"""

from __future__ import annotations

import datetime
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError, short_repr
from lowtide.media.calendars import DAY, SECOND, microseconds
from lowtide.media.date_forms import (
    DIGITS,
    EXCEL_EPOCH,
    ISO_DATE,
    KINDS,
    NOT_A_TIME,
    UNITS,
    date_readings,
    kind_of_numbers,
    load_zone,
    stamps_from_digits,
    to_utc,
    to_zone_clock,
    zone_of_midnights,
)
from lowtide.media.table_options import TableOptions
from lowtide.media.table_words import TableRowError
from lowtide.media.time_grid import StampZones, fit_grid, stamp_index

if TYPE_CHECKING:
    import pandas as pd

_OFFSET = r"\s*(?:z|utc|gmt|(?:utc|gmt)?[+-]\d{2}(?::?\d{2})?(?:\s*\(.*\))?)$"
_WITH_OFFSET = rf"\d:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s*[ap]m)?{_OFFSET}"
_ISO = r"\d{4}-?\d{2}"
# C, Unix and Java write the year behind the time: Thu Nov 20 00:00:00 2025.
_YEAR_LAST = re.compile(
    r"^(.*\d)\s+(\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?)((?:\s+(?:utc|gmt|[+-]\d{4}))?)\s+(\d{4})$",
    re.IGNORECASE,
)
# Whole numbers, and those that are days or seconds with a fraction: 01.2015 is a month.
_NUMBER = r"[+-]?(?:\d+(?:\.0+)?|\d{5,}\.\d+|\d+(?:\.\d+)?e\+?\d+)$"
_WRITE_DATES = (
    "write dates as 2026-01-31 or 2026-01-31 13:00, say how they are written"
    " (--date-format %d.%m.%Y), or count rows (--consecutive)"
)
_SAY_WHICH = "--day-first or --month-first says which, as does --date-format %d/%m/%Y"
_LEAST_YEAR, _MOST_YEAR = 1, 9999


@dataclass(frozen=True)
class StampColumn:
    """A column of stamps.

    Attributes:
        numbers: Microseconds since 1970 [rows] without a zone, or numbers of steps.
        counted: Whether they are numbers of steps.
        zone: Their zones, if they have one.
        notes: Sentences on how they were read.
    """

    numbers: np.ndarray
    counted: bool = False
    zone: StampZones | None = None
    notes: list[str] = field(default_factory=list)

    def words(self, row: int) -> str:
        """Return the stamp of a row as text."""
        number = self.numbers[row : row + 1]
        return str(number[0]) if self.counted else str(stamp_index(number)[0])


def read_stamps(column: pd.Series, options: TableOptions) -> StampColumn:
    """Return a column as stamps.

    Stamps with an offset are converted to UTC, but for those that are all midnight in their zone,
    which count as dates. Days and months that could be exchanged are distinguished where one
    reading alone is evenly spaced.

    Raises:
        RowError: A cell is no date.
        InputError: Cells may be read in several ways.
        UsageError: The format asked for is none.
    """
    import pandas as pd

    kinds = pd.api.types
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return _with_zone(column, options)
    if isinstance(column.dtype, pd.PeriodDtype):
        column = column.dt.to_timestamp()
    if kinds.is_datetime64_dtype(column):
        numbers = microseconds(pd.DatetimeIndex(column))
        _require(column, numbers, _in_bounds(numbers))
        return _zoned(column, numbers, options, [])
    if kinds.is_numeric_dtype(column) and not kinds.is_bool_dtype(column):
        found = column.to_numpy(float, na_value=np.nan)
        return _from_numbers(column, found, column.astype(str), options)
    text = column.astype(str).str.strip()
    return _from_text(column, text, options)


def reads_as_stamps(column: pd.Series, options: TableOptions) -> bool:
    """Return whether the first cells of a column, and some more, are dates."""
    some = column.iloc[np.unique(np.linspace(0, len(column) - 1, 50).astype(int))]
    some = some[some.notna()].reset_index(drop=True)
    try:
        return len(some) > 0 and not read_stamps(some, options).counted
    except TableRowError:
        return False
    except InputError:
        return True  # of two readings


def _from_text(column: pd.Series, text: pd.Series, options: TableOptions) -> StampColumn:
    """Read text: numbers, a format that is asked for, ISO 8601, and other forms."""
    import pandas as pd

    if options.date_format is None and (plain := _plain_iso(text)) is not None:
        return _zoned(column, plain, options, [])
    codes, distinct = pd.factorize(text)
    cells = pd.Series(distinct, dtype=object).astype(str)
    wanted = options.date_format
    if wanted is not None and "%" not in wanted and wanted not in KINDS:
        raise UsageError(
            f"there is no date format {short_repr(wanted)}",
            hint=f"--date-format %d.%m.%Y, or of numbers one of {', '.join(KINDS)}",
        )
    if wanted is None or "%" not in wanted:
        plain = cells.str.lower().str.match(_NUMBER)
        if plain.mean() > 0.5 or wanted is not None:
            found = pd.to_numeric(cells.where(plain), errors="coerce").to_numpy(float)[codes]
            return _from_numbers(column, found, text, options)
        cells = cells.str.replace(_YEAR_LAST, r"\1 \4 \2\3", regex=True)
    lower = cells.str.lower()
    has_offset = lower.str.contains(_WITH_OFFSET)
    offsets, local = np.zeros(len(cells), np.int64), cells
    if has_offset.any():
        _require_all(text, has_offset.to_numpy()[codes])
        parts = lower.str.extract(f"({_OFFSET})")[0].str.strip()
        offsets = np.array([_seconds(one) for one in parts]) * SECOND
        local = lower.str.replace(_OFFSET, "", regex=True)
    stamps, notes = _local_stamps(column, local, codes, options)
    if not has_offset.any():
        return _zoned(column, stamps, options, notes)
    utc = stamps - offsets[codes]
    if options.timezone is None and not (stamps % DAY).any():
        notes.append("stamps are all midnight at their offset from UTC and count as dates")
        return StampColumn(stamps, notes=notes)
    one = np.unique(offsets)
    written = datetime.timezone(datetime.timedelta(seconds=int(one[0] // SECOND)))
    return _from_utc(utc, written if len(one) == 1 else datetime.UTC, options, notes)


def _local_stamps(
    column: pd.Series, cells: pd.Series, codes: np.ndarray, options: TableOptions
) -> tuple[np.ndarray, list[str]]:
    """Return the stamps of distinct cells, by their codes, where they were written, and notes."""

    if options.date_format is not None:
        return _by_format(column, cells, options.date_format)[codes], []
    if (plain := _plain_iso(cells)) is not None:
        return plain[codes], []
    found = date_readings(cells)
    whole = {name: one[codes] for name, one in found.items() if (one != NOT_A_TIME).all()}
    if options.day_first is not None:
        first = "month" if options.day_first else "day"
        order = {name: one for name, one in whole.items() if not name.startswith(f"{first}/")}
        whole = {n: o for n, o in order.items() if n.startswith(("day/", "month/"))} or order
    if not whole:
        best = max(found.values(), key=lambda one: (one != NOT_A_TIME).sum(), default=None)
        fits = np.zeros(len(codes), bool) if best is None else (best != NOT_A_TIME)[codes]
        _require(column, codes, fits)
    even = {name: one for name, one in whole.items() if len(whole) == 1 or _evenly_spaced(one)}
    if len(even) != 1:
        raise InputError(
            f"column {short_repr(str(column.name))}: {short_repr(str(column.iloc[0]))} may be"
            f" {' or '.join(whole)}, and its distance to the others does not tell",
            hint=_SAY_WHICH,
        )
    name, stamps = next(iter(even.items()))
    return stamps, [] if name == ISO_DATE else [f"dates were read as {name}"]


def _plain_iso(text: pd.Series) -> np.ndarray | None:
    """Return dates that all are ISO 8601 without an offset, or None.

    pandas reads them sooner than forms do, but no years that nanoseconds have no room for.
    """
    import pandas as pd

    if not text.iloc[:1].str.match(_ISO).all():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pd.to_datetime(text, errors="coerce", format="ISO8601")
    except (ValueError, FutureWarning):  # some have an offset
        return None
    plain = pd.api.types.is_datetime64_dtype(found) and not found.isna().any()
    return microseconds(pd.DatetimeIndex(found)) if plain else None


def _by_format(column: pd.Series, cells: pd.Series, form: str) -> np.ndarray:
    """Return the stamps of cells by a format of strptime."""
    made = np.full(len(cells), NOT_A_TIME)
    for place, cell in enumerate(cells):
        try:
            found = datetime.datetime.strptime(cell, form)
        except ValueError as error:
            if "directive" in str(error) or "stray" in str(error):
                raise UsageError(
                    f"there is no date format {short_repr(form)}", hint="--date-format %d.%m.%Y"
                ) from error
            row = int((column.astype(str).str.strip() == cell).to_numpy().argmax())
            name = short_repr(str(column.name))
            raise TableRowError(
                row,
                f"column {name}: {short_repr(cell)} is not written as {form}",
                hint="--date-format as the dates are written, such as %d.%m.%Y",
            ) from error
        made[place] = int(np.datetime64(found, "us").astype(np.int64))
    return made


def _from_numbers(
    column: pd.Series, found: np.ndarray, text: pd.Series, options: TableOptions
) -> StampColumn:
    """Read numbers: years, days without dashes, seconds since 1970, Excel's days, or steps."""
    _require(column, found, np.isfinite(found))
    name = str(column.name)
    kind = options.date_format or kind_of_numbers(name, found, text)
    note = [f"numbers in column {short_repr(name)} were read as {{}}"]
    if kind == "step":
        odd = (found % 1 != 0) | (np.abs(found) > 2**53)
        if odd.any():
            message = f"column {short_repr(name)} holds numbers where dates are expected"
            raise TableRowError(int(odd.argmax()), message, hint=_WRITE_DATES)
        words = "the numbers of steps, without a calendar"
        return StampColumn(found.astype(np.int64), counted=True, notes=[note[0].format(words)])
    if kind in UNITS:
        stamps = np.round(found * UNITS[kind]).astype(np.int64)
        words = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
        said = f"{words[kind]} since 1970, of UTC"
        _require(column, stamps, _in_bounds(stamps))
        return _from_utc(stamps, datetime.UTC, options, [note[0].format(said)], quiet=True)
    if kind == "excel":
        # Times are fractions of a day: to the second.
        stamps = np.round(found * DAY / SECOND).astype(np.int64) * SECOND + EXCEL_EPOCH
        _require(column, stamps, _in_bounds(stamps) & (found >= 1))
        said = note[0].format("Excel's days since 1899-12-30 (--consecutive counts rows)")
        return _zoned(column, stamps, options, [said])
    stamps = stamps_from_digits(found, kind)
    _require(column, found, stamps != NOT_A_TIME)
    said = [] if kind == "year" else [note[0].format(DIGITS[kind])]
    return _zoned(column, stamps, options, said)


def _with_zone(column: pd.Series, options: TableOptions) -> StampColumn:
    """Read stamps of a data frame that have a zone."""
    import pandas as pd

    index = pd.DatetimeIndex(column)
    numbers = microseconds(index.tz_convert("UTC").tz_localize(None))
    _require(column, numbers, _in_bounds(numbers))
    local = microseconds(index.tz_localize(None))
    zone = index.tz
    assert zone is not None
    if options.timezone is None and not (local % DAY).any():
        notes = ["stamps are all midnight at their offset from UTC and count as dates"]
        return StampColumn(local, zone=StampZones(zone, zone), notes=notes)
    return _from_utc(numbers, zone, options, [])


def _from_utc(
    utc: np.ndarray,
    written: datetime.tzinfo,
    options: TableOptions,
    notes: list[str],
    *,
    quiet: bool = False,
) -> StampColumn:
    """Return stamps of UTC: as days of a zone that they are all midnights of, or as they are."""
    zone = options.timezone
    if zone is None and (found := zone_of_midnights(utc)):
        said = (
            f"stamps are midnights of {found}, or of a zone with the same clock, and count as days"
        )
        return StampColumn(
            to_zone_clock(utc, found), zone=StampZones(found, written), notes=[*notes, said]
        )
    if zone is not None:
        local = to_zone_clock(utc, zone)
        if not (local % DAY).any():
            said = f"stamps are midnights of {zone} and count as days"
            return StampColumn(local, zone=StampZones(zone, zone), notes=[*notes, said])
        written = load_zone(zone)
    said = f"stamps were converted to UTC, whose hours count; results are in {_zone_name(written)}"
    return StampColumn(
        utc, zone=StampZones("UTC", written), notes=notes if quiet else [*notes, said]
    )


def _zoned(
    column: pd.Series, local: np.ndarray, options: TableOptions, notes: list[str]
) -> StampColumn:
    """Return stamps without a zone, or of the one that is asked for."""
    if options.timezone is None:
        return StampColumn(local, notes=notes)
    zone = options.timezone
    if not (local % DAY).any():
        said = f"dates are those of {zone}"
        return StampColumn(local, zone=StampZones(zone, zone), notes=[*notes, said])
    utc = to_utc(local, zone)
    _require(column, utc, utc != NOT_A_TIME, f"no time of {zone}, whose clock skips it")
    said = (
        f"stamps are of {zone} and were converted to UTC, whose hours count; results are in {zone}"
    )
    return StampColumn(utc, zone=StampZones("UTC", load_zone(zone)), notes=[*notes, said])


def _zone_name(zone: datetime.tzinfo) -> str:
    return str(getattr(zone, "key", None) or getattr(zone, "zone", None) or zone)


def _in_bounds(stamps: np.ndarray) -> np.ndarray:
    years = stamps.astype("datetime64[us]").astype("datetime64[Y]").astype(np.int64) + 1970
    return (stamps != NOT_A_TIME) & (years >= _LEAST_YEAR) & (years <= _MOST_YEAR)


def _seconds(offset: str) -> int:
    """Return the seconds of an offset from UTC."""
    found = re.search(r"([+-])(\d{2}):?(\d{2})?", offset)
    if found is None:
        return 0
    return (int(found[2]) * 3600 + int(found[3] or 0) * 60) * (-1 if found[1] == "-" else 1)


def _require_all(text: pd.Series, offsets: np.ndarray) -> None:
    """Refuse stamps of which some have an offset and some have none."""
    if not offsets.all():
        row = int((offsets != offsets[0]).argmax())
        has = "has an offset" if offsets[row] else "has no offset"
        raise TableRowError(row, f"{text.iloc[row]} {has} from UTC, unlike the rows before")


def _evenly_spaced(stamps: np.ndarray) -> bool:
    """Return whether stamps are of one distance, without a gap."""
    distinct = np.unique(stamps)
    try:
        return len(fit_grid(stamp_index(distinct)).stamps) == len(distinct)
    except InputError:
        return False


def _require(column: pd.Series, found: np.ndarray, good: np.ndarray, what: str = "no date") -> None:
    """Name the first cell that is no date."""
    if not good.all():
        row = int((~good).argmax())
        cell = column.iloc[row]
        written = short_repr(cell) if isinstance(cell, str) else str(cell)
        message = f"column {short_repr(str(column.name))}: {written} is {what}"
        raise TableRowError(row, message, hint=_WRITE_DATES)
