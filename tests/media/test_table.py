"""Tables of series: what is read, repaired and said so, and refused by line and column."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide.core.errors import InputError, UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402


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


def test_a_series_without_values_is_left_out_and_named():
    table = read_table(frame(a=np.arange(10.0), empty=np.full(10, np.nan)))
    assert table.names == ("a",)
    assert table.notes == ("left out, without a single value: empty",)


def bad_files():
    good = [f"2026-01-{day:02},{day}" for day in range(1, 9)]
    yield ["date,v", *good[:3], "2026-01-04,four", *good[4:]], "line 5, column 'v': 'four' is no"
    yield ["date,v", *good[:3], "tomorrow,4", *good[4:]], "line 5, column 'date': 'tomorrow' is no"
    yield ["date,v", *good, good[2]], "2026-01-03 00:00:00 is there twice"
    yield ["date,v", *good, "2026-01-10 07:13,1"], "not evenly spaced"
    yield ["date,v", good[0]], "1 rows are too few"
    yield ["date,v"], "0 rows are too few"
    yield ["v", "1", "2"], "a column of dates"
    yield ["date,v", *(f"{line.split(',')[0]}," for line in good)], "no series has a single value"
    yield [""], "cannot be read as a table"
    yield ["n,v", "1,2", "2,3", "3,4"], "numbers where dates are expected"


@pytest.mark.parametrize(("lines", "words"), list(bad_files()))
def test_bad_files_are_refused_with_the_place(tmp_path, lines, words):
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=words) as caught:
        read_table(path)
    assert str(path) in caught.value.message


def test_an_unknown_column_is_refused():
    with pytest.raises(UsageError, match="no series 'c'"):
        read_table(frame(), columns=("c",))


def test_a_table_cut_anywhere_or_with_other_bytes_has_no_traceback(tmp_path):
    path, draw = tmp_path / "damaged.csv", np.random.default_rng(0)
    whole = frame(steps=30).to_csv(index=False).encode()
    for _ in range(200):
        damaged = bytearray(whole[: draw.integers(len(whole))])
        for place in draw.integers(0, max(len(damaged), 1), draw.integers(4)):
            if len(damaged):
                damaged[place] = draw.integers(256)
        path.write_bytes(damaged)
        try:
            table = read_table(path)
        except InputError:
            continue
        assert table.values.shape == (len(table.grid.stamps), len(table.names))
