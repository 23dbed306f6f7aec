"""Calendars: the rules by which stamps of tables follow each other, by the names they have.

Stamps are whole microseconds since 1970, so that no year is out of bounds. Names are those of
pandas (``h``, ``D``, ``B``, ``W-MON``, ``QS-FEB``, ``BME``), and where it has none: ``MS-15`` for
the 15th of each month, ``Mon Tue Wed`` for these days, ``h Mon Tue 09:00-16:00`` for these hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from pandas.tseries.offsets import BaseOffset

SECOND = 1_000_000
MINUTE, HOUR, DAY = 60 * SECOND, 3600 * SECOND, 86_400 * SECOND
WEEK, WEEKDAYS = 7 * DAY, ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
UNITS = {"D": DAY, "h": HOUR, "min": MINUTE, "s": SECOND, "ms": 1000, "us": 1}
_LONGEST_SEASON, WORKING = 336, (0, 1, 2, 3, 4)
EVERY: tuple[int, ...] = tuple(range(7))
# Places in a month, with pandas' names of steps of a month, a quarter and a year.
PLACES = {
    "start": ("MS", "QS", "YS"),
    "end": ("ME", "QE", "YE"),
    "first": ("BMS", "BQS", "BYS"),
    "last": ("BME", "BQE", "BYE"),
}
LENGTHS = (1, 3, 12)


@dataclass(frozen=True)
class StepCalendar:
    """Steps of one length, of which a week may have some alone.

    Attributes:
        step: Microseconds of a step.
        weekdays: Days of the week that have steps, 0 is Monday.
        times: Times of the day that have steps, in microseconds; empty for all.
    """

    step: int
    weekdays: tuple[int, ...] = EVERY
    times: tuple[int, ...] = ()

    @cached_property
    def name(self) -> str:
        """The name that ``--frequency`` takes."""
        if self.step % WEEK == 0:
            days = [WEEKDAYS[day].upper() for day in self.weekdays]
            day = f"-{days[0]}" if len(days) == 1 else ""
            count = self.step // WEEK
            return f"{count if count > 1 else ''}W{day}"
        if self.step == DAY and self.weekdays == WORKING:
            return "B"
        days = [WEEKDAYS[day] for day in self.weekdays] if self.weekdays != EVERY else []
        if self.step == DAY and days:
            return " ".join(days)
        return " ".join([_tick(self.step), *days, *_spans(self.times, self.step)])

    def anchored(self, rows: np.ndarray) -> StepCalendar:
        """Return the calendar on the weekday that most rows have, where it is of weeks."""
        if self.step % WEEK or len(self.weekdays) == 1:
            return self
        return replace(self, weekdays=(int(np.bincount(weekday(rows)).argmax()),))

    def nearest(self, rows: np.ndarray) -> np.ndarray:
        """Return rows on the calendar's weekday that is nearest, where it is of weeks."""
        if self.step % WEEK or len(self.weekdays) > 1:
            return rows
        return rows + ((min(self.weekdays) - weekday(rows) + 3) % 7 - 3) * DAY

    def at_least(self, first: int, last: int) -> int:
        """Return a number of steps between two stamps, as many or fewer, without making them."""
        share = len(self.weekdays) / 7 if self.step < WEEK else 1.0
        share *= len(self.times) * self.step / DAY if self.times else 1.0
        return int(max(0, (last - first) / self.step - 7 * DAY / self.step) * share)

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the stamps from one to another, if they are on the calendar."""
        return self._open(np.arange(first, last + 1, self.step))

    def following(self, last: int, count: int) -> np.ndarray:
        """Return the ``count`` stamps after one."""
        week = max(1, WEEK // self.step)
        slots = max(1, len(self._open(last + self.step * np.arange(week))))
        raw = week * (-(-count // slots) + 1)
        return self._open(last + self.step * np.arange(1, raw + 1))[:count]

    def _open(self, stamps: np.ndarray) -> np.ndarray:
        if self.weekdays != EVERY:
            stamps = stamps[np.isin(weekday(stamps), self.weekdays)]
        return stamps[np.isin(stamps % DAY, self.times)] if self.times else stamps

    @property
    def season(self) -> int:
        """Steps of a day, else of a week, an hour or a minute; weeks have those of a year."""
        if self.step == DAY and 1 < len(self.weekdays) < 7:
            return len(self.weekdays)
        if self.step % WEEK == 0:
            return _whole(52 * WEEK, self.step) or 1
        if self.step >= DAY:
            return _whole(WEEK, self.step) or 1
        a_day = len(self.times) or _whole(DAY, self.step)
        cycles = (a_day, *(_whole(one, self.step) for one in (WEEK, HOUR, MINUTE)))
        return next((one for one in cycles if 1 < one <= _LONGEST_SEASON), 1)

    def phases(self, stamps: np.ndarray) -> np.ndarray:
        """Return the phase of stamps in their season: the hour of the day, or the weekday."""
        if self.step < DAY:
            return stamps // HOUR % 24
        return weekday(stamps) if self.step == DAY else np.zeros(len(stamps), int)


@dataclass(frozen=True)
class MonthCalendar:
    """Steps of months.

    Attributes:
        months: Months of a step.
        place: Where in the month: its start or end, its first or last working day, or a day.
        month: A month that has a step, from 0; None for any.
    """

    months: int
    place: str | int = "start"
    month: int | None = None

    @cached_property
    def name(self) -> str:
        """The name that ``--frequency`` takes."""
        if isinstance(self.place, int):
            return f"{self.months if self.months > 1 else ''}MS-{self.place}"
        names = PLACES[self.place]
        if self.months not in LENGTHS:
            return f"{self.months}{names[0]}"
        name = names[LENGTHS.index(self.months)]
        if self.months == 1 or self.month is None:
            return name
        month = self.month % self.months
        # Ends are named by the last month of a year, as pandas names them.
        late = self.place in ("end", "last") and self.months == 3
        return f"{name}-{MONTHS[month + 9 if late else month]}"

    def anchored(self, rows: np.ndarray) -> MonthCalendar:
        """Return the calendar that has a step in the month of the first row, if none is named."""
        if self.month is not None or self.months == 1:
            return self
        return replace(self, month=int(month_of(rows[:1])[0] % min(self.months, 12)))

    def nearest(self, rows: np.ndarray) -> np.ndarray:
        """Return rows at the place of their month."""
        return self.stamps_in(month_of(rows), rows % DAY)

    def at_least(self, first: int, last: int) -> int:
        """Return a number of steps between two stamps, as many or fewer, without making them."""
        return int((last - first) / (31 * DAY) / self.months)

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the stamps from one to another, if they are on the calendar."""
        start, end = month_of(np.array([first, last]))
        if self.month is not None and self.months <= 12:
            start += (self.month - start) % self.months
        return self.stamps_in(np.arange(start, end + 1, self.months), first % DAY)

    def following(self, last: int, count: int) -> np.ndarray:
        """Return the ``count`` stamps after one."""
        start = month_of(np.array([last]))[0]
        return self.stamps_in(start + self.months * np.arange(1, count + 1), last % DAY)

    def stamps_in(self, months: np.ndarray, time: int | np.ndarray = 0) -> np.ndarray:
        """Return the stamps in ``months`` since 1970, at a time of the day."""
        start = months.astype("datetime64[M]").astype("datetime64[D]")
        end = (months + 1).astype("datetime64[M]").astype("datetime64[D]") - 1
        if self.place == "start":
            days = start
        elif self.place == "end":
            days = end
        elif self.place == "first":
            days = np.busday_offset(start, 0, roll="forward")
        elif self.place == "last":
            days = np.busday_offset(end, 0, roll="backward")
        else:
            days = np.minimum(start + (int(self.place) - 1), end)
        return days.astype(np.int64) * DAY + time

    @property
    def season(self) -> int:
        """Steps of a year."""
        return _whole(12, self.months) or 1

    def phases(self, stamps: np.ndarray) -> np.ndarray:
        """Return the phase of stamps in their season: the month, or the quarter."""
        return month_of(stamps) % 12 // self.months if self.season > 1 else stamps * 0


