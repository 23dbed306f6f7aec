"""Regular time grids: frequency of stamps, gaps, seasons and what comes after."""

from __future__ import annotations

import datetime
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

# Calendar grids that have no fixed length of a step.
_CALENDAR = ("MS", "ME", "QS", "QE", "YS", "YE", "B")
# Steps of a season by pandas' name of a frequency, and the part of a date that is its phase.
_SEASONS = {
    "B": (5, "day_of_week"),
    "D": (7, "day_of_week"),
    "W": (52, None),
    "MS": (12, "month"),
    "ME": (12, "month"),
    "QS": (4, "quarter"),
    "QE": (4, "quarter"),
}
# Gaps that are more than this are no gaps.
_MOST_STEPS_PER_ROW = 4
_DAY_SECONDS, _LONGEST_SEASON = 86_400, 336


@dataclass(frozen=True)
class TimeGrid:
    """Evenly spaced stamps.

    Attributes:
        stamps: Stamps [T], ascending, without a gap.
        frequency: pandas' name of the distance: ``h``, ``15min``, ``D``, ``MS``, ``YS-JAN``, ...
    """

    stamps: pd.DatetimeIndex
    frequency: str

    @property
    def season(self) -> int:
        """Steps of the season that data of this frequency usually have; 1 for none."""
        seconds = _step_seconds(self.frequency)
        if seconds is not None and seconds < _DAY_SECONDS:
            day = _DAY_SECONDS // seconds
            return int(day if day <= _LONGEST_SEASON else max(1, 3600 // seconds))
        return _SEASONS.get(_base(self.frequency), (1, None))[0]

    @property
    def steps_per_day(self) -> int | None:
        """Steps of a day; None where a day is no whole number of them."""
        seconds = _step_seconds(self.frequency)
        whole = seconds is not None and seconds <= _DAY_SECONDS and not _DAY_SECONDS % seconds
        return int(_DAY_SECONDS // seconds) if seconds and whole else None

    def phases(self, stamps: pd.DatetimeIndex | None = None) -> np.ndarray:
        """Return the phase of stamps in their season, from 0: the hour of day, weekday or month."""
        stamps = self.stamps if stamps is None else stamps
        seconds = _step_seconds(self.frequency)
        if seconds is not None and seconds < _DAY_SECONDS:
            return stamps.hour.to_numpy()
        part = _SEASONS.get(_base(self.frequency), (1, None))[1]
        if part is None:
            return np.zeros(len(stamps), int)
        return getattr(stamps, part).to_numpy() - (part != "day_of_week")

    def after(self, steps: int) -> pd.DatetimeIndex:
        """Return the ``steps`` stamps after the last.

        Raises:
            InputError: Some of them are after 2262, where pandas' stamps end.
        """
        import pandas as pd

        try:
            return pd.date_range(self.stamps[-1], periods=steps + 1, freq=self.frequency)[1:]
        except (pd.errors.OutOfBoundsDatetime, OverflowError) as error:
            last = f"{self.stamps[-1]:%Y-%m-%d}"
            raise InputError(
                f"{steps:,} steps after {last} end after 2262, the last year of stamps"
            ) from error


def fit_grid(stamps: pd.DatetimeIndex, frequency: str | None = None) -> TimeGrid:
    """Return the grid that ascending, distinct ``stamps`` lie on, gaps filled.

    Args:
        stamps: Stamps of the rows that there are.
        frequency: pandas' name of the distance; None finds it.

    Raises:
        InputError: The stamps are of no grid, or not of the one that is asked for.
    """
    import pandas as pd

    if len(stamps) < 3:
        raise InputError(
            f"{len(stamps)} rows are too few for a forecast: their distance is unclear"
        )
    for name in [frequency] if frequency else _candidates(stamps):
        try:
            seconds = _step_seconds(name)
        except ValueError as error:
            raise InputError(
                f"frequency {name!r} is unknown", hint="--frequency h, 15min, D, W, MS or another"
            ) from error
        # Counted first: seconds over a century would take all memory, its working days seconds.
        span = int(_distances(stamps[[0, -1]])[0]) / 1e6
        least = seconds or (2 * _DAY_SECONDS if name == "B" else None)
        if least is not None and span / least > _MOST_STEPS_PER_ROW * len(stamps):
            continue
        full = pd.date_range(stamps[0], stamps[-1], freq=name)
        if len(full) <= _MOST_STEPS_PER_ROW * len(stamps) and stamps.isin(full).all():
            return TimeGrid(full, str(full.freqstr))
    raise InputError(
        _irregular(stamps, frequency),
        hint="resample the data, pass --frequency, or number the rows where nights are left out",
    )


def _candidates(stamps: pd.DatetimeIndex) -> list[str]:
    """Return the names of grids that the stamps may lie on: without gaps, then with some."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 warns that it will return an object
        inferred = pd.infer_freq(stamps)
    seconds = int(_distances(stamps).min()) / 1e6
    fixed = seconds >= 1 and seconds < 28 * _DAY_SECONDS
    # Named as pandas names them, "D" and not "86400s", because seasons go by the name.
    step = pd.Timedelta(seconds=int(seconds))
    offset = pd.tseries.frequencies.to_offset(step)  # pyright: ignore[reportArgumentType, reportCallIssue]
    names = [offset.freqstr] if fixed else []
    regular = [getattr(inferred, "freqstr", inferred)] if inferred is not None else []
    return [*regular, *names, *_CALENDAR]


def _irregular(stamps: pd.DatetimeIndex, frequency: str | None) -> str:
    """Return what is wrong with stamps of no grid, with the first that is."""
    distances = _distances(stamps)
    values, counts = np.unique(distances, return_counts=True)
    usual = values[counts.argmax()]
    odd = int((distances != usual).argmax())
    between = f"{stamps[odd]} and {stamps[odd + 1]}"
    wanted = f"{frequency} steps" if frequency else f"evenly spaced; most are {_words(usual)} apart"
    return f"the stamps are not {wanted}, but {_words(distances[odd])} lie between {between}"


def _distances(stamps: pd.DatetimeIndex) -> np.ndarray:
    """Return the microseconds between neighbors; nanoseconds overflow after 292 years."""
    return np.diff(stamps.to_numpy("datetime64[us]").astype(np.int64))


def _words(microseconds: int) -> str:
    return str(datetime.timedelta(microseconds=int(microseconds))).replace(", 0:00:00", "")


def _step_seconds(frequency: str) -> float | None:
    """Return the seconds of a step of fixed length, None for one of a calendar."""
    import pandas as pd

    offset = pd.tseries.frequencies.to_offset(frequency)
    return offset.nanos / 1e9 if isinstance(offset, pd.tseries.offsets.Tick) else None


def _base(frequency: str) -> str:
    """Return a frequency's name without anchor: ``W`` of ``W-SUN``; ``7D`` is a week."""
    seconds = _step_seconds(frequency)
    if seconds == 7 * _DAY_SECONDS:
        return "W"
    return frequency.split("-")[0]
