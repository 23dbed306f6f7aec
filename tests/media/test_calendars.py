"""Calendars of tables: the one with the fewest empty steps, and none on days that never occur."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide import InputError, UsageError  # noqa: E402
from lowtide.media.calendar_names import calendar_of  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402


def table(stamps, frequency=None):
    given = pd.DataFrame({"date": stamps, "v": np.arange(len(stamps)) % 7.0})
    return read_table(given, TableOptions(frequency=frequency))


@pytest.mark.parametrize(
    ("frequency", "season"),
    [
        ("h", 24),
        ("15min", 96),
        ("10s", 6),
        ("100ms", 1),
        ("7h", 24),
        ("D", 7),
        ("B", 5),
        ("W-WED", 52),
        ("2W-SUN", 26),
        ("MS", 12),
        ("ME", 12),
        ("BMS", 12),
        ("BME", 12),
        ("2MS", 6),
        ("QS-FEB", 4),
        ("QE-NOV", 4),
        ("BQE-DEC", 4),
        ("YS-APR", 1),
        ("YE-JUN", 1),
        ("SMS-15", 24),
        ("WOM-3FRI", 12),
    ],
)
def test_gaps_change_neither_the_calendar_nor_its_season(frequency, season):
    whole = pd.date_range("1990-01-01", periods=120, freq=frequency)
    for told in (None, frequency):
        grid = table(whole.delete([30, 31, 60]), told).grid
        assert (grid.frequency, grid.season, len(grid.stamps)) == (frequency, season, 120)
        ahead = pd.date_range(whole[-1], periods=4, freq=frequency)[1:]
        assert list(grid.after(3)) == list(ahead)


def test_weekdays_with_holidays_are_weekdays():
    days = pd.date_range("2021-01-01", periods=300, freq="B").delete([65, 106, 255])
    found = table(days)
    assert (found.grid.frequency, found.grid.season) == ("B", 5)
    assert found.notes == ("3 steps without a row count as missing values",)
    # Two weeks show it, and one does not: nobody knows what comes on Saturday.
    assert table(days[:10].delete(4)).grid.frequency == "B"
    assert table(days[1:6]).grid.frequency == "D"


@pytest.mark.parametrize(
    "days", ["Mon Tue Wed Thu Fri Sat", "Mon Tue Wed Thu Sun", "Tue Thu", "Mon Wed Fri"]
)
def test_days_that_never_occur_are_in_no_forecast(days):
    every = pd.date_range("2021-01-04", periods=400)
    kept = every[[one.strftime("%a") in days for one in every]].delete([5, 40])
    for told in (None, days):
        grid = table(kept, told).grid
        assert grid.frequency == days and grid.season == len(days.split())
        assert {one.strftime("%a") for one in grid.after(20)} == set(days.split())


def test_a_day_that_is_missing_by_chance_is_open():
    days = pd.date_range("2021-01-04", periods=10)
    assert table(days.delete(4)).grid.frequency == "D"
    draw = np.random.default_rng(0)
    sparse = pd.date_range("2021-01-01", periods=400)[draw.random(400) < 0.4]
    found = table(sparse)
    assert found.grid.frequency == "D" and "% of " in found.notes[0]


def test_closed_hours_are_in_no_forecast():
    hours = pd.date_range("2021-01-01", periods=24 * 60, freq="h")
    market = hours[
        (hours.day_of_week < 5) & (hours.hour >= 9) & (hours.hour < 17) & (hours.hour != 12)
    ]
    name = "h Mon Tue Wed Thu Fri 09:00-11:00 13:00-16:00"
    for told in (None, name):
        found = table(market, told)
        assert (found.grid.frequency, found.grid.season) == (name, 7)
        assert not found.notes
        assert list(found.grid.after(2)) == [
            pd.Timestamp("2021-03-02 09:00"),
            pd.Timestamp("2021-03-02 10:00"),
        ]
    # Half a night without a row is an outage.
    assert table(hours[:100].delete(range(50, 56))).grid.frequency == "h"


def test_rows_that_holidays_move_are_those_of_their_week_or_month():
    weeks = pd.date_range("2020-01-06", periods=60, freq="7D").to_list()
    weeks[10] += pd.Timedelta("1D")
    weeks[20] -= pd.Timedelta("3D")
    found = table(weeks)
    assert found.grid.frequency == "W-MON" and len(found.values) == 60
    assert "2 rows on other days count as those of W-MON: 2020-03-17, 2020-05-22" in found.notes
    days = pd.bdate_range("2018-01-01", "2021-12-31").difference(pd.to_datetime(["2018-03-30"]))
    last = pd.Series(days).groupby(days.to_period("M")).max().to_list()
    found = table(last)
    assert found.grid.frequency == "BME" and "2018-03-29" in found.notes[0]
    months = pd.date_range("2018-01-15", periods=40, freq="MS") + pd.Timedelta("14D")
    before = [one - pd.Timedelta(max(0, one.weekday() - 4), "D") for one in months]
    assert table(before).grid.frequency == "MS-15"


def test_rare_days_are_left_out_and_named():
    days = pd.bdate_range("2021-01-01", periods=300)
    saturdays = pd.to_datetime(["2021-02-06", "2021-11-06"])
    found = table(days.union(saturdays))
    assert (found.grid.frequency, len(found.values)) == ("B", 300)
    assert found.notes == ("left out, 2 rows on other days than B: 2021-02-06, 2021-11-06",)


def test_the_fifteenth_of_each_month_and_what_weekly_means():
    months = pd.date_range("2010-01-01", periods=40, freq="MS") + pd.Timedelta("14D")
    for told in (None, "MS-15"):
        grid = table(months.delete([3, 4]), told).grid
        assert (grid.frequency, grid.season) == ("MS-15", 12)
        assert grid.after(1)[0] == pd.Timestamp("2013-05-15")
    mondays = pd.date_range("2021-01-04", periods=40, freq="7D")
    for told in ("W", "W-MON", "Mon", "7D"):
        assert table(mondays, told).grid.frequency == "W-MON"
    quarters = pd.date_range("2010-02-01", periods=40, freq="QS-FEB")
    assert table(quarters, "QS").grid.frequency == "QS-FEB"
    with pytest.raises(InputError, match="not QS-JAN steps"):
        table(quarters, "QS-JAN")


@pytest.mark.parametrize(
    ("one", "other"),
    [("24h", "D"), ("60min", "h"), ("C", "B"), ("M", "ME"), ("H", "h"), ("QS-OCT", "QS-JAN")],
)
def test_one_calendar_has_several_names(one, other):
    assert calendar_of(one).name == calendar_of(other).name


@pytest.mark.parametrize("frequency", ["h", "D", "W-MON", "MS", "ME", "QS-FEB", "YS-APR"])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_two_rows_have_a_distance(frequency, rows):
    stamps = pd.date_range("2021-01-04", periods=rows, freq=frequency)
    grid = table(stamps).grid
    assert grid.frequency == frequency and len(grid.stamps) == rows


def test_a_change_of_distance_is_told():
    quarters = pd.date_range("1970-01-01", "1978-10-01", freq="QS").map(
        pd.offsets.BDay().rollforward
    )
    found = table(quarters.union(pd.bdate_range("1979-01-01", periods=3000)))
    assert found.grid.frequency == "B"
    assert "from 1970-01-01 to 1979-01-01 rows are about 65 steps apart" in found.notes[-1]


def test_rows_that_spoil_a_calendar_are_named():
    days = pd.date_range("2026-01-01", periods=9).to_list()
    with pytest.raises(InputError, match="most are 1 day apart, but 2026-01-10 07:13:00 is"):
        table([*days, pd.Timestamp("2026-01-10 07:13")])
    with pytest.raises(InputError, match="of steps of 1 day only 11% have a row"):
        table(pd.date_range("2026-01-01", periods=300)[np.random.default_rng(1).random(300) < 0.1])
    with pytest.raises(UsageError, match="'fortnight' is unknown"):
        table(days, "fortnight")


@pytest.mark.parametrize(("season", "steps"), [("none", 1), (1, 1), (12, 12), ("365", 365)])
def test_a_season_can_be_told(season, steps):
    given = pd.DataFrame({"date": pd.date_range("2021-01-01", periods=20), "v": range(20)})
    assert read_table(given, TableOptions(season=season)).grid.season == steps


@pytest.mark.parametrize("season", [0, -1, "x", "1.5"])
def test_a_season_is_a_number_of_steps(season):
    with pytest.raises(UsageError, match="season"):
        TableOptions(season=season)
