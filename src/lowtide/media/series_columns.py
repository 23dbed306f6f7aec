"""Columns of long tables: those that name series, and the one of values, by name or by content."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError
from lowtide.media.table_dates import StampColumn
from lowtide.media.table_file import GivenTable
from lowtide.media.table_numbers import NUMERIC, is_number_like
from lowtide.media.table_options import TableOptions
from lowtide.media.table_words import first_few

if TYPE_CHECKING:
    import pandas as pd

# Long frames: names of the columns of series, stamp and value. Nixtla's, Chronos-2's, ours.
LONG = (
    ("unique_id", "ds", "y"),
    ("item_id", "timestamp", "target"),
    ("id", "timestamp", "target"),
)
# What pandas calls a column of a CSV that has no name, such as an index that was written.
_NAMELESS = re.compile(r"Unnamed: \d+")
_IDS = ("unique_id", "item_id", "series_id", "id", "series", "symbol", "ticker", "store", "shop")
_IDS += ("item", "sku", "product", "country", "region", "station", "sensor", "location", "name")
_VALUES = (
    "y",
    "target",
    "value",
    "sales",
    "close",
    "price",
    "demand",
    "load",
    "quantity",
    "amount",
)
# Rows of a series, on average, of which there are several.
_FEWEST_ROWS = 2
# Rows at a stamp, on average, of which numbers may be names of series: fewer are rows twice.
_MANY_ROWS = 1.5


def series_columns(
    source: GivenTable, stamps: StampColumn, names: list[str], options: TableOptions
) -> list[str]:
    """Return the column of names that makes doubled stamps unique, where it is one alone."""
    import pandas as pd

    if pd.Index(stamps.numbers).is_unique:
        return []
    frame = source.frame
    named = [name for name in names if name.lower().strip() in _IDS]
    text = [name for name in names if name not in named and not is_number_like(frame[name])]
    counts = [name for name in names if name not in [*named, *text] and _may_name(frame[name])]
    # As they are written: 01 and 1 are two names.
    frame = source.text([*named, *text, *counts])
    distinct, times = np.unique(stamps.numbers, return_counts=True)
    for group in ([*named, *text], counts):
        working = [name for name in group if _is_series(frame[name], stamps)]
        # As few names as there can be: amounts may differ at each stamp, and are many.
        few_names = [name for name in working if frame[name].nunique() == times.max()]
        often = len(stamps.numbers) >= _MANY_ROWS * len(distinct)
        working = few_names if few_names or group is counts else working
        working = working if often or group is not counts else []
        kinds = {tuple(pd.factorize(frame[name])[0].tolist()): name for name in reversed(working)}
        if len(kinds) == 1:
            return [working[0]]
        if kinds:
            raise InputError(
                f"several columns may be names of series: {first_few(working)}",
                hint=f"--id-column {working[0]}",
            )
    for group in ([*named, *text], [*named, *text, *counts]):
        together = frame[group].assign(stamp=stamps.numbers) if len(group) > 1 else None
        if together is not None and not together.duplicated().any():
            raise InputError(
                "dates are there several times, and columns name series together: "
                f"{first_few(group)}",
                hint=f"--id-column {','.join(group)}",
            )
    return []


def _is_series(column: pd.Series, stamps: StampColumn) -> bool:
    """Return whether a column's cells are names of several series, each stamp there once."""
    import pandas as pd

    if column.isna().any() or column.nunique() * _FEWEST_ROWS > len(column):
        return False
    keys = pd.DataFrame({"name": column.astype(str), "stamp": stamps.numbers})
    return not keys.duplicated().any()


def _may_name(column: pd.Series) -> bool:
    """Return whether a column's cells may be names though they look like numbers."""
    return column.dtype.kind not in NUMERIC or bool((column.dropna() % 1 == 0).all())


def value_column(
    frame: pd.DataFrame, stamps: StampColumn, rest: list[str], options: TableOptions
) -> str:
    """Return a long table's column of values.

    It is that of the option, the only one of numbers, the only one that ends before the others, or
    the only one with a usual name.
    """
    if options.target in rest:
        return str(options.target)
    named = [name for name in rest if not is_nameless(name) and name not in options.known]
    values = [name for name in named if is_number_like(frame[name])]
    by_name = [name for name in values if name.lower().strip() in _VALUES]
    last = frame[stamps.numbers == stamps.numbers.max()]
    ended = [name for name in values if last[name].isna().all()]
    whole = frame[[name for name in values if name not in ended]].notna().all(axis=None)
    for chosen in (values, ended if whole else (), by_name):
        if len(chosen) == 1:
            return chosen[0]
    if not values:
        raise InputError("a long table has no column of numbers")
    raise InputError(
        f"several columns may be the values of a long table: {first_few(values)}",
        hint=f"--target {(by_name or values)[0]}",
    )


def is_nameless(name: str) -> bool:
    """Return whether a column has no name in its file."""
    return _NAMELESS.fullmatch(name) is not None
