"""Numbers that are dates: years, digits of a day, seconds since 1970, days of Excel, or steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtide.media.calendars import DAY, SECOND
from lowtide.media.date_forms import DIGITS, NOT_A_TIME, from_digits

if TYPE_CHECKING:
    import pandas as pd

UNITS = {"s": SECOND, "ms": 1000, "us": 1, "ns": 0.001}
EXCEL_EPOCH = -25_569 * DAY  # 1899-12-30
# Between what numbers are taken for the digits of a date.
_DIGIT_BOUNDS = (
    ("month", 150_001, 220_012),
    ("ordinal", 1_500_001, 2_200_366),
    *(
        (kind, 15_000_101 * 100**place, 22_001_232 * 100**place)
        for place, kind in enumerate(("day", "hour", "minute", "second"))
    ),
)
KINDS = ("year", *DIGITS, *UNITS, "excel", "step")


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
