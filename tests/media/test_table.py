"""Tables of series: what is read, repaired and said so, and refused by line and column."""

import sys

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide import InputError, UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402


def frame(stamps="2026-01-01", steps=10, freq="h", **columns):
    stamps = pd.date_range(stamps, periods=steps, freq=freq)
    columns = columns or {"a": np.arange(steps) * 1.0, "b": np.arange(steps) * 2.0}
    return pd.DataFrame({"date": stamps, **columns})


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_wide_file_is_read(tmp_path, suffix):
    path, given = tmp_path / f"table{suffix}", frame()
    given.to_csv(path, index=False) if suffix == ".csv" else given.to_parquet(path)
    table = read_table(path)
    assert table.names == ("a", "b")
    assert table.grid.frequency == "h"
    np.testing.assert_array_equal(table.values, given[["a", "b"]].to_numpy())


@pytest.mark.parametrize("labels", [("unique_id", "ds", "y"), ("item_id", "timestamp", "target")])
def test_a_long_frame_gets_one_grid(labels):
    series, stamp, value = labels
    first, second = frame(steps=6), frame("2026-01-01 02:00", steps=6)
    long = pd.concat(
        pd.DataFrame({series: name, stamp: one["date"], value: one["a"]})
        for name, one in (("x", first), ("y", second))
    )
    table = read_table(long)
    assert table.columns == labels
    assert table.values.shape == (8, 2)
    np.testing.assert_array_equal(np.isnan(table.values[:, 0]), [False] * 6 + [True] * 2)
    np.testing.assert_array_equal(np.isnan(table.values[:, 1]), [True] * 2 + [False] * 6)


@pytest.mark.parametrize(
    ("freq", "season", "phase"),
    [
        ("h", 24, lambda stamps: stamps.hour),
        ("15min", 96, lambda stamps: stamps.hour),
        ("min", 60, lambda stamps: stamps.hour),
        ("D", 7, lambda stamps: stamps.day_of_week),
        ("B", 5, lambda stamps: stamps.day_of_week),
        ("W-WED", 52, lambda stamps: stamps.hour),
        ("MS", 12, lambda stamps: stamps.month - 1),
        ("ME", 12, lambda stamps: stamps.month - 1),
        ("QS-JAN", 4, lambda stamps: stamps.quarter - 1),
        ("YS-JAN", 1, lambda stamps: stamps.hour),
    ],
)
def test_the_frequency_is_found_and_continued(freq, season, phase):
    given = frame(freq=freq, steps=20)
    grid = read_table(given).grid
    stamps = pd.date_range(given["date"].iloc[-1], periods=4, freq=freq)[1:]
    assert grid.season == season
    assert list(grid.after(3)) == list(stamps)
    np.testing.assert_array_equal(grid.phases(stamps), phase(stamps))


def test_gaps_become_missing_values_that_are_told():
    table = read_table(frame().drop(index=[3, 4]))
    assert np.isnan(table.values[3:5]).all()
    assert table.notes == ("2 steps without a row count as missing values",)
    # With holes too, the name is the one that seasons go by.
    for freq, season in (("h", 24), ("D", 7), ("W-THU", 52), ("min", 60)):
        grid = read_table(frame(freq=freq).drop(index=[3, 4])).grid
        assert (grid.frequency, grid.season) == (freq, season)


def test_rows_are_put_in_order():
    table = read_table(frame().iloc[::-1])
    assert table.values[0, 0] == 0
    assert "order" in table.notes[0]


def test_years_are_dates():
    table = read_table(pd.DataFrame({"YEAR": np.arange(1700.0, 1720), "spots": np.arange(20.0)}))
    assert table.grid.frequency == "YS-JAN"
    assert table.grid.after(1)[0] == pd.Timestamp("1720-01-01")


def test_semicolons_decimal_commas_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "german.csv"
    rows = [f"2026-01-{day:02};{day},5" for day in range(1, 9)]
    path.write_text("\ufeffdate;value\n" + "\n".join(rows) + "\n", encoding="utf-8")
    assert read_table(path).values[0, 0] == 1.5


def test_points_and_tabs_of_tables_that_show_what_they_are(tmp_path):
    path = tmp_path / "points.csv"
    for separator in ";\t":
        rows = [f"2026-01-{day:02},1.500,{day}.25" for day in range(1, 9)]
        path.write_text("\n".join(["date,v,w", *rows]).replace(",", separator))
        np.testing.assert_array_equal(read_table(path).values[0], [1.5, 1.25])


