"""Words on tables: usual names of columns, rows that cannot be used, and lists of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lowtide.core.errors import InputError, short_repr, shorten_middle

_MOST_NAMES = 12

STAMPS = (
    "date",
    "ds",
    "timestamp",
    "datetime",
    "time",
    "year",
    "month",
    "day",
    "period",
    "quarter",
)
# Rows that are looked at to find the header.
LOOKED_AT = 100


class TableRowError(Exception):
    """A row that cannot be used: its number from 0, what is wrong, and a hint.

    ``first`` is an earlier row that it contradicts.
    """

    def __init__(
        self, row: int, message: str, hint: str | None = None, first: int | None = None
    ) -> None:
        super().__init__(message)
        self.row, self.message, self.hint, self.first = row, message, hint, first


def require_distinct(names: Iterable[str]) -> None:
    """Refuse columns of which two have one name, but for those without any."""
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise InputError(f"two columns are called {short_repr(twice[0])}")


def list_chosen_names(names: Sequence[str], chosen: np.ndarray) -> str:
    """Return the names that a mask [D] has chosen, of many the first."""
    return first_few([names[one] for one in np.flatnonzero(chosen).tolist()])


def first_few(words: Sequence[str]) -> str:
    """Return the first of many words, and how many there are besides."""
    more = len(words) - _MOST_NAMES
    return ", ".join(map(shorten_middle, words[:_MOST_NAMES])) + (
        f" and {more:,} more" if more > 0 else ""
    )


def header_row(rows: Sequence[Sequence[str]]) -> int | None:
    """Return which of a table's first rows is its header; None where none looks like one.

    Titles, sources and units may stand above the first row of numbers too. The header names as many
    columns as that has, but for one at most, has no number, and no empty row follows it. Of several
    such rows it is the one with a usual name of dates, else the first.
    """
    widths = Counter(len(row) for row in rows if len(row) > 1)
    width = max(widths, key=lambda one: (widths[one], one), default=0)
    given = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    numbered = [
        len(row) == width and len(cells) >= max(2, width / 2) and any(map(_begins_as_number, cells))
        for row, cells in zip(rows, given, strict=True)
    ]
    filled = [place for place, cells in enumerate(given) if cells]
    pairs = zip(filled, filled[1:] or filled, strict=False)
    data = next((one for one, after in pairs if numbered[one] and numbered[after]), 0)
    found: list[int] = []
    for place, cells in enumerate(given[:data]):
        if not cells:
            found.clear()
        names = len(set(cells)) == len(cells) >= max(2, _length(rows[place]) - 1)
        fits = _length(rows[data]) <= _length(rows[place]) and len(rows[place]) <= width
        if names and fits and not any(map(_begins_as_number, cells)):
            found.append(place)
    usual = [place for place in found if {cell.lower() for cell in given[place]} & {*STAMPS}]
    return next(iter(usual if len(usual) == 1 else found), None)


def text_above_header(rows: Sequence[Sequence[str]]) -> str:
    """Return what stands above a header, in words: the first cells of ``rows``."""
    return first_few(
        [next(cell for cell in row if cell.strip()).strip() for row in rows if _length(row)]
    )


def _begins_as_number(cell: str) -> bool:
    """Return whether a cell begins as numbers and dates do."""
    return cell.lstrip("+-'\"(")[:1].isdecimal()


def _length(row: Sequence[str]) -> int:
    """Return how many cells a row has, without empty ones at its end."""
    return max((place for place, cell in enumerate(row, 1) if cell.strip()), default=0)
