"""Numbers that are dates: years, digits of a day, seconds since 1970, days of Excel, or steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtide.media.calendars import DAY, HOUR, MINUTE, SECOND
from lowtide.media.date_forms import NOT_A_TIME

if TYPE_CHECKING:
    import pandas as pd

UNITS = {"s": SECOND, "ms": 1000, "us": 1, "ns": 0.001}
EXCEL_EPOCH = -25_569 * DAY  # 1899-12-30
# Numbers whose digits are a date, and between which they are taken for one.
DIGITS = {
    "month": "year and month",
    "ordinal": "year and day of the year",
    "day": "year, month and day",
    "hour": "year, month, day and hour",
    "minute": "year, month, day, hour and minute",
    "second": "year, month, day, hour, minute and second",
}
_DIGIT_BOUNDS = (
    ("month", 150_001, 220_012),
    ("ordinal", 1_500_001, 2_200_366),
    *(
        (kind, 15_000_101 * 100**place, 22_001_232 * 100**place)
        for place, kind in enumerate(("day", "hour", "minute", "second"))
    ),
)
KINDS = ("year", *DIGITS, *UNITS, "excel", "step")
_LEAST_YEAR, _MOST_YEAR = 1, 9999


def from_digits(found: np.ndarray, kind: str) -> np.ndarray:
    """Return the stamps of numbers whose digits are a date; `NOT_A_TIME` where there is none."""
    digits = np.where(np.abs(found) < 2**53, found, -1).astype(np.int64)
    time, places = 0, {"hour": 2, "minute": 4, "second": 6}.get(kind, 0)
    if places:
        clock = digits % 10**places * 10 ** (6 - places)
        hour, minute, second = clock // 10_000, clock // 100 % 100, clock % 100
        time = hour * HOUR + minute * MINUTE + second * SECOND
        found = np.where((hour > 23) | (minute > 59) | (second > 59), -1.0, found)
        digits = digits // 10**places
    ones = np.ones_like(digits)
    if kind == "year":
        year, month, day = digits, ones, ones
    elif kind == "month":
        year, month, day = digits // 100, digits % 100, ones
    elif kind == "ordinal":
        year, month, day = digits // 1000, ones, digits % 1000
    else:
        year, month, day = digits // 10_000, digits // 100 % 100, digits % 100
    good = (found % 1 == 0) & (year >= _LEAST_YEAR) & (year <= _MOST_YEAR) & (day >= 1)
    good &= (month >= 1) & (month <= 12) & (found >= 0)
    months = np.where(good, (year - 1970) * 12 + month - 1, 0)
    after = months + np.where(kind == "ordinal", 12, 1)
    start, end = (one.astype("datetime64[M]").astype("datetime64[D]") for one in (months, after))
    days = start.astype(np.int64) + day - 1
    return np.where(good & (days < end.astype(np.int64)), days * DAY + time, NOT_A_TIME)


def kind_of_numbers(name: str, found: np.ndarray, text: pd.Series) -> str:
    """Return what numbers are, by their name, their digits and where they begin."""
    low, high = found.min(initial=np.inf), found.max(initial=-np.inf)
    whole = bool((found % 1 == 0).all())
    if whole and name.lower() in ("year", "jahr", "année", "annee", "año", "anno", "yr", "years"):
        return "year"
    for kind, least, most in _DIGIT_BOUNDS:
        if least <= low and high <= most and (from_digits(found, kind) != NOT_A_TIME).all():
            return kind
    for unit, least in (("s", 1e8), ("ms", 1e11), ("us", 1e14), ("ns", 1e17)):
        if least <= low and high < 1e11 * least / 1e8 and (whole or unit == "s"):
            return unit
    if low >= 25_569 and high <= 73_050:
        return "excel"
    if whole and low >= 1000 and high <= 2999 and text.str.fullmatch(r"\d{4}(?:\.0+)?").all():
        return "year"
    return "step"
