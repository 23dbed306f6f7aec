"""Dates of tables as spreadsheets, databases and statistics offices write them, and their zones."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide import InputError, UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402

DAYS = pd.date_range("2025-11-20", periods=60)
HOURS = pd.date_range("2025-11-20", periods=60, freq="h")
MONTHS = pd.date_range("2015-01-01", periods=40, freq="MS")


def table(tmp_path, stamps, **options):
    path = tmp_path / "dates.csv"
    path.write_text("date|v\n" + "\n".join(f"{one}|{k % 7}" for k, one in enumerate(stamps)))
    return read_table(path, TableOptions(**options))


@pytest.mark.parametrize(
    ("form", "stamps"),
    [
        *((form, DAYS) for form in ("%d-%b-%Y", "%b %d, %Y", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y")),
        *((form, DAYS) for form in ("%A, %B %d, %Y", "%a, %d %b %Y", "%d%b%Y", "%Y-%j", "%Y%j")),
        *((form, DAYS) for form in ("%Y/%m/%d", "%Y.%m.%d", "%Y%m%d")),
        *((form, HOURS) for form in ("%m/%d/%Y %I:%M %p", "%d/%m/%Y %I:%M:%S %p", "%Y%m%d%H")),
        *((form, HOURS) for form in ("%Y-%m-%d %H:%M:%S.000", "%d.%m.%Y %H:%M", "%Y%m%d %H%M")),
        *((form, MONTHS) for form in ("%B %Y", "%b-%y", "%m/%Y", "%m.%Y", "%Y/%m", "%Y%m")),
        *((form, MONTHS) for form in ("%YM%m", "%Y-M%m", "%Y-%m")),
        *((form, HOURS) for form in ("%a %b %d %H:%M:%S %Y", "%b %d %H:%M %Y", "%c")),
    ],
)
def test_usual_forms_are_read(tmp_path, form, stamps):
    assert list(table(tmp_path, stamps.strftime(form)).grid.stamps) == list(stamps)


@pytest.mark.parametrize(
    "form",
    [
        "%a %b %d %H:%M:%S UTC %Y",
        "%a %b %d %H:%M:%S +0000 %Y",
        "%a, %d %b %Y %H:%M:%S GMT",
        "%a %b %d %Y %H:%M:%S GMT+0000 (Coordinated Universal Time)",
    ],
)
def test_forms_of_programs_have_their_zone_anywhere(tmp_path, form):
    found = table(tmp_path, HOURS.strftime(form))
    assert list(found.grid.stamps) == list(HOURS) and found.grid.zone is not None


@pytest.mark.parametrize(
    "form",
    ["{y}Q{q}", "{y}-Q{q}", "Q{q} {y}", "{q}Q{y}", "{y}:Q{q}", "{q}. Quartal {y}", "T{q}-{y}"],
)
def test_quarters_are_their_first_day(tmp_path, form):
    quarters = pd.period_range("2000Q1", periods=30, freq="Q")
    found = table(tmp_path, [form.format(y=one.year, q=one.quarter) for one in quarters])
    assert list(found.grid.stamps) == list(quarters.to_timestamp())
    assert found.grid.season == 4
    frame = pd.DataFrame({"v": range(30)}, index=quarters)
    assert list(read_table(frame).grid.stamps) == list(quarters.to_timestamp())


def test_weeks_half_years_and_names_of_months_in_other_languages(tmp_path):
    mondays = pd.date_range("2020-01-06", periods=60, freq="7D")
    assert table(tmp_path, mondays.strftime("%G-W%V")).grid.frequency == "W-MON"
    assert table(tmp_path, [f"{2000 + k // 2}H{k % 2 + 1}" for k in range(20)]).grid.season == 2
    german = ["Jan", "Feb", "Mär", "Apr", "Mai", "Jun", "Jul", "Aug", "Sep", "Okt", "Nov", "Dez"]
    found = table(tmp_path, [f"1. {name} {year}" for year in (2020, 2021) for name in german])
    assert found.grid.frequency == "MS"


@pytest.mark.parametrize(
    ("numbers", "frequency", "words"),
    [
        (HOURS.as_unit("s").astype("int64"), "h", "seconds since 1970"),
        (HOURS.as_unit("ms").astype("int64"), "h", "milliseconds since 1970"),
        (HOURS.as_unit("ns").astype("int64"), "h", "nanoseconds since 1970"),
        (45981 + np.arange(60), "D", "Excel's days"),
        (np.round(45981 + np.arange(60) / 24, 6), "h", "Excel's days"),
        (np.arange(1, 61), "step", "numbers of steps"),
        (np.arange(0, 600, 10), "step", "numbers of steps"),
    ],
)
def test_numbers_are_what_they_can_be(tmp_path, numbers, frequency, words):
    for found in (
        table(tmp_path, numbers),
        read_table(pd.DataFrame({"t": numbers, "v": 1.0 + numbers % 7})),
    ):
        assert found.grid.frequency == frequency and words in found.notes[0]


def test_steps_are_gone_on_with(tmp_path):
    found = table(tmp_path, [1, 2, 3, 5, 6, 7], season=4)
    assert list(found.grid.after(2)) == [8, 9] and found.grid.season == 4
    assert "1 steps without a row count as missing values" in found.notes


@pytest.mark.parametrize("years", [(1, 40), (850, 890), (1500, 1899), (1650, 1700)])
def test_years_of_any_century(years):
    given = pd.DataFrame({"year": np.arange(*years), "rings": np.arange(*years) % 9.0})
    grid = read_table(given).grid
    assert grid.frequency == "YS-JAN" and grid.after(1)[0].year == years[1]


def test_old_months_and_days(tmp_path):
    months = [f"01.{k % 12 + 1:02}.{1650 + k // 12}" for k in range(40)]
    assert str(table(tmp_path, months).grid.after(1)[0])[:10] == "1653-05-01"
    assert table(tmp_path, np.arange("1650-01", "1652-01", dtype="M8[M]")).grid.frequency == "MS"


def test_what_could_be_either_is_refused_with_the_option(tmp_path):
    either = [f"01/{month:02}/2026" for month in range(1, 13)]
    with pytest.raises(InputError, match="day/month/year or month/day/year") as refused:
        table(tmp_path, either)
    assert "--day-first or --month-first" in refused.value.hint
    assert table(tmp_path, either, day_first=True).grid.frequency == "MS"
    assert table(tmp_path, either, day_first=False).grid.frequency == "D"
    assert table(tmp_path, either, date_format="%d/%m/%Y").grid.frequency == "MS"
    # One day, whichever way it is read.
    assert table(tmp_path, [f"01.01.2026 {hour:02}:00" for hour in range(24)]).grid.frequency == "h"


def test_a_format_can_be_told(tmp_path):
    odd = DAYS.strftime("%Y_%d_%m")
    with pytest.raises(
        InputError, match="line 2, column 'date': '2025_20_11' is no date"
    ) as refused:
        table(tmp_path, odd)
    assert "--date-format" in refused.value.hint
    assert list(table(tmp_path, odd, date_format="%Y_%d_%m").grid.stamps) == list(DAYS)
    with pytest.raises(
        InputError, match="line 2, column 'date': '2025_20_11' is not written as %Y"
    ):
        table(tmp_path, odd, date_format="%Y")
    for wrong in ("%Q", "unix"):
        with pytest.raises(UsageError, match="no date format"):
            table(tmp_path, odd, date_format=wrong)
    found = table(tmp_path, 20000 + np.arange(30), date_format="excel")
    assert found.grid.stamps[0] == pd.Timestamp("1954-10-03")


def written(table, steps=2):
    return [one.isoformat() for one in table.grid.with_zone(table.grid.after(steps))]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Sydney"])
def test_midnights_of_a_zone_in_utc_are_days(tmp_path, zone):
    local = pd.date_range("2025-01-01", periods=200, tz=zone)
    exported = local.tz_convert("UTC").strftime("%Y-%m-%dT%H:%M:%SZ")
    for options in ({}, {"timezone": zone}):
        found = table(tmp_path, exported, **options)
        assert list(found.grid.stamps) == list(local.tz_localize(None))
        assert zone in found.notes[0] and found.grid.frequency == "D"
    # In the zone of the input, or in the one that is asked for.
    ahead = pd.date_range(local[-1], periods=3, freq="D")[1:]
    assert [pd.Timestamp(one) for one in written(found)] == list(ahead)
    assert written(found)[0] == ahead[0].isoformat()
    assert written(table(tmp_path, exported))[0] == ahead[0].tz_convert("UTC").isoformat()


def test_results_are_in_the_zone_of_the_input(tmp_path):
    rome = pd.date_range("2026-03-28", periods=60, freq="h", tz="Europe/Rome")
    frame = pd.DataFrame({"ds": rome, "y": np.arange(60.0)})
    assert written(read_table(frame))[0] == "2026-03-30T13:00:00+02:00"
    fixed = [f"{one:%Y-%m-%d %H:%M}+05:30" for one in HOURS]
    assert written(table(tmp_path, fixed))[0] == "2025-11-22T12:00:00+05:30"
    utc = HOURS.strftime("%Y-%m-%d %H:%M:%S UTC")
    assert written(table(tmp_path, utc))[0] == "2025-11-22T12:00:00+00:00"


def test_clock_times_of_a_zone_that_is_told(tmp_path):
    autumn = pd.date_range("2025-10-25", periods=60, freq="h", tz="Europe/Berlin")
    naive = autumn.tz_localize(None)
    with pytest.raises(InputError, match="line 29, 2025-10-26 02:00:00 is there twice") as refused:
        table(tmp_path, naive)
    assert "--timezone" in refused.value.hint
    found = table(tmp_path, naive, timezone="Europe/Berlin")
    assert len(found.values) == 60 and written(found)[0] == "2025-10-27T11:00:00+01:00"
    with pytest.raises(
        InputError, match=r"line 4, .*no time of Europe/Berlin, whose clock skips it"
    ):
        table(tmp_path, pd.date_range("2025-03-30", periods=9, freq="h"), timezone="Europe/Berlin")
    with pytest.raises(UsageError, match="no time zone 'Mars/Olympus'"):
        TableOptions(timezone="Mars/Olympus")
