"""Names of calendars: those of pandas, and days and times of the week in words."""

from __future__ import annotations

import re

from lowtide.core.errors import UsageError
from lowtide.media.calendars import (
    DAY,
    EVERY,
    HOUR,
    LENGTHS,
    MINUTE,
    MONTHS,
    PLACES,
    SECOND,
    UNITS,
    WEEK,
    WEEKDAYS,
    WORKING,
    Calendar,
    MonthCalendar,
    NumberCalendar,
    PandasCalendar,
    StepCalendar,
)

# Names of pandas before 2.2.
_OLD = {"M": "ME", "BM": "BME", "Q": "QE", "BQ": "BQE", "A": "YE", "Y": "YE", "AS": "YS"}
_OLD |= {"BA": "BYE", "BAS": "BYS", "H": "h", "T": "min", "S": "s", "L": "ms", "C": "B"}
_HINT = "--frequency h, 15min, D, B, W, MS, QS-FEB, 'Mon Tue Wed Thu Fri Sat' or another"


def calendar_of(name: str) -> Calendar:
    """Return the calendar of a name; raises `UsageError` for one that is of none."""
    import pandas as pd

    words = name.split()
    days = [word for word in words if word[:3].capitalize() in WEEKDAYS and word.isalpha()]
    if days:
        rest = [word for word in words if word not in days]
        times = [word for word in rest if ":" in word]
        ticks = [word for word in rest if word not in times] or ["D"]
        places = sorted({WEEKDAYS.index(day[:3].capitalize()) for day in days})
        if len(words) == 1:
            return StepCalendar(WEEK, tuple(places))
        return _within_weeks(name, ticks, tuple(places), times)
    if len(words) > 1 and all(":" in word for word in words[1:]):
        return _within_weeks(name, words[:1], EVERY, words[1:])
    if name == NumberCalendar().name:
        return NumberCalendar()
    found = re.fullmatch(r"(\d*)([A-Za-z]+)(?:-(\w+))?", name.strip())
    if found is None:
        raise _unknown(name)
    count, base, anchor = int(found[1] or 1), _OLD.get(found[2], found[2]), found[3]
    if count and base == "W" and (anchor is None or anchor.capitalize() in WEEKDAYS):
        at = EVERY if anchor is None else (WEEKDAYS.index(anchor.capitalize()),)
        return StepCalendar(count * WEEK, at)
    if count and (months := _months(count, base, anchor)):
        return months
    if count == 1 and base == "B" and anchor is None:
        return StepCalendar(DAY, WORKING)
    if count and anchor is None and (unit := UNITS.get(base)):
        return StepCalendar(count * unit)
    try:
        offset = pd.tseries.frequencies.to_offset(
            f"{found[1]}{base}" + (f"-{anchor}" * bool(anchor))
        )
    except ValueError as error:
        raise _unknown(name) from error
    if offset is None or isinstance(offset, pd.tseries.offsets.Tick) or not count:
        raise _unknown(name)
    return PandasCalendar(offset.freqstr, offset)


def _unknown(name: str) -> UsageError:
    return UsageError(f"frequency {name!r} is unknown", hint=_HINT)


def _within_weeks(name: str, ticks: list[str], days: tuple[int, ...], times: list[str]) -> Calendar:
    """Return steps of some days of the week, at some times of the day."""
    found = calendar_of(ticks[0]) if len(ticks) == 1 else None
    if not isinstance(found, StepCalendar) or DAY % found.step or found.weekdays != EVERY:
        raise _unknown(name)
    chosen: list[int] = []
    for span in times:
        ends = [_time(word) for word in span.split("-")]
        if None in ends or len(ends) > 2:
            raise _unknown(name)
        chosen += range(int(ends[0] or 0), int(ends[-1] or 0) + 1, found.step)
    return StepCalendar(found.step, days, tuple(chosen) if found.step < DAY else ())


def _time(word: str) -> int | None:
    found = re.fullmatch(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", word)
    parts = [int(part or 0) for part in found.groups()] if found else []
    return parts[0] * HOUR + parts[1] * MINUTE + parts[2] * SECOND if parts else None


def _months(count: int, base: str, anchor: str | None) -> MonthCalendar | None:
    for place, names in PLACES.items():
        if base not in names:
            continue
        length = LENGTHS[names.index(base)]
        if base == "MS" and anchor is not None and anchor.isdigit() and 1 <= int(anchor) <= 31:
            return MonthCalendar(count, int(anchor))
        if anchor is None:
            return MonthCalendar(count * length, place)
        if length > 1 and anchor.upper() in MONTHS:
            return MonthCalendar(count * length, place, MONTHS.index(anchor.upper()) % length)
    return None
