"""Headers of tables: usual names of their columns, and what may stand above them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lowtide.media.table_words import few

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


def above(rows: Sequence[Sequence[str]]) -> str:
    """Return what stands above a header, in words: the first cells of ``rows``."""
    return few([next(cell for cell in row if cell.strip()).strip() for row in rows if _length(row)])


def _begins_as_number(cell: str) -> bool:
    """Return whether a cell begins as numbers and dates do."""
    return cell.lstrip("+-'\"(")[:1].isdecimal()


def _length(row: Sequence[str]) -> int:
    """Return how many cells a row has, without empty ones at its end."""
    return max((place for place, cell in enumerate(row, 1) if cell.strip()), default=0)