def test_an_index_is_stamps_and_series_or_left_out(tmp_path):
    given, path = frame(), tmp_path / "table.csv"
    given.to_csv(path)
    table = read_table(path)
    assert table.names == ("a", "b")
    assert table.notes == ("left out, columns without a name, counted from 0: 0",)
    given.set_index("date").rename_axis(None).to_csv(path)
    assert read_table(path).names == ("a", "b")
    periods = given.set_index(pd.period_range("2020-01", periods=10, freq="M"))[["a"]]
    assert read_table(periods).grid.frequency == "MS"
    long = pd.DataFrame({"unique_id": "x", "ds": given["date"], "y": given["a"], "z": 1.0})
    for keys in ("unique_id", ["unique_id", "ds"]):
        table = read_table(long.set_index(keys))
        assert table.names == ("x",)
        assert table.notes == ("columns of a long table that are not used: z",)


def test_columns_that_are_no_numbers_or_have_one_name_are_refused():
    for column in (np.arange(10) * 1j, pd.to_timedelta(np.arange(10), "h")):
        with pytest.raises(InputError, match="'a' holds no numbers"):
            read_table(frame(a=column))
    with pytest.raises(InputError, match="row 1, column 'a': '1e4000000000' is too large"):
        read_table(frame(a=["1", "1e4000000000"] * 5))
    with pytest.raises(InputError, match="two columns are called '1'"):
        read_table(frame().set_axis(["date", 1, "1"], axis=1))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_stamps_of_any_unit_are_those_of_text(unit):
    stamps = pd.date_range("2026-01-01", periods=10, freq="h")
    wanted = read_table(frame().assign(date=stamps.astype(str))).grid
    found = read_table(frame().assign(date=stamps.as_unit(unit))).grid
    assert found.frequency == wanted.frequency and found.stamps.equals(wanted.stamps)


@pytest.mark.parametrize("year", [1, 990, 1676, 2263, 9985])
def test_years_are_from_1_to_9999(year):
    days = np.arange(f"{year:04}-01-01", f"{year:04}-01-11", dtype="datetime64[D]")
    for given in (days.astype("datetime64[s]"), days.astype(str)):
        grid = read_table(frame().assign(date=given)).grid
        assert grid.frequency == "D" and str(grid.after(1)[0])[:10] == f"{year:04}-01-11"
    years = read_table(
        frame().assign(date=np.arange(year, year + 10)).rename(columns={"date": "year"})
    )
    assert years.grid.frequency == "YS-JAN" and years.grid.after(2)[1].year == year + 11


def test_stamps_end_with_9999():
    table = read_table(pd.DataFrame({"year": range(9970, 9990), "a": range(20)}))
    with pytest.raises(InputError, match="15 steps after 9989-01-01 end after 9999"):
        table.grid.after(15)
    with pytest.raises(InputError, match="row 19, column 'year': 10000 is no date"):
        read_table(pd.DataFrame({"year": range(9981, 10001), "a": range(20)}))


def test_a_series_without_values_is_left_out_and_named():
    table = read_table(frame(a=np.arange(10.0), empty=np.full(10, np.nan)))
    assert table.names == ("a",)
    assert table.notes == ("left out, without a single value: empty",)


