"""Rows of the future, columns that are known ahead, and where each series ends."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide import InputError, UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402

STAMPS = pd.date_range("2021-01-01", periods=50)


def plan(**columns):
    load = np.r_[np.arange(40.0), [np.nan] * 10]
    return pd.DataFrame({"date": STAMPS, "load": load, **columns})


@pytest.mark.parametrize("options", [{}, {"columns": ("load",)}, {"target": "load"}])
def test_rows_of_the_future_are_forecast_and_their_columns_known(options):
    table = read_table(plan(holiday=STAMPS.day_of_week > 4), TableOptions(**options))
    assert (table.names, table.values.shape) == (("load",), (40, 1))
    assert table.known_names == ("holiday",)
    np.testing.assert_array_equal(table.known[:, 0, 0], STAMPS.day_of_week > 4)
    assert table.grid.after(1)[0] == STAMPS[40]
    assert "10 rows after the last value are the future" in table.notes
    assert any("known ahead: holiday" in note for note in table.notes)


def test_a_row_that_is_missing_leaves_columns_known():
    table = read_table(plan(holiday=STAMPS.day_of_week > 4).drop(index=[5, 44]))
    assert table.known_names == ("holiday",) and table.values.shape == (40, 1)


def test_a_column_of_other_numbers_is_known_where_that_is_plain_or_told():
    given = plan(price=np.sin(np.arange(50)))
    assert read_table(given).known_names == ("price",)  # beside the load
    other = given.rename(columns={"load": "a"})
    table = read_table(other)
    assert table.names == ("a", "price") and list(table.ends) == [40, 50]
    assert any("--known price" in note for note in table.notes)
    assert [one[0] for one in table.ahead(1)] == [STAMPS[40], STAMPS[49] + pd.Timedelta("1D")]
    for options in ({"known": ("price",)}, {"target": "a"}, {"columns": ("a",)}):
        assert read_table(other, TableOptions(**options)).known_names == ("price",)
    with pytest.raises(
        InputError, match="row 2, column 'price', which is known ahead, has no value"
    ):
        read_table(
            other.assign(price=other["price"].mask(STAMPS.day_of_year == 3)),
            TableOptions(known=("price",)),
        )
    with pytest.raises(UsageError, match="no series 'rain'"):
        read_table(other, TableOptions(known=("rain",)))


def test_series_that_end_earlier_stay_series():
    ragged = {
        name: np.where(np.arange(50) < end, 1.0 * np.arange(50), np.nan)
        for name, end in (("a", 30), ("b", 45), ("c", 50))
    }
    table = read_table(pd.DataFrame({"date": STAMPS, **ragged}))
    assert table.names == ("a", "b", "c") and not table.known_names
    assert list(table.ends) == [30, 45, 50]
    assert [one[0] for one in table.ahead(2)] == [
        STAMPS[30],
        STAMPS[45],
        pd.Timestamp("2021-02-20"),
    ]


def stores(**columns):
    parts = [
        plan(holiday=STAMPS.day_of_week > 4, price=k + np.sin(np.arange(50)), **columns)
        for k in range(2)
    ]
    long = pd.concat(parts, keys=["a", "b"], names=["unique_id"]).reset_index("unique_id")
    return long.rename(columns={"date": "ds", "load": "y"}).reset_index(drop=True)


def test_series_of_a_long_table_have_what_is_known_of_each():
    table = read_table(stores())
    assert table.values.shape == (40, 2) and table.known_names == ("holiday", "price")
    for series in range(2):
        np.testing.assert_array_equal(table.known[:, series, 0], STAMPS.day_of_week > 4)
        np.testing.assert_array_equal(table.known[:, series, 1], series + np.sin(np.arange(50)))
    assert "20 rows after the last value are the future" in table.notes
    assert table.of_series([1]).known[0, 0, 1] == 1.0
    # Of what all series have alike, a row of one is enough.
    alike = read_table(stores().drop(columns="price").drop(index=range(45, 50)))
    assert alike.known.shape == (50, 1, 1) and np.isfinite(alike.known).all()


def test_series_of_a_long_table_have_futures_of_their_own():
    long = stores()
    long.loc[30:39, "y"] = np.nan  # a ends ten steps before b
    table = read_table(long.drop(index=range(45, 50)), TableOptions(known=("price",)))
    assert list(table.ends) == [30, 40] and table.known_names == ("price",)
    assert np.isfinite(table.known[:, :, 0]).sum(axis=0).tolist() == [45, 50]
    assert not read_table(stores().dropna()).known_names


def test_columns_of_a_long_table_that_are_not_known_are_named(tmp_path):
    long = stores(text="x")
    long.loc[[7, 47], "price"] = np.nan
    table = read_table(long)
    assert table.known_names == ("holiday",)
    assert any("not used: price (empty in 2 rows), text" in note for note in table.notes)
    path = tmp_path / "long.csv"
    long.to_csv(path, index=False)
    with pytest.raises(InputError, match="line 9, column 'price', which is known ahead, has no"):
        read_table(path, TableOptions(known=("price",)))
    with pytest.raises(UsageError, match="no column 'rain'"):
        read_table(path, TableOptions(known=("rain",)))


def test_the_values_of_a_long_table_are_what_ends_before_the_others():
    names = {"unique_id": "shop", "ds": "day", "y": "visitors", "price": "fee"}
    long = stores().rename(columns=names)
    assert read_table(long).columns == ("shop", "day", "visitors")
    with pytest.raises(InputError, match="several columns may be the values"):
        read_table(long.dropna())
