"""Forms of dates, in text and numbers, as spreadsheets, databases and offices write; and zones.

A form may read ``1/2/2026`` in several ways; which is meant is for who knows the other rows.
"""

from __future__ import annotations

import datetime
import re
import zoneinfo
from typing import TYPE_CHECKING

import numpy as np

from lowtide.media.calendars import DAY, HOUR, MINUTE, SECOND, microseconds

if TYPE_CHECKING:
    import pandas as pd


NOT_A_TIME = np.iinfo(np.int64).min
# Beginnings of the months' names: English, German, French, Spanish, Italian, Portuguese, Dutch.
_MONTHS = (
    "jan|ene|gen",
    "feb|fév|fev",
    "mar|mär|maa|mrt",
    "apr|avr|abr",
    "may|mai|mag|mei",
    "jun|juin|giu",
    "jul|juil|lug",
    "aug|ago|aoû|aou",
    "sep|set",
    "oct|okt|ott|out",
    "nov",
    "dec|dez|dic|déc",
)
_Y, _YY, _D = r"(?P<year>\d{4})", r"(?P<year>\d{2})", r"(?P<day>\d{1,2})(?:st|nd|rd|th|\.)?"
_M, _NAME = r"(?P<month>\d{1,2})", r"(?P<name>[^\W\d_]{3,})\.?"
_OR = r"[-/. ,]+"
ISO_DATE = "year-month-day"
# What a form is called, and its parts; the first that reads all is said where others do too.
_FORMS = {
    ISO_DATE: _Y + _OR + _M + _OR + _D,
    "day/month/year": _D + _OR + _M + _OR + _Y,
    "month/day/year": _M + _OR + _D + _OR + _Y,
    "day/month/year of two digits": _D + _OR + _M + _OR + _YY,
    "month/day/year of two digits": _M + _OR + _D + _OR + _YY,
    "year of two digits/month/day": _YY + _OR + _M + _OR + _D,
    "day, name of the month, year": rf"{_D}[-/. ,]*(?:de )?{_NAME}[-/. ,]*(?:de )?{_Y}",
    "day, name of the month, year of two digits": rf"{_D}[-/. ,]*{_NAME}[-/. ,]*{_YY}",
    "name of the month, day, year": _NAME + _OR + _D + _OR + _Y,
    "year, name of the month, day": _Y + r"[-/. ,]*" + _NAME + r"[-/. ,]*" + _D,
    "name of the month, year": _NAME + r"[-/. ,']*(?:de )?" + _Y,
    "name of the month, year of two digits": _NAME + r"[-/. ,']*" + _YY,
    "year, name of the month": _Y + r"[-/. ,]*" + _NAME,
    "month/year": _M + r"[-/.]" + _Y,
    "year, month": _Y + r"(?:[-/. ]|[-: ]?m)" + _M,
    "quarters, by their first day": _Y + r"[-: /]*[qtk](?P<quarter>[1-4])",
    "quarters, by their first day, ": r"[qtk](?P<quarter>[1-4])[-: /]*" + _Y,
    "quarters, by their first day,": r"(?P<quarter>[1-4])\.?[-: ]*[qtk][a-z.]*[-: /]*" + _Y,
    "quarters, by their first day, of years of two digits": r"q(?P<quarter>[1-4])[-: /']*" + _YY,
    "half-years, by their first day": _Y + r"[-: /]*[hs](?P<half>[12])",
    "weeks of ISO, by their Monday": _Y + r"[-: ]*w(?P<week>\d{1,2})",
    "weeks of ISO and days": _Y + r"-?w(?P<week>\d{2})-?(?P<weekday>[1-7])",
    "year-day of the year": _Y + r"-?(?P<ordinal>\d{3})",
}
# Numbers whose digits are a date, and how the digits are told apart.
DIGITS = {
    "month": "year and month",
    "ordinal": "year and day of the year",
    "day": "year, month and day",
    "hour": "year, month, day and hour",
    "minute": "year, month, day, hour and minute",
    "second": "year, month, day, hour, minute and second",
}
_YM, _DAY_TIME = rf"{_Y}(?P<month>\d\d)", r"(?P<day>\d\d)(?P<hour>\d\d)(?P<minute>\d\d)"
_DIGITS = {
    "year": _Y,
    "month": _YM,
    "ordinal": rf"{_Y}(?P<ordinal>\d{{3}})",
    "day": rf"{_YM}(?P<day>\d\d)",
    "hour": rf"{_YM}(?P<day>\d\d)(?P<hour>\d\d)",
    "minute": _YM + _DAY_TIME,
    "second": rf"{_YM}{_DAY_TIME}(?P<second>\d\d)",
}
_LENGTHS = {"month": 6, "ordinal": 7, "day": 8, "hour": 10, "minute": 12, "second": 14}
# Years that digits are of where nothing says that they are a date.
_DIGITS_FROM, _DIGITS_TO = 1500, 2200
# Units of numbers since 1970, and Excel's first day, 1899-12-30.
UNITS = {"s": SECOND, "ms": 1000, "us": 1, "ns": 0.001}
EXCEL_EPOCH = -25_569 * DAY
KINDS = ("year", *DIGITS, *UNITS, "excel", "step")
_PATTERNS = {name: re.compile(form + r"\.?") for name, form in _FORMS.items()}
_WEEKDAY = r"^(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,?\s+"
_TIME = (
    r"^(?P<date>.*\d.*?)[\st,]+(?P<hour>\d{1,2})(?::|\.(?=\d\d[:.]))(?P<minute>\d{2})"
    r"(?:[:.](?P<second>\d{2})(?:[.,](?P<part>\d+))?)?\s*(?P<half>[ap]\.?\s?m\.?)?$"
)
_CHUNK = 20_000
# Years of two digits are those from 1969, as in strptime.
_TWO_DIGITS_FROM = 69

