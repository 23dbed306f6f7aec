"""Files of tables: packed, of other encodings and separators, workbooks, and what is none."""

import gzip
import zipfile

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from lowtide import InputError, UsageError  # noqa: E402
from lowtide.media.table import read_table  # noqa: E402
from lowtide.media.table_options import TableOptions  # noqa: E402

DAYS = pd.date_range("2026-01-01", periods=30)
TEXT = "date,Größe\n" + "\n".join(f"{day:%Y-%m-%d},{k}.5" for k, day in enumerate(DAYS)) + "\n"


def is_read(path, **options):
    table = read_table(path, TableOptions(**options))
    np.testing.assert_allclose(table.values[:, 0], np.arange(30) + 0.5)
    assert table.names == ("Größe",) and list(table.grid.stamps) == list(DAYS)
    return table


def test_packed_files_are_unpacked(tmp_path):
    packed = tmp_path / "table.csv.gz"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    is_read(packed)
    archive = tmp_path / "table.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("table.csv", TEXT)
    is_read(archive)
    with pytest.raises(InputError, match=r"more than .* bytes take up to"):
        read_table(packed, room=1000)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("other.csv", TEXT)
    with pytest.raises(InputError, match="has 2 files, and a table is one"):
        read_table(archive)
    for path in (packed, archive):
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(InputError, match="is damaged, or no "):
            read_table(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
def test_encodings(tmp_path, encoding):
    path = tmp_path / "table.csv"
    path.write_bytes(TEXT.encode(encoding))
    told = is_read(path).notes
    assert told == (("the file is no UTF-8 and was read as Windows-1252",) * (encoding == "cp1252"))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|", " ", "   "])
def test_separators(tmp_path, separator):
    path = tmp_path / "table.csv"
    path.write_text(TEXT.replace(",", separator))
    is_read(path)


def test_decimal_commas_among_tabs_and_bars(tmp_path):
    path = tmp_path / "table.tsv"
    for separator in "\t|;":
        path.write_text(TEXT.replace(",", separator).replace(".5", ",5"))
        is_read(path)
    path.write_text(
        "date\tv\n" + "\n".join(f"{day:%Y-%m-%d}\t1,{k + 100}" for k, day in enumerate(DAYS))
    )
    with pytest.raises(InputError, match="line 2, column 'v': '1,100' may have a decimal comma or"):
        read_table(path)
    assert read_table(path, TableOptions(decimal=",")).values[0, 0] == 1.1
    assert read_table(path, TableOptions(decimal=".")).values[0, 0] == 1100


@pytest.mark.parametrize(
    ("cell", "decimal", "value"),
    [
        ("1.234,5", ",", 1234.5),
        ("1,234.5", ".", 1234.5),
        ("1 234 567,5", ",", 1234567.5),
        ("1.100", ".", 1.1),
        ("1.100", ",", 1100),
        ("-0,5", ",", -0.5),
    ],
)
def test_what_decimals_have_can_be_told(tmp_path, cell, decimal, value):
    path = tmp_path / "table.csv"
    for separator in ";|":
        path.write_text(
            f"date{separator}v\n" + "\n".join(f"{day:%Y-%m-%d}{separator}{cell}" for day in DAYS)
        )
        assert read_table(path, TableOptions(decimal=decimal)).values[3, 0] == value
    frame = pd.DataFrame({"date": DAYS, "v": cell})
    assert read_table(frame, TableOptions(decimal=decimal)).values[3, 0] == value
    with pytest.raises(InputError, match="row 0, column 'v': '1,5' has a decimal comma"):
        read_table(frame.assign(v="1,5"), TableOptions(decimal="."))
    with pytest.raises(UsageError, match="decimal"):
        TableOptions(decimal="x")


def test_workbooks_are_read(tmp_path):
    pytest.importorskip("openpyxl")
    path = tmp_path / "book.xlsx"
    wide = pd.DataFrame({"date": DAYS, "Größe": np.arange(30) + 0.5, "note": "a"})
    wide.to_excel(path, index=False)
    assert is_read(path).notes == ("left out, columns without numbers: note",)
    wide.assign(Größe=[*range(29), "four"]).to_excel(path, index=False)
    with pytest.raises(InputError, match="row 31, column 'Größe': 'four' is no number"):
        read_table(path)
    long = pd.DataFrame({"unique_id": ["001"] * 30 + ["NA"] * 30, "ds": [*DAYS, *DAYS], "y": 1.0})
    with pd.ExcelWriter(path) as book:
        long.to_excel(book, sheet_name="Sales", index=False)
        wide.to_excel(book, sheet_name="Other", index=False)
    table = read_table(path)
    assert (
        table.names == ("001", "NA") and table.notes[0] == "of 2 sheets the first was read, Sales"
    )


def test_without_openpyxl_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "book.xlsx"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("sheet.xml", "")
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(UsageError, match="Excel files need openpyxl") as refused:
        read_table(path)
    assert refused.value.hint.endswith("pip install '.[excel]'")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.json", "[]", "tables are not read as .json"),
        ("t.xls", "x", "tables are not read as .xls"),
        ("t.csv", '[{"a": 1}]', "looks like JSON"),
        ("t.csv", "", "the file is empty"),
        ("t.csv", TEXT + "2026-02-01,1,2\n", "line 32 has 3 cells, and the header 2"),
        ("t.csv", TEXT + '2026-02-01,"1\n', "a quote is opened and never closed"),
        ("t.xlsx", "abc", "is damaged, or no .xlsx file"),
    ],
)
def test_other_files_are_refused_in_our_words(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_table(path)


def test_addresses_are_not_fetched():
    with pytest.raises(InputError, match="addresses are not fetched"):
        read_table("https://example.org/table.csv")
