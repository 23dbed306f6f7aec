"""Regular time grids: the calendar that stamps lie on, gaps, seasons and what comes after.

A table's calendar is the one with the fewest empty steps. It has no steps on days of the week, or
at times of the day, that never occur in the table.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError
from lowtide.media.calendar_names import calendar_of
from lowtide.media.calendars import (
    DAY,
    PLACES,
    WEEK,
    Calendar,
    MonthCalendar,
    NumberCalendar,
    StepCalendar,
    isin_ascending,
    microseconds,
    month_of,
    weekday,
)

if TYPE_CHECKING:
    import pandas as pd

# Gaps that are more than this are no gaps, and steps that are looked at to find closed hours.
_MOST_STEPS_PER_ROW, _MOST_RAW_STEPS = 4, 64
# Shares of rows that may be left out, on weekdays that have a row so much less often than others;
# and that may be on another day of their week or month: weekends and holidays move them.
_MOST_LEFT_OUT, _RARE, _MOST_MOVED, _MOST_MOVED_TOLD = 0.05, 0.15, 0.35, 0.5
# Chances that days without a row are open all the same: of weekends, and of any others.
_WEEKEND_CHANCE, _CHANCE, _FEWEST_DAYS = 0.05, 0.01, 5
_MILLISECOND, _FEWEST_ROWS, _FEWEST_INFERRED = 1000, 2, 3
_SPARSE_HINT = "resample the data, name their calendar (--frequency), or count rows (--consecutive)"


@dataclass(frozen=True)
class StampZones:
    """Time zones of stamps: those that a grid is ``reckoned`` in, and that results are ``written``.

    Names are those of `zoneinfo`, or offsets such as ``UTC+02:00``.
    """

    reckoned: str | datetime.tzinfo
    written: str | datetime.tzinfo


@dataclass(frozen=True)
class TimeGrid:
    """Evenly spaced stamps.

    Attributes:
        stamps: Stamps [T], ascending, without a gap; numbers of steps where rows are counted.
        calendar: The rule by which they follow each other.
        zone: Zones of the stamps, which have none themselves; None where there is none.
        own_season: Steps of the season as a user said them.
    """

    stamps: pd.Index
    calendar: Calendar
    zone: StampZones | None = None
    own_season: int | None = None

    @property
    def numbers(self) -> np.ndarray:
        """The stamps in microseconds since 1970, or the numbers of steps [T]."""
        return self._numbers(self.stamps)

    @property
    def frequency(self) -> str:
        """Name of the distance: ``h``, ``15min``, ``D``, ``B``, ``MS``, ``YS-JAN``, ..."""
        return self.calendar.name

    @property
    def season(self) -> int:
        """Steps of the season that data of this calendar usually have; 1 for none."""
        return self.own_season or self.calendar.season

    @property
    def steps_per_day(self) -> int | None:
        """Steps of a day; None where a day is no whole number of them."""
        if not isinstance(self.calendar, StepCalendar) or DAY % self.calendar.step:
            return None
        return DAY // self.calendar.step

    def phases(self, stamps: pd.Index | None = None) -> np.ndarray:
        """Return the phase of stamps in their season, from 0: the hour of day, weekday or month."""
        found = self._numbers(self.stamps if stamps is None else stamps)
        return found * 0 if self.own_season == 1 else self.calendar.phases(found)

    def after(self, steps: int, end: int | None = None) -> pd.Index:
        """Return the ``steps`` stamps after the first ``end``, by default after all.

        Raises:
            InputError: Some of them are after 9999, where dates end.
        """
        end = len(self.stamps) if end is None else end
        inside = self._numbers(self.stamps[end : end + steps])
        last = int(self._numbers(self.stamps[-1:])[0])
        ahead = self.calendar.following(last, steps - len(inside))
        numbers = np.concatenate([inside, ahead])
        if not isinstance(self.calendar, NumberCalendar) and month_of(numbers[-1:])[0] // 12 > 8029:
            raise InputError(
                f"{steps:,} steps after {self.stamps[end - 1]:%Y-%m-%d} end after 9999"
            )
        return stamp_index(numbers, self.calendar)

    def with_zone(self, stamps: pd.Index) -> pd.Index:
        """Return stamps as results have them: in the zone of the table."""
        if self.zone is None:
            return stamps
        import pandas as pd

        first = np.ones(len(stamps), bool)  # of an hour that a clock repeats
        local = pd.DatetimeIndex(stamps).tz_localize(
            self.zone.reckoned, ambiguous=first, nonexistent="shift_forward"
        )
        return local.tz_convert(self.zone.written)

    def label(self, step: int) -> str:
        """Return a stamp as text that sorts as stamps do: ISO 8601, or the number."""
        stamp = self.stamps[step]
        return str(stamp) if isinstance(self.calendar, NumberCalendar) else stamp.isoformat()

    def _numbers(self, stamps: pd.Index) -> np.ndarray:
        if isinstance(self.calendar, NumberCalendar):
            return stamps.to_numpy(np.int64)
        return microseconds(stamps)


def stamp_index(numbers: np.ndarray, calendar: Calendar | None = None) -> pd.Index:
    """Return microseconds since 1970 as an index of stamps: of nanoseconds where they fit."""
    import pandas as pd

    if isinstance(calendar, NumberCalendar):
        return pd.Index(numbers.astype(np.int64))
    stamps, bound = numbers.astype("datetime64[us]"), np.iinfo(np.int64).max // 1000
    fits = not len(numbers) or (numbers.min() > -bound and numbers.max() < bound)
    return pd.DatetimeIndex(stamps.astype("datetime64[ns]") if fits else stamps)


def fit_grid(stamps: pd.Index, frequency: str | None = None) -> TimeGrid:
    """Return the grid that ascending, distinct ``stamps`` lie on, gaps filled.

    Args:
        stamps: Stamps of the rows that there are, or whole numbers.
        frequency: Name of the distance; None finds it.

    Raises:
        InputError: The stamps are of no grid, or not of the one that is asked for.
        UsageError: There is no such frequency.
    """
    import pandas as pd

    counted = not isinstance(stamps, pd.DatetimeIndex)
    given = calendar_of(frequency) if frequency else None
    if len(stamps) < _FEWEST_ROWS:
        raise InputError(
            f"{len(stamps)} rows are too few for a forecast: their distance is unclear"
        )
    rows = stamps.to_numpy(np.int64) if counted else microseconds(stamps)
    if counted:
        candidates: Iterator[Calendar] = iter([NumberCalendar(int(np.gcd.reduce(np.diff(rows))))])
    else:
        candidates = iter([given.anchored(rows)]) if given else _candidates(rows)
    most = _MOST_MOVED_TOLD if given else _MOST_MOVED
    grids = [(grid, one) for one in candidates if (grid := _filled(rows, one, most)) is not None]
    if not grids:
        raise InputError(_irregular(stamps, rows, given), hint=_SPARSE_HINT)
    numbers, calendar = min(grids, key=lambda one: _cost(rows, one[0]))  # the first of equals
    return TimeGrid(stamp_index(numbers, calendar), calendar)


def _filled(rows: np.ndarray, calendar: Calendar, most_moved: float) -> np.ndarray | None:
    """Return all steps of a calendar from the first to the last of ``rows``.

    None where it has too many steps, or more than these shares of the rows are not on it.
    """
    moved = calendar.nearest(rows)
    if (np.diff(moved) <= 0).any() or (moved != rows).mean() > most_moved:
        return None
    first, last = int(moved[0]), int(moved[-1])
    most = _MOST_STEPS_PER_ROW * len(rows)
    # Counted first: seconds over a century would take all memory.
    if calendar.at_least(first, last) > most:
        return None
    full = calendar.between(first, last)
    if not _FEWEST_ROWS <= len(full) <= most:
        return None
    return full if isin_ascending(moved, full).mean() >= 1 - _MOST_LEFT_OUT else None


def _cost(rows: np.ndarray, full: np.ndarray) -> int:
    """Return the steps of a grid, and the rows that are not on it as they are."""
    return len(full) + int((~isin_ascending(rows, full)).sum())


def _candidates(rows: np.ndarray) -> Iterator[Calendar]:
    """Yield calendars that rows may lie on; of those with as many steps the first counts."""
    import pandas as pd

    distances = np.diff(rows)
    step = int(np.gcd.reduce(distances))
    days = step % DAY == 0
    if step >= 28 * DAY:  # of two rows a month apart, four weeks are chance
        yield from _months(rows)
    # Less than a day: steps that never follow one another are none.
    if days or (step == distances.min() and step % _MILLISECOND == 0):
        whole = StepCalendar(step).anchored(rows)
        if step < 28 * DAY or not step % WEEK:
            yield whole
        if DAY % step == 0 or (days and step < WEEK):
            yield _open_steps(rows, min(step, DAY))
        if days:
            weeks = StepCalendar(WEEK).anchored(rows)
            apart = np.diff(weeks.nearest(rows)) // WEEK
            if apart.all():
                yield replace(weeks, step=int(np.gcd.reduce(apart)) * WEEK)
            often = _open_weekdays(rows // DAY, but_rare=True)
            if len(often) > 1:
                yield StepCalendar(DAY, often)
    if step < 28 * DAY:
        yield from _months(rows)
    stamps = pd.DatetimeIndex(stamp_index(rows))
    if stamps.dtype != "datetime64[ns]" or len(stamps) < _FEWEST_INFERRED:
        return  # pandas' own calendars are of the years that it has nanoseconds for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 warns that it will return an object
        inferred = pd.infer_freq(stamps)
    if inferred is not None:
        yield calendar_of(getattr(inferred, "freqstr", inferred)).anchored(rows)
    else:
        yield from (calendar_of(name) for name in ("SMS", "SME"))


def _months(rows: np.ndarray) -> Iterator[Calendar]:
    """Yield the calendars of months that most rows lie on, at one time of the day."""
    months, times = month_of(rows), rows % DAY
    distances = np.diff(months)
    if not distances.all() or (times != times[0]).any():
        return
    length = int(np.gcd.reduce(distances))
    start = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) * DAY
    latest = int(((rows - start) // DAY).max()) + 1
    found = [MonthCalendar(length, place).anchored(rows) for place in (*PLACES, latest)]
    yield from sorted(found, key=lambda one: int((one.nearest(rows) != rows).sum()))


def _open_steps(rows: np.ndarray, step: int) -> Calendar:
    """Return steps without the weekdays, and times of the day, that never occur."""
    weekdays = _open_weekdays(np.unique(rows // DAY))
    if step == DAY:
        return StepCalendar(DAY, weekdays)
    first, last = int(rows[0]), int(rows[-1])
    if (last - first) / step > _MOST_RAW_STEPS * len(rows):
        return StepCalendar(step, weekdays)
    times, counts = np.unique(
        StepCalendar(step, weekdays).between(first, last) % DAY, return_counts=True
    )
    seen = np.isin(times, np.unique(rows % DAY))
    empty = 1 - len(rows) / (counts[seen].sum() + 1)
    # Of many times one is empty by chance sooner, and an outage takes many at once.
    chance = len(times) * empty ** counts.astype(float)
    is_open = seen | (chance > _CHANCE) | (counts < _FEWEST_DAYS)
    return StepCalendar(step, weekdays, () if is_open.all() else tuple(times[is_open].tolist()))


def _open_weekdays(days: np.ndarray, *, but_rare: bool = False) -> tuple[int, ...]:
    """Return the weekdays but those of which too many never occur to be open by chance.

    The chance is that of the empty days among the weekdays that occur. With ``but_rare`` weekdays
    with next to no row are closed too: exchanges open on some Saturdays.
    """
    every = np.arange(days[0], days[-1] + 1)
    steps, seen = (np.bincount(weekday(one * DAY), minlength=7) for one in (every, days))
    if but_rare:
        shares = seen / np.maximum(steps, 1)
        rare = np.flatnonzero(shares <= _RARE * shares.max())
        days = days[~np.isin(weekday(days * DAY), rare)]
        seen = np.bincount(weekday(days * DAY), minlength=7)
    empty = 1 - len(days) / (steps[seen > 0].sum() + 1)
    never = {day for day in range(7) if steps[day] and not seen[day]}
    closed = {day for day in never if empty ** int(steps[day]) <= _CHANCE}
    if {5, 6} <= never and empty ** int(steps[5] + steps[6]) <= _WEEKEND_CHANCE:
        closed |= {5, 6}
    return tuple(day for day in range(7) if day not in closed)


def _irregular(stamps: pd.Index, rows: np.ndarray, given: Calendar | None) -> str:
    """Return what is wrong with stamps of no grid, with the first row that spoils one."""
    import pandas as pd

    distances = np.diff(rows)
    values, counts = np.unique(distances, return_counts=True)
    usual, least = int(values[counts.argmax()]), int(np.gcd.reduce(distances))
    usual = least if given is None and least == values[0] else usual
    wanted = f"{given.name} steps" if given else "evenly spaced"
    off = _first_off(rows, given, usual)
    if off is None:
        share = len(rows) / max(1, (int(rows[-1]) - int(rows[0])) / usual)
        words = _words(usual) if isinstance(stamps, pd.DatetimeIndex) else f"{usual:,}"
        step = "such steps" if given else f"steps of {words}"
        return f"the stamps are not {wanted}: of {step} only {share:.0%} have a row"
    near = off - 1 if off else 1
    apart = _words(abs(int(rows[off] - rows[near])))
    most = "" if given else f"; most are {_words(usual)} apart"
    return f"the stamps are not {wanted}{most}, but {stamps[off]} is {apart} from {stamps[near]}"


def _first_off(rows: np.ndarray, given: Calendar | None, usual: int) -> int | None:
    """Return the first row that is not where most are: on a calendar, or by distance."""
    if given is not None:
        anchored = given.anchored(rows)
        if anchored.at_least(int(rows[0]), int(rows[-1])) > 100 * len(rows):
            return None
        off = ~np.isin(rows, anchored.between(int(rows[0]), int(rows[-1])))
        return int(off.argmax()) if off.any() else None
    if 28 * DAY <= usual <= 366 * DAY:
        days = rows // DAY
        place = days - month_of(rows).astype("datetime64[M]").astype("datetime64[D]").astype(int)
    else:
        place = rows % usual
    values, counts = np.unique(place, return_counts=True)
    off = place != values[counts.argmax()]
    return int(off.argmax()) if off.any() else None


def _words(time: int) -> str:
    return str(datetime.timedelta(microseconds=int(time))).replace(", 0:00:00", "")