# Tried first, so that of zones with the same clock one is named that people know.
_KNOWN = (
    "Europe/Berlin",
    "Europe/London",
    "Europe/Helsinki",
    "Europe/Lisbon",
    "America/New_York",
    "America/Chicago",
    "America/Denver",
    "America/Los_Angeles",
    "America/Sao_Paulo",
    "Asia/Kolkata",
    "Asia/Shanghai",
    "Asia/Tokyo",
    "Australia/Sydney",
    "Pacific/Auckland",
)


def date_readings(cells: pd.Series) -> dict[str, np.ndarray]:
    """Return what text may mean, by the name of the form, in microseconds since 1970.

    Args:
        cells: Distinct texts [n], without spaces around them.

    Returns:
        For each form that fits most of the cells, its stamps [n], `NOT_A_TIME` where it fits not.
    """
    some = _parts(cells.iloc[:: max(1, len(cells) // 20)])["date"].tolist()
    fitting = [
        name
        for name, pattern in _PATTERNS.items()
        if sum(pattern.fullmatch(one) is not None for one in some) * 2 > len(some)
    ]
    made: dict[str, list[np.ndarray]] = {name: [] for name in fitting}
    # Some at a time: parts of texts take many times their memory.
    for start in range(0, len(cells), _CHUNK):
        parts = _parts(cells.iloc[start : start + _CHUNK])
        times = _times(parts)
        for name in fitting:
            days = parts["date"].str.extract(rf"^{_PATTERNS[name].pattern}$")
            made[name].append(_together(_days(days), times))
    found: dict[str, np.ndarray] = {}
    for name in fitting:
        stamps = np.concatenate(made[name])
        if not any(np.array_equal(stamps, other) for other in found.values()):
            found[name.rstrip(", ")] = stamps
    return found


def stamps_from_digits(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Return the stamps of numbers [n] whose digits are a date; `NOT_A_TIME` where there is none.

    ``kind`` is a name in `DIGITS`, or ``"year"``.
    """
    import pandas as pd

    whole = (numbers % 1 == 0) & (numbers >= 0) & (numbers < 2**53)
    distinct, places = np.unique(np.where(whole, numbers, 0).astype(np.int64), return_inverse=True)
    parts = pd.Series(distinct.astype(str)).str.zfill(4).str.extract(f"^{_DIGITS[kind]}$")
    timed = parts.reindex(columns=["hour", "minute", "second", "half", "part"]).astype(object)
    return np.where(whole, _together(_days(parts), _times(timed))[places], NOT_A_TIME)


def kind_of_numbers(name: str, found: np.ndarray, text: pd.Series) -> str:
    """Return what numbers are, by their name, their digits and where they begin."""
    low, high = found.min(initial=np.inf), found.max(initial=-np.inf)
    whole = bool((found % 1 == 0).all())
    if whole and name.lower() in ("year", "jahr", "année", "annee", "año", "anno", "yr", "years"):
        return "year"
    for kind, length in _LENGTHS.items():
        first, end = (year * 10 ** (length - 4) for year in (_DIGITS_FROM, _DIGITS_TO + 1))
        if first <= low and high < end and (stamps_from_digits(found, kind) != NOT_A_TIME).all():
            return kind
    for unit, least in (("s", 1e8), ("ms", 1e11), ("us", 1e14), ("ns", 1e17)):
        if least <= low and high < 1e11 * least / 1e8 and (whole or unit == "s"):
            return unit
    if low >= 25_569 and high <= 73_050:
        return "excel"
    if whole and low >= 1000 and high <= 2999 and text.str.fullmatch(r"\d{4}(?:\.0+)?").all():
        return "year"
    return "step"


def _together(days: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return days and times of the day as stamps; `NOT_A_TIME` where either is none."""
    absent = (days == NOT_A_TIME) | (times == NOT_A_TIME)
    return np.where(absent, NOT_A_TIME, np.where(absent, 0, days) * DAY + times)


def _parts(cells: pd.Series) -> pd.DataFrame:
    """Return the date of texts and the parts of their times."""
    text = cells.str.lower().str.replace(_WEEKDAY, "", regex=True)
    parts = text.str.extract(_TIME)
    return parts.assign(date=parts["date"].fillna(text).str.strip())


def _times(timed: pd.DataFrame) -> np.ndarray:
    """Return times of the day; 0 where there is none."""
    hour, minute, second = (_int(timed[name]) for name in ("hour", "minute", "second"))
    half = timed["half"].fillna("").str[:1].to_numpy()
    # The end of a day is the beginning of the next.
    wrong = (minute > 59) | (second > 59) | (hour * HOUR + minute * MINUTE + second * SECOND > DAY)
    wrong |= (half != "") & ((hour < 1) | (hour > 12))
    hour = np.where(half == "", hour, hour % 12 + 12 * (half == "p"))
    part = _int(timed["part"].str.ljust(6, "0").str[:6])
    return np.where(wrong, NOT_A_TIME, hour * HOUR + minute * MINUTE + second * SECOND + part)


def _days(parts: pd.DataFrame) -> np.ndarray:
    """Return days since 1970 of a date's parts, `NOT_A_TIME` where there is no such day."""
    absent = parts.isna().any(axis=1).to_numpy(copy=True)
    year = _int(parts["year"])
    if (parts["year"].str.len() == 2).any():
        year += np.where(year < _TWO_DIGITS_FROM, 2000, 1900)
    month, day = np.ones_like(year), np.ones_like(year)
    if "month" in parts:
        month = _int(parts["month"])
    elif "name" in parts:
        month = np.array([month_of_name(name) for name in parts["name"].fillna("")])
    elif "quarter" in parts:
        month = 3 * _int(parts["quarter"]) - 2
    elif "half" in parts:
        month = 6 * _int(parts["half"]) - 5
    if "day" in parts:
        day = _int(parts["day"])
    absent |= (month < 1) | (month > 12) | (day < 1) | (year < 1)
    months = (year - 1970) * 12 + np.clip(month, 1, 12) - 1
    start, after = (
        one.astype("datetime64[M]").astype("datetime64[D]") for one in (months, months + 1)
    )
    days = start.astype(np.int64) + day - 1
    absent |= days >= after.astype(np.int64)
    if "ordinal" in parts:
        ordinal = _int(parts["ordinal"])
        leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
        days, absent = days + ordinal - 1, absent | (ordinal < 1) | (ordinal > 365 + leap)
    if "week" in parts:
        # The first week has the fourth of January.
        fourth, week = days + 3, _int(parts["week"])
        absent |= (week < 1) | (week > 53)
        days = fourth - (fourth + 3) % 7 + 7 * (week - 1)
        if "weekday" in parts:
            days = days + _int(parts["weekday"]) - 1
    return np.where(absent, NOT_A_TIME, days)


def _int(texts: pd.Series) -> np.ndarray:
    return texts.fillna("0").astype("int64").to_numpy(copy=True)


def month_of_name(name: str) -> int:
    """Return the month that a name in lower case begins as, from 1, or 0."""
    return next((number for number, starts in enumerate(_MONTHS, 1) if re.match(starts, name)), 0)


def load_zone(name: str) -> datetime.tzinfo:
    """Return a zone of `zoneinfo`, which every stamp library takes."""
    return zoneinfo.ZoneInfo(name)


def to_zone_clock(utc: np.ndarray, zone: str) -> np.ndarray:
    """Return stamps of UTC by the clock of a zone, in microseconds."""
    import pandas as pd

    index = pd.DatetimeIndex(utc.astype("datetime64[us]")).tz_localize("UTC")
    return microseconds(index.tz_convert(load_zone(zone)).tz_localize(None))


def to_utc(local: np.ndarray, zone: str) -> np.ndarray:
    """Return stamps of a zone's clock in UTC; `NOT_A_TIME` for those that it skips.

    Of an hour that the clock repeats, rows are the first until the clock of the rows goes back.
    """
    import pandas as pd

    index = pd.DatetimeIndex(local.astype("datetime64[us]"))
    clear = index.tz_localize(zone, ambiguous="NaT", nonexistent="shift_forward")
    unclear = np.asarray(clear.isna())
    moves = np.diff(local, prepend=local[:1] - DAY)
    # Rows of several series at one time are no repeated hour.
    several = ((moves == 0) & ~unclear).any()
    first, second = np.ones(len(local), bool), False
    for place in np.flatnonzero(unclear).tolist():
        back = -2 * HOUR < moves[place] < 0 or (moves[place] == 0 and not several)
        if not back and (abs(moves[place]) > 2 * HOUR or not unclear[place - 1]):
            second = False
        second = second or back
        first[place] = not second
    found = index.tz_localize(zone, ambiguous=first, nonexistent="NaT").tz_convert("UTC")
    utc = microseconds(found.tz_localize(None))
    utc[found.isna()] = NOT_A_TIME
    return utc


def zone_of_midnights(utc: np.ndarray) -> str | None:
    """Return a zone in which all stamps are midnight though in UTC their times differ, if any."""
    distinct = np.unique(utc)
    times = np.unique(distinct % DAY)
    if not 2 <= len(times) <= 4:
        return None
    some = distinct[np.unique(np.linspace(0, len(distinct) - 1, 9).astype(int))]
    for name in (*_KNOWN, *sorted(zoneinfo.available_timezones() - set(_KNOWN))):
        if (
            not (to_zone_clock(some, name) % DAY).any()
            and not (to_zone_clock(distinct, name) % DAY).any()
        ):
            return name
    return None