def bad_files():
    good = [f"2026-01-{day:02},{day}" for day in range(1, 9)]
    yield ["date,v", *good[:3], "2026-01-04,four", *good[4:]], "line 5, column 'v': 'four' is no"
    yield ["date,v", *good[:3], "tomorrow,4", *good[4:]], "line 5, column 'date': 'tomorrow' is no"
    # Where the rows are out of order, and lines are neither rows nor all of them.
    yield (
        ["", "date,v,w", *(f"{line},\n" for line in good[::-1]), f"{good[2]},"],
        r"line 19, 2026-01-03 00:00:00 is there twice, first in line 13",
    )
    yield (
        ["date,v,note", '2026-01-01,1,"two', 'lines"', "2026-01-02,x,"],
        "line 4, column 'v': 'x' is no number",
    )
    yield ["date,v", *good, '2026-01-09,"1,234"'], "line 10, column 'v': '1,234' has a thousands"
    yield ["date;v", "2026-01-01;1.234,5"], "line 2, column 'v': '1.234,5' has a thous"
    yield ["date;v", "2026-01-01;7", "2026-01-02;1.234"], "line 3, .*'1.234' may have a decimal"
    yield ["date;v;w", "2026-01-01;7,5;", "2026-01-02;x;2,5"], "line 3, column 'v': 'x' is no"
    yield ["date,v", *good, '2026-01-09,"1,5"'], "line 10, column 'v': '1,5' has a decimal comma"
    yield ["date,v", *good, "2026-01-09,1e200"], "'v' has values up to 1e\\+200"
    yield ["date,v", *good, "2026-01-09,1e4000000000"], "line 10: .* is out of all bounds"
    yield ["date,v, v", *(f"{line},1" for line in good)], "two columns are called 'v'"
    yield ["date,", *good], "no column but that of dates has a name"
    yield ["date,v", *good, "2026-01-10 07:13,1"], "not evenly spaced"
    yield ["date,v", "1700-01-01 00:00:00,1", "1700-01-01 00:00:01,2", "2200-01-01,3"], "evenly"
    yield ["date,v", good[0]], "1 rows are too few"
    yield ["date,v"], "0 rows are too few"
    yield ["v", "1", "2"], "a column of dates"
    yield ["date,v", *(f"{line.split(',')[0]}," for line in good)], "no series has a single value"
    yield [""], "cannot be read as a table"
    yield ["n,v", "1.5,2", "2,3", "3,4"], "line 2, column .n.: .1.5. is no date"
    yield good, "there is no header"
    yield ["date,v,v", *(f"{line},1" for line in good)], "two columns are called 'v'"
    yield ["date,v", *(f"{line},1" for line in good)], "cannot be read as a table"
    yield ["unique_id,ds,y", f"a,{good[0]}", f",{good[1]}"], "line 3, column 'unique_id' is empty"
    yield (
        ["date,v", *(f"0{day}/0{day % 2 + 1}/2026,1" for day in range(1, 9))],
        "day/month/year or month/day",
    )
    yield ["date,v", "01/02/2026,1", "01/03/2026,1", "31/31/2026,1"], "line 4, column 'date'"
    yield ["date,v", "2026-01-01 00:00Z,1", "2026-01-01 01:00,2"], "line 3, .* has no offset"
    hours = [f"2026-10-25 {hour:02}:00,1" for hour in (0, 1, 2, 2, 3)]
    yield ["date,v", *hours], "line 5, 2026-10-25 02:00:00 is there twice, first in line 4"


@pytest.mark.parametrize(("lines", "words"), list(bad_files()))
def test_bad_files_are_refused_with_the_place(tmp_path, lines, words):
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=words) as caught:
        read_table(path)
    assert str(path) in caught.value.message


def test_stamps_with_an_offset_are_of_utc_or_dates():
    """The nights when clocks change in Rome: evenly spaced hours, evenly spaced days."""
    rome = pd.date_range("2026-03-28", periods=60, freq="h", tz="Europe/Rome")
    for given in (rome, rome.strftime("%Y-%m-%d %H:%M%z"), rome.map(lambda one: one.isoformat())):
        table = read_table(pd.DataFrame({"date": given, "a": np.arange(60.0)}))
        assert table.grid.stamps[0] == pd.Timestamp("2026-03-27 23:00")
        assert (table.grid.frequency, len(table.values)) == ("h", 60)
        assert "converted to UTC" in table.notes[0]
    days = pd.date_range("2026-03-20", periods=20, freq="D", tz="Europe/Rome")
    for given in (days, days.map(lambda one: one.isoformat())):
        table = read_table(pd.DataFrame({"date": given, "a": np.arange(20.0)}))
        assert list(table.grid.stamps) == list(days.tz_localize(None))
        assert "count as dates" in table.notes[0]


def test_days_and_months_are_told_apart_by_their_distance():
    days = pd.date_range("2026-01-01", periods=12, freq="D")
    months = pd.date_range("2025-03-05", periods=12, freq="D")
    for stamps, form in (
        (days, "%d/%m/%Y"),
        (months, "%m.%d.%Y"),
        (days, "%d-%m-%Y 00:00"),
    ):
        written = pd.DataFrame({"date": stamps.strftime(form), "a": np.arange(12.0)})
        if form == "%d/%m/%Y":  # the firsts of twelve months as well
            with pytest.raises(InputError, match="day/month/year or month/day"):
                read_table(written)
            continue
        if form == "%d-%m-%Y 00:00":
            written = written.assign(date=(stamps + pd.Timedelta("9D")).strftime(form))
        table = read_table(written)
        assert table.grid.frequency == "D"
        assert "dates were read as" in table.notes[0]


def test_what_series_lack_is_told():
    values = np.arange(40.0).reshape(20, 2)
    values[:3, 0], values[-2:, 1], values[8, 1] = np.nan, np.nan, np.nan
    table = read_table(
        frame(steps=20, a=values[:, 0], b=values[:, 1], c=np.full(20, 4.0)).assign(
            d=np.where(np.arange(20) == 5, np.inf, np.arange(20))
        )
    )
    told = "; ".join(table.notes)
    assert "1 infinite values" in told
    assert "2 cells without a value" in told
    assert "1 series begin later than the table, in steps: a by 3" in told
    assert "1 series end before it, in steps: b by 2" in told
    assert "a single value throughout: c" in told