@dataclass(frozen=True)
class NumberCalendar:
    """Steps that are numbers, of no time."""

    step: int = 1
    name: str = field(default="step", init=False)
    season: int = field(default=1, init=False)

    def anchored(self, rows: np.ndarray) -> NumberCalendar:
        """Return the calendar."""
        return self

    def nearest(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows."""
        return rows

    def at_least(self, first: int, last: int) -> int:
        """Return the number of steps between two numbers."""
        return (last - first) // self.step

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the numbers from one to another."""
        return np.arange(first, last + 1, self.step)

    def following(self, last: int, count: int) -> np.ndarray:
        """Return the ``count`` numbers after one."""
        return last + self.step * np.arange(1, count + 1)

    def phases(self, stamps: np.ndarray) -> np.ndarray:
        """Return zeros: there is no season."""
        return np.zeros(len(stamps), int)


@dataclass(frozen=True)
class PandasCalendar:
    """Another calendar of pandas, such as ``SMS`` or ``WOM-3FRI``."""

    name: str
    offset: BaseOffset = field(compare=False)

    def anchored(self, rows: np.ndarray) -> PandasCalendar:
        """Return the calendar."""
        return self

    def nearest(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows."""
        return rows

    def at_least(self, first: int, last: int) -> int:
        """Return a number of steps between two stamps, as many or fewer, without making them."""
        import pandas as pd

        some = pd.date_range(pd.Timestamp(first, unit="us"), periods=9, freq=self.offset)
        return int((last - first) / max(1, (some[-1] - some[0]) / pd.Timedelta(1, "us")) * 4)

    def between(self, first: int, last: int) -> np.ndarray:
        """Return the stamps from one to another, if they are on the calendar."""
        import pandas as pd

        ends = (pd.Timestamp(one, unit="us") for one in (first, last))
        return microseconds(pd.date_range(*ends, freq=self.offset))

    def following(self, last: int, count: int) -> np.ndarray:
        """Return the ``count`` stamps after one."""
        import pandas as pd

        start = pd.Timestamp(last, unit="us")
        return microseconds(pd.date_range(start, periods=count + 1, freq=self.offset))[1:]

    @property
    def season(self) -> int:
        """Steps of a year: twice a month, or once."""
        return 24 if self.name.startswith("SM") else 12 if "WOM" in self.name else 1

    def phases(self, stamps: np.ndarray) -> np.ndarray:
        """Return the month of stamps, or zeros."""
        return month_of(stamps) % 12 if self.season > 1 else np.zeros(len(stamps), int)


Calendar = StepCalendar | MonthCalendar | NumberCalendar | PandasCalendar


def isin_ascending(stamps: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Return which of ``stamps`` are among ``ascending``: sooner than `numpy.isin` of many."""
    places = np.searchsorted(ascending, stamps)
    return ascending[np.minimum(places, len(ascending) - 1)] == stamps


def weekday(stamps: np.ndarray) -> np.ndarray:
    """Return the weekday of stamps, 0 is Monday; the first of 1970 was a Thursday."""
    return (stamps // DAY + 3) % 7


def month_of(stamps: np.ndarray) -> np.ndarray:
    """Return the month of stamps, counted from January 1970."""
    return (stamps // DAY).astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)


def microseconds(stamps: pd.Index) -> np.ndarray:
    """Return stamps as microseconds since 1970; nanoseconds overflow after 292 years."""
    return stamps.to_numpy("datetime64[us]").astype(np.int64)


def clock_text(time: int) -> str:
    """Return a time of the day in words: ``09:30``."""
    minutes, seconds = divmod(time // SECOND, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}" + (f":{seconds:02}" if seconds else "")


def _tick(step: int) -> str:
    """Return the name of a step of one length, in the longest unit that divides it."""
    unit, length = next(one for one in UNITS.items() if step % one[1] == 0)
    return f"{step // length if step > length else ''}{unit}"


def _spans(times: tuple[int, ...], step: int) -> list[str]:
    """Return times of the day in words, neighbors as one: ``09:00-11:00 13:00-16:00``."""
    if not times:
        return []
    breaks = [place for place, gap in enumerate(np.diff(times), 1) if gap != step]
    parts = [times[a:b] for a, b in zip([0, *breaks], [*breaks, len(times)], strict=True)]
    words = [(clock_text(part[0]), clock_text(part[-1])) for part in parts]
    return [first if first == last else f"{first}-{last}" for first, last in words]


def _whole(cycle: int, step: int) -> int:
    """Return the steps of a cycle, or 0 where they are no whole number."""
    return cycle // step if math.gcd(cycle, step) == step else 0
