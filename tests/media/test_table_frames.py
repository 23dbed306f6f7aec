"""Tables that are objects: Series and frames of pandas, and frames that turn into them."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

import lowtide  # noqa: E402
from lowtide.core.errors import UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402

DAYS = pd.date_range("2024-01-01", periods=30)
VALUES = np.sin(np.arange(30.0))


@pytest.mark.parametrize(
    ("index", "after"),
    [
        (DAYS, "2024-01-31"),
        (pd.period_range("2020-01", periods=30, freq="M"), "2022-07-01"),
        (pd.period_range("2000Q1", periods=30, freq="Q"), "2007-07-01"),
        (DAYS.strftime("%Y-%m-%d"), "2024-01-31"),
        (pd.Index(range(1970, 2000), name="year"), "2000-01-01"),
    ],
)
def test_a_series_is_a_table_by_its_index(index, after):
    table = read_table(pd.Series(VALUES, index, name="load"))
    assert table.names == ("load",) and str(table.grid.after(1)[0])[:10] == after
    np.testing.assert_array_equal(table.values[:, 0], VALUES)


def test_series_without_a_name_or_of_several_series():
    assert read_table(pd.Series(VALUES, DAYS)).names == ("y",)
    both = pd.MultiIndex.from_product([["a", "b"], DAYS], names=["shop", "day"])
    assert read_table(pd.Series(np.tile(VALUES, 2), both)).columns == ("shop", "day", "y")
    assert read_table(pd.Series(VALUES), TableOptions(consecutive=True)).grid.frequency == "step"


class Foreign:
    """A frame of another library."""

    def __init__(self, made):
        self.made = made

    def to_pandas(self):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


class Lazy:
    def collect(self):
        raise AssertionError


def test_frames_of_other_libraries_are_read_as_those_of_pandas():
    frame = pd.DataFrame({"ds": DAYS, "y": VALUES})
    made = lowtide.forecast(Foreign(frame), horizon=2)
    assert made.frame.equals(lowtide.forecast(frame, horizon=2).frame)
    report = lowtide.backtest(Foreign(pd.Series(VALUES, DAYS)), horizons=[2], samples=10)
    assert report.series == 1


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (VALUES, "not of type ndarray", "pandas.DataFrame"),
        ({"y": [1]}, "not of type dict", "pandas.DataFrame"),
        (Lazy(), "not of type Lazy", "collect"),
        (pd.Series(VALUES), "a Series needs stamps as its index", "to_datetime"),
        (Foreign(pd.Series(VALUES)), "a Series needs stamps", "to_datetime"),
        (Foreign(ImportError("no pyarrow")), "a Foreign needs pyarrow", "forecast"),
    ],
)
def test_others_are_refused_by_their_type(data, message, hint):
    with pytest.raises(UsageError, match=message) as refused:
        lowtide.forecast(data, horizon=2)
    assert hint in refused.value.hint
