"""Time zones of tables: stamps in a zone and in UTC, and the zone that stamps are midnights of."""

from __future__ import annotations

import datetime
import zoneinfo

import numpy as np

from lowtide.media.calendars import DAY, HOUR, microseconds
from lowtide.media.date_forms import NOT_A_TIME

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


def of_zone(name: str) -> datetime.tzinfo:
    """Return a zone of `zoneinfo`, which every stamp library takes."""
    return zoneinfo.ZoneInfo(name)


def in_zone(utc: np.ndarray, zone: str) -> np.ndarray:
    """Return stamps of UTC by the clock of a zone, in microseconds."""
    import pandas as pd

    index = pd.DatetimeIndex(utc.astype("datetime64[us]")).tz_localize("UTC")
    return microseconds(index.tz_convert(of_zone(zone)).tz_localize(None))


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
        if not (in_zone(some, name) % DAY).any() and not (in_zone(distinct, name) % DAY).any():
            return name
    return None
