"""Rows of the future, columns that are known ahead, and where each series ends."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide.core.errors import InputError, UsageError  # noqa: E402
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
    np.testing.assert_array_equal(table.known[:, 0], STAMPS.day_of_week > 4)
    assert table.grid.after(1)[0] == STAMPS[40]
    assert "10 rows after the last value are the future" in table.notes
    assert any("known ahead: holiday" in note for note in table.notes)


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
    with pytest.raises(InputError, match="'price', which is known ahead, has no value at step 3"):
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


def test_a_long_table_knows_what_is_alike_for_all():
    parts = [
        plan(holiday=STAMPS.day_of_week > 4, price=k).assign(unique_id=name)
        for k, name in enumerate("ab")
    ]
    long = pd.concat(parts).rename(columns={"date": "ds", "load": "y"})
    table = read_table(long)
    assert table.values.shape == (40, 2) and table.known_names == ("holiday",)
    np.testing.assert_array_equal(table.known[:, 0], STAMPS.day_of_week > 4)
    assert any("not one for all series at each step, not used: price" in one for one in table.notes)
