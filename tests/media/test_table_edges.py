"""Titles above a header, and rows that are none of the table: units, totals, footnotes."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide.core.errors import InputError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402

ROWS = "".join(f"2024-{month:02},{month},{month}.5\n" for month in range(1, 13))
TABLE = "month,a,b\n" + ROWS


def read(tmp_path, text, name="table.csv"):
    (tmp_path / name).write_text(text)
    return read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("title", "line"),
    [
        ("Sales of shops\nSource: Office\n\n", 4),
        ("GDP, seasonally adjusted\n\n", 3),
        ("GDP, chained, in euros\n", 2),
        ("Sales,,\nSource: Office 2024,,\n,,\n", 4),
        ("# made by hand\n# on 2024-12-31\n", 3),
        ("2020 = 100\n", 2),
        ("Title,Sales,\nUnits,EUR,\nUpdated,2024-12-31,\n\n", 5),
    ],
)
def test_titles_above_the_header_are_skipped_and_said(tmp_path, title, line):
    table = read(tmp_path, title + TABLE)
    assert table.names == ("a", "b") and table.values.shape == (12, 2)
    assert any(f"the header is line {line}; above it" in note for note in table.notes)
    with pytest.raises(InputError, match=f"line {line + 2}, column 'a': 'x' is no number"):
        read(tmp_path, title + TABLE.replace("2024-02,2,", "2024-02,x,"))


def test_titles_may_have_other_separators_than_the_table(tmp_path):
    text = "Umsatz, real\nAmt | Quelle\n\n" + TABLE.replace(",", ";").replace(".5", ",5")
    np.testing.assert_array_equal(read(tmp_path, text).values[:, 1], np.arange(1, 13) + 0.5)
    spaces = "Numbers of spots on the sun\n\n" + TABLE.replace(",", " ")
    assert read(tmp_path, spaces).names == ("a", "b")


@pytest.mark.parametrize("header", ["month,2010,2011\n", "month,,\n", "month,a,b,\n"])
def test_a_first_line_that_is_a_header_stays_one(tmp_path, header):
    try:
        notes = read(tmp_path, header + ROWS).notes
    except InputError as error:
        notes = (error.message,)
    assert not any("above it" in note for note in notes)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "Total,78,84\n", "below the last date, from line 14: Total"),
        ("", "Total 2024,78,84\n", "below the last date, from line 14: Total 2024"),
        ("", "\n* provisional\n1) revised in 2023\n", "from line 15: * provisional, 1) revised"),
        (",EUR,t\n", "", "above the first date, from line 2: EUR"),
        ("Unit,EUR,1000 t\nId,A1,B1\n", "", "above the first date, from line 2: Unit, Id"),
        ("", ",,\n,,\n", "left out, empty rows: 2"),
    ],
)
def test_rows_that_cannot_have_a_date_are_left_out_and_said(tmp_path, before, after, said):
    table = read(tmp_path, "month,a,b\n" + before + ROWS + after)
    np.testing.assert_array_equal(table.values[:, 0], np.arange(1, 13))
    assert any(said in note for note in table.notes)


@pytest.mark.parametrize(
    ("text", "line", "cell"),
    [
        (TABLE + ",78,84\n", 14, "''"),
        (TABLE + "2024-13,78,84\n", 14, "'2024-13'"),
        (TABLE + "Dec,78,84\n", 14, "'Dec'"),
        (TABLE.replace("2024-07,", "Total,"), 8, "'Total'"),
        ("month,a\nA,1\nB,2\nC,3\n", 2, "'A'"),
    ],
)
def test_rows_that_may_have_a_date_are_refused(tmp_path, text, line, cell):
    with pytest.raises(InputError, match=f"line {line}, column 'month': {cell} is no date"):
        read(tmp_path, text)


def test_rows_of_the_future_are_no_footnotes(tmp_path):
    table = read(tmp_path, TABLE + "2025-01,,\n2025-02,,\n")
    assert "2 rows after the last value are the future" in table.notes


def test_edges_are_found_where_dates_go_by_content(tmp_path):
    frame = pd.DataFrame({"when": ["2024-01", "2024-02", "2024-03", "Sum"], "a": [1, 2, 3, 6]})
    assert read_table(frame).values.tolist() == [[1], [2], [3]]
    frame = frame.assign(n=range(4))[["a", "n", "when"]].astype({"a": float})
    assert read_table(frame).columns[1] and len(read_table(frame).values) == 3


def test_workbooks_have_titles_and_totals_too(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["Sales"], ["Source: Office, 2024"], [], ["month", "a"]):
        book.active.append(row)
    for month in range(1, 13):
        book.active.append([pd.Timestamp(2024, month, 1), month])
    for row in (["Total", 78], [], ["* provisional"]):
        book.active.append(row)
    book.save(tmp_path / "table.xlsx")
    table = read_table(tmp_path / "table.xlsx")
    assert table.values[:, 0].tolist() == list(range(1, 13))
    assert "the header is row 4; above it: Sales, Source: Office, 2024" in table.notes
    book.active["B9"] = "x"
    book.save(tmp_path / "table.xlsx")
    with pytest.raises(InputError, match="row 9, column 'a': 'x' is no number"):
        read_table(tmp_path / "table.xlsx")
