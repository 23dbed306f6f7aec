"""Columns of tables: names as text, dates and values by content, and what is left out."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide import InputError, UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402

DAYS = pd.date_range("2021-01-01", periods=30)


def long(names, ids=("a", "b"), **more):
    series, stamp, value = names
    rows = {series: np.repeat(list(ids), 30), stamp: np.tile(DAYS, len(ids))}
    return pd.DataFrame({**rows, value: np.arange(30.0 * len(ids)), **more})


@pytest.mark.parametrize(
    "ids", [("001", "002", "010"), ("01", "1"), ("NA", "US"), ("1.0", "1"), ("null", "True")]
)
@pytest.mark.parametrize("names", [("unique_id", "ds", "y"), ("plu", "day", "sold")])
def test_names_of_series_are_as_written(tmp_path, ids, names):
    path = tmp_path / "long.csv"
    long(names, ids).to_csv(path, index=False)
    table = read_table(path)
    assert sorted(table.names) == sorted(ids)
    assert table.columns == names


@pytest.mark.parametrize(
    "names",
    [
        ("store", "date", "sales"),
        ("series_id", "date", "value"),
        ("Unique_ID", "DS", "Y"),
        ("symbol", "timestamp", "close"),
        ("Filiale", "Tag", "Umsatz"),
    ],
)
def test_other_names_are_found_by_content(names):
    table = read_table(long(names))
    assert table.names == ("a", "b") and table.columns == names
    told = any("a long table" in note for note in table.notes)
    assert told


def test_several_readings_are_refused_with_the_option_that_settles_it():
    two_values = long(("shop", "day", "x"), z=1.0)
    with pytest.raises(InputError, match=r"several columns may be the values.*: x, z") as refused:
        read_table(two_values)
    assert refused.value.hint == "--target x"
    assert read_table(two_values, TableOptions(target="z")).columns[2] == "z"
    nested = pd.concat([long(("store", "date", "sales"), (1, 2)).assign(item=k) for k in (7, 8)])
    with pytest.raises(InputError, match="name series together: store, item") as refused:
        read_table(nested)
    assert refused.value.hint == "--id-column store,item"
    table = read_table(nested, TableOptions(id_column="store,item"))
    assert table.names == ("1/7", "1/8", "2/7", "2/8")
    either = long(("k", "date", "sales"), ("p", "q"))
    either["m"] = np.where(
        np.arange(60) % 30 < 15, either["k"], either["k"].map({"p": "q", "q": "p"})
    )
    with pytest.raises(InputError, match="several columns may be names of series: k, m"):
        read_table(either)
    with pytest.raises(InputError, match="is there twice, first in row 0") as refused:
        read_table(pd.DataFrame({"date": [*DAYS, *DAYS], "y": np.arange(60.0)}))
    assert "--id-column" in refused.value.hint
    for options in ({"id_column": "none"}, {"time_column": "none"}):
        with pytest.raises(UsageError, match="there is no column 'none'"):
            read_table(two_values, TableOptions(**options))


def test_series_of_a_long_table_are_chosen_by_their_names():
    given = long(("store", "date", "sales"), ("a", "b", "c"))
    assert read_table(given, TableOptions(columns=("c", "a"))).names == ("c", "a")
    with pytest.raises(UsageError, match="no series 'd'"):
        read_table(given, TableOptions(columns=("d",)))


def test_two_columns_that_name_the_same_series_are_one_reading():
    table = read_table(long(("symbol", "date", "close"), company=np.repeat(["A Inc", "B Inc"], 30)))
    assert table.columns[0] == "symbol"


@pytest.mark.parametrize("options", [{}, {"columns": ("load",)}, {"target": "load"}])
def test_columns_without_numbers_are_left_out(options):
    given = pd.DataFrame({"date": DAYS, "load": np.arange(30.0), "weekday": DAYS.day_name()})
    table = read_table(given, TableOptions(**options))
    assert table.names == ("load",)
    assert "left out, columns without numbers: weekday" in table.notes
    with pytest.raises(InputError, match="row 0, column 'weekday': 'Friday' is no number"):
        read_table(given, TableOptions(columns=("weekday",)))


def test_only_wanted_columns_are_judged():
    given = pd.DataFrame({"date": DAYS, "load": np.arange(30.0), "wind": [*range(29), "four"]})
    assert read_table(given, TableOptions(columns=("load",))).names == ("load",)
    with pytest.raises(InputError, match="row 29, column 'wind': 'four' is no number"):
        read_table(given)


def test_yes_and_no_are_one_and_zero(tmp_path):
    path = tmp_path / "flags.csv"
    rows = [f"{day:%Y-%m-%d},{'yes' if k % 7 else 'No'},{k % 2 == 0}" for k, day in enumerate(DAYS)]
    path.write_text("date,promo,even\n" + "\n".join(rows))
    table = read_table(path)
    np.testing.assert_array_equal(table.values[:, 0], np.arange(30) % 7 > 0)
    np.testing.assert_array_equal(table.values[:, 1], np.arange(30) % 2 == 0)
    frame = pd.DataFrame({"date": DAYS, "holiday": DAYS.day_of_week > 4})
    np.testing.assert_array_equal(read_table(frame).values[:, 0], DAYS.day_of_week > 4)


def test_words_for_no_value_are_missing_and_told(tmp_path):
    path = tmp_path / "offices.csv"
    words = ["--", "NM", "?", ".", "missing", "-", "n/a", ""]
    rows = [f"{day:%Y-%m-%d},{words[k] if k < 8 else k}" for k, day in enumerate(DAYS)]
    path.write_text("date,v\n" + "\n".join(rows))
    table = read_table(path)
    assert np.isnan(table.values[:8]).all() and table.values[8, 0] == 8
    assert any("6 cells count as missing: '--', 'NM', '?'" in note for note in table.notes)


def test_dates_in_several_columns_are_one():
    year = pd.DataFrame({"Year": np.repeat([2020, 2021], 12), "Month": [*range(1, 13)] * 2})
    table = read_table(year.assign(Sales=range(24)))
    assert (table.grid.frequency, table.names) == ("MS", ("Sales",))
    quarter = pd.DataFrame({"year": np.repeat(range(2000, 2010), 4), "quarter": [1, 2, 3, 4] * 10})
    assert read_table(quarter.assign(gdp=range(40))).grid.frequency == "QS-JAN"
    hours = pd.DataFrame({"Date": np.repeat(DAYS[:3].astype(str), 24), "Hour": [*range(1, 25)] * 3})
    table = read_table(hours.assign(load=range(72)))
    assert table.grid.frequency == "h" and table.grid.stamps[-1] == pd.Timestamp("2021-01-04")
    told = year.rename(columns={"Year": "a", "Month": "b"}).assign(Sales=range(24))
    assert read_table(told, TableOptions(time_column="a,b")).grid.frequency == "MS"


def test_dates_are_found_where_they_are():
    given = pd.DataFrame({"v": np.arange(30) + 0.5, "when": DAYS.astype(str)})
    assert read_table(given).names == ("v",)
    with pytest.raises(InputError, match="several columns are of dates: when, until") as refused:
        read_table(given.assign(v="a", until=given["when"], w=1.0))
    assert refused.value.hint == "--time-column when"


def test_rows_are_counted_where_that_is_asked_for(tmp_path):
    path = tmp_path / "odd.csv"
    days = DAYS[[0, 1, 2, 9, 11, 29]]
    path.write_text("date,v\n" + "\n".join(f"{day:%Y-%m-%d},{k}" for k, day in enumerate(days)))
    with pytest.raises(InputError) as refused:
        read_table(path)
    assert "--consecutive" in refused.value.hint
    table = read_table(path, TableOptions(consecutive=True))
    assert list(table.grid.stamps) == [1, 2, 3, 4, 5, 6] and list(table.grid.after(2)) == [7, 8]
    assert "2021-01-01 00:00:00 to 2021-01-30 00:00:00 are 1 to 6" in table.notes[0]
    with pytest.raises(UsageError, match="no frequency"):
        TableOptions(consecutive=True, frequency="D")
