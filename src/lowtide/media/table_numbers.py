"""Numbers in tables: cells without a value, yes and no, decimal commas and points of thousands."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, short_repr
from lowtide.media.table_words import TableRowError

if TYPE_CHECKING:
    import pandas as pd

# What offices and statistics packages write where there is no value, in lower case; the first are
# those that mean nothing else to anybody and are not told.
_EMPTY = ("", "nan", "none", "null", "na", "n/a", "#n/a", "<na>", "nat")
_MISSING = ("--", "-", "–", "—", "?", ".", "..", "...", ":", "nm", "missing", "n.a.", "#value!")
_MISSING_WORDS = frozenset((*_EMPTY, *_MISSING, "#div/0!", "#ref!", "nil"))
# Kinds of columns of numbers.
NUMERIC = "biuf"
_YES_NO = {"true": "1", "false": "0", "yes": "1", "no": "0"}
# pandas 2.3 ends the process at exponents of ten digits and more.
HUGE_EXPONENT = r"[eE](?<=[\d.,][eE])[+-]?\d{9}"

_NUMBER = r"[+-]?[\d.,' \u00a0\u202f]*\d[.,]?(?:[eE][+-]?\d+)?$|[+-]?inf(?:inity)?$"
_DECIMAL_COMMA = r"^\s*([+-]?\d*),(\d+)\s*$"
# Commas that cannot be of thousands.
_SURE_COMMA = r"[+-]?(?:\d*,(?:\d{1,2}|\d{4,})|(?:0\d*|\d{4,}),\d{3})$"
# Points that may be of thousands, and points that cannot be.
_GROUPS_OF_THREE = r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+$"
_GROUPS_BY_COMMA = r"[+-]?[1-9]\d{0,2}(?:,\d{3})+$"
_DECIMAL_POINT = r"[+-]?(?:\d*\.(?:\d{1,2}|\d{4,})|(?:0\d*|\d{4,})\.\d{3})$"
_THOUSANDS = r"^\s*[+-]?\d{1,3}(?:[,.' \u00a0\u202f]\d{3})+(?:[.,]\d+)?\s*$"
_WITH_DECIMAL_COMMA = r"^\s*[+-]?\d+,\d+\s*$"


def numeric_column(
    column: pd.Series, decimal: str | None = None, missing: Counter[str] | None = None
) -> pd.Series:
    """Return a column as float64; a cell without a value is NaN, yes and no are 1 and 0.

    Args:
        column: Numbers, booleans or text.
        decimal: What separates decimals in text, if that is said: the other separates thousands.
        missing: Counts the words that stand for no value, if they are not usual.

    Raises:
        InputError: The column holds something else.
        RowError: A cell is no number.
    """
    import pandas as pd

    if column.dtype.kind == "b":
        return column.astype("boolean").astype("Float64").astype(float)
    if column.dtype.kind in NUMERIC:
        return column.astype(float)
    if not is_text(column):
        raise InputError(
            f"column {short_repr(str(column.name))} holds no numbers, but {column.dtype}"
        )
    text = column.astype(str).str.strip()
    _require_exponents(column, text)
    lower = text.str.lower()
    absent = lower.isin(_MISSING_WORDS) | column.isna()
    if missing is not None:
        missing.update(text[absent & ~lower.isin(_EMPTY) & column.notna()].tolist())
    plain = lower.replace(_YES_NO) if lower[~absent].isin(_YES_NO).all() else text
    if decimal is not None:
        plain = _plain(plain, decimal)
    found = pd.to_numeric(plain.mask(absent), errors="coerce").astype(float)
    wrong = found.isna() & ~absent
    if wrong.any():
        _refuse(column, int(wrong.argmax()))
    return found


def numeric_column_if_any(column: pd.Series, decimal: str | None = None) -> pd.Series | None:
    """Return a column of numbers as `numeric_column` does; None for another."""
    try:
        return numeric_column(column, decimal) if is_number_like(column) else None
    except TableRowError:
        return None


def is_number_like(column: pd.Series) -> bool:
    """Return whether a column is of numbers, or at least half of its cells with a value are."""
    if not is_text(column):
        return column.dtype.kind in NUMERIC
    text = column[column.notna()].astype(str).str.strip().str.lower()
    text = text[~text.isin(_MISSING_WORDS)]
    if not len(text):
        return True
    return bool(text.isin(_YES_NO).all() or text.str.match(_NUMBER).mean() >= 0.5)


def settle_decimals(frame: pd.DataFrame, separator: str) -> pd.DataFrame:
    """Return the frame of a file whose columns of text have points in numbers with decimal commas.

    pandas leaves a column as text where one cell of it is no number to it. Among semicolons,
    decimals have commas; among tabs and others, where a comma that cannot be of thousands says so.

    Raises:
        RowError: A number may have decimals or thousands.
    """

    if separator == ",":
        return frame
    places = [place for place, kind in enumerate(frame.dtypes) if kind.kind not in NUMERIC]
    texts = [frame.iloc[:, place].astype(str).str.strip() for place in places]
    if separator == ";":
        if not any(text.str.match(_DECIMAL_POINT).any() for text in texts):
            for place, text in zip(places, texts, strict=True):
                _require_no_groups(str(frame.columns[place]), text, _GROUPS_OF_THREE)
    elif not any(text.str.match(_SURE_COMMA).any() for text in texts):
        for place, text in zip(places, texts, strict=True):
            _require_no_groups(str(frame.columns[place]), text, _GROUPS_BY_COMMA)
        return frame
    for place in places:
        column = frame.iloc[:, place].replace(_DECIMAL_COMMA, r"\1.\2", regex=True)
        frame.isetitem(place, column.to_numpy())
    return frame


def is_text(column: pd.Series) -> bool:
    import pandas as pd

    kinds = pd.api.types
    categories = isinstance(column.dtype, pd.CategoricalDtype)
    return categories or kinds.is_object_dtype(column) or kinds.is_string_dtype(column)


def _plain(text: pd.Series, decimal: str) -> pd.Series:
    """Return numbers as Python writes them; groups of other than three digits are left alone."""
    other = {".": ",", ",": "."}[decimal]
    grouped = rf"^[+-]?\d{{1,3}}(?:[{other}' \u00a0\u202f]\d{{3}})+(?:[{decimal}]\d+)?$"
    groups = text.str.match(grouped)
    joined = text.str.replace(rf"[{other}' \u00a0\u202f]", "", regex=True)
    plain = text.where(~groups, joined)
    # A point where decimals have commas is neither.
    plain = plain.mask(plain.str.contains(other, regex=False), "?")
    return plain.str.replace(decimal, ".", regex=False)


def _require_exponents(column: pd.Series, text: pd.Series) -> None:
    huge = text.str.contains(HUGE_EXPONENT)
    if huge.any():
        row = int(huge.argmax())
        cell = short_repr(column.iloc[row])
        raise TableRowError(
            row, f"column {short_repr(str(column.name))}: {cell} is too large or small"
        )


def _require_no_groups(name: str, text: pd.Series, groups: str) -> None:
    unclear = text.str.match(groups)
    if unclear.any():
        row = int(unclear.argmax())
        kind = "point" if groups is _GROUPS_OF_THREE else "comma"
        raise TableRowError(
            row,
            f"column {short_repr(name)}: {short_repr(text[row])} may have a decimal {kind} or one "
            "of"
            " thousands",
            hint="--decimal . or --decimal , says what decimals have",
        )


def _refuse(column: pd.Series, row: int) -> None:
    """Raise what is wrong with a cell that is no number."""
    import pandas as pd

    cell, where = column.iloc[row], f"column {short_repr(str(column.name))}:"
    text = pd.Series([str(cell)])
    if text.str.match(_THOUSANDS).all():
        hint = "write numbers without, or say what decimals have: --decimal . or --decimal ,"
        raise TableRowError(row, f"{where} {short_repr(cell)} has a thousands separator", hint=hint)
    if text.str.match(_WITH_DECIMAL_COMMA).all():
        raise TableRowError(
            row, f"{where} {short_repr(cell)} has a decimal comma", hint="--decimal ,"
        )
    hint = "leave cells without a value empty, or name the columns to use: --columns"
    raise TableRowError(row, f"{where} {short_repr(cell)} is no number", hint=hint)


def is_number(cell: object) -> bool:
    """Return whether a cell is a number or the text of one."""
    if isinstance(cell, str):
        return re.match(_NUMBER, cell.strip().lower()) is not None
    return isinstance(cell, int | float | np.number | np.bool_) and cell == cell