def test_series_of_another_frequency_are_refused():
    daily = np.where(np.arange(240) % 24 == 0, np.arange(240), np.nan)
    with pytest.raises(InputError, match="'b' has a value only once in 24 steps"):
        read_table(frame(steps=240, a=np.arange(240.0), b=daily))


@pytest.mark.slow
def test_a_million_rows_are_read(tmp_path):
    path = tmp_path / "long.csv"
    frame(steps=1_000_000, freq="min").to_csv(path, index=False)
    assert read_table(path).values.shape == (1_000_000, 2)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("1" * 140_000 + "x", "line 4, column 'y'.*….*x' is no number"),
        ('"' + "é\n" * 90_000, "cannot be read as a table"),
    ],
)
def test_a_cell_of_any_length_is_cut_short_and_its_line_named(tmp_path, cell, message):
    path = tmp_path / "long.csv"
    rows = [f"2024-01-0{day},{cell if day == 3 else day}" for day in range(1, 9)]
    path.write_text("date,y\n" + "\n".join(rows))
    with pytest.raises(InputError, match=message) as error:
        read_table(path)
    assert len(error.value.message) < 500


def test_names_of_any_length_are_cut_short(tmp_path):
    path, name = tmp_path / "names.csv", "n" * 200_000
    path.write_text(f"date,{name}\n2024-01-01,a\n")
    with pytest.raises(InputError, match=r"n … n.*is no number") as error:
        read_table(path)
    assert len(error.value.message) < 500
    path.write_text(f"date,y{',' * 100_000}\n2024-01-01,1\n")
    with pytest.raises(InputError, match="columns have no name"):
        read_table(path)


def test_whatever_a_reader_raises_is_a_refusal(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "odd.parquet"
    facts = pyarrow.Table.from_pandas(frame()).schema.metadata[b"pandas"].decode()
    odd = facts.replace('"name"', '"title"').encode()
    columns = pyarrow.Table.from_pandas(frame()).replace_schema_metadata({b"pandas": odd})
    parquet.write_table(columns, path)
    with pytest.raises(InputError, match=r"odd.parquet: cannot be read as a table \("):
        read_table(path)


def test_a_table_that_takes_more_than_there_is_is_refused_unread(tmp_path):
    pytest.importorskip("pyarrow")
    rows = 300_000
    stamps = np.full(rows, np.datetime64("2024-01-01", "ns"))
    pd.DataFrame({"date": stamps, "y": np.zeros(rows)}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="300,000 rows of 2 columns take up to"):
        read_table(tmp_path / "t.parquet", room=50 << 20)
    frame(steps=1000).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InputError, match=r"bytes take up to .* of memory, and there are 4.00 KiB"):
        read_table(tmp_path / "t.csv", room=4096)
    assert read_table(tmp_path / "t.csv", room=50 << 20).names


def test_an_unknown_column_is_refused():
    with pytest.raises(UsageError, match="no series 'c'"):
        read_table(frame(), TableOptions(columns=("c",)))


def test_damaged_files_are_read_or_refused(tmp_path):
    """Bytes changed, cells swapped, lines cut, repeated and moved: 200 files by seed."""
    draw, path = np.random.default_rng(0), tmp_path / "damaged.csv"
    whole = frame(steps=30).to_csv(index=False).encode()
    pieces = [b",", b'"', b"\n", b"\x00", b";", b"9999-12-31", b"1e400", b"nan", b"\xff", b"-"]
    read = 0
    for number in range(200):
        lines = whole.splitlines(keepends=True)
        one, other = draw.integers(len(lines), size=2)
        if number % 3 == 0:
            lines[one], lines[other] = lines[other], lines[one]
        if number % 3 == 1:
            lines.insert(one, lines[other])
        damaged = bytearray(b"".join(lines))
        for place in draw.integers(0, len(damaged), draw.integers(4)):
            damaged[place : place + draw.integers(3)] = pieces[draw.integers(len(pieces))]
        path.write_bytes(damaged[: draw.integers(len(damaged))] if number % 4 == 0 else damaged)
        try:
            table = read_table(path)
        except InputError as error:
            assert str(path) in error.message
            continue
        read += 1
        assert table.values.shape == (len(table.grid.stamps), len(table.names))
        assert not np.isinf(table.values).any()
    assert 20 < read < 180


def test_without_pandas_the_extra_is_named(tmp_path, monkeypatch):
    file = tmp_path / "table.csv"
    file.write_text("date,y\n2024-01-01,1\n")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pandas") as refused:
        read_table(file)
    assert refused.value.hint.endswith("pip install '.[forecast]'")


def test_a_list_is_no_table():
    with pytest.raises(UsageError, match="not of type list"):
        read_table([1.0, 2.0, 3.0])
