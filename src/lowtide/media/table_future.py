"""Rows of the future in tables, and columns that are known ahead: holidays, prices, plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lowtide.core.errors import InputError, shorten, shown
from lowtide.media.table_words import few

# Names of what is forecast, beside which columns that go on are known ahead.
_FORECAST = ("y", "target", "value", "sales", "demand", "load")
_MOST_OF_SWITCH = 2


@dataclass(frozen=True)
class Future:
    """What of a table is known ahead.

    Attributes:
        steps: Steps until the last value of any series, T.
        known: Places of columns that are known ahead.
        notes: Sentences on what was found.
    """

    steps: int
    known: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_future(
    values: np.ndarray, names: Sequence[str], asked: Sequence[str], known: Sequence[str]
) -> Future:
    """Return where the future of a table begins, and which of its columns are known there.

    Args:
        values: Columns of numbers [rows, columns] on the table's grid, NaN where there is none.
        names: Their names.
        asked: Names of those that are to be forecast; empty for all that are not known ahead.
        known: Names of those that are said to be known ahead; empty to find them.

    Raises:
        InputError: A column that is said to be known ahead lacks a value.
    """
    ends, rows = ends_of(values), len(values)
    if known:
        places = [names.index(name) for name in known]
        _require_complete(values, names, places)
        others = [place for place in range(len(names)) if place not in places]
        return _with_words(Future(int(ends[others].max(initial=0)), places), names, rows)
    complete = np.asarray(np.isfinite(values).all(axis=0))
    wanted = [names.index(name) for name in asked]
    if wanted:
        last = int(ends[wanted].max())
        late = [place for place in np.flatnonzero(complete).tolist() if place not in wanted]
        return _with_words(Future(last, late if last < rows else []), names, rows)
    return _with_words(_by_content(values, names, complete), names, rows)


def _by_content(values: np.ndarray, names: Sequence[str], complete: np.ndarray) -> Future:
    """Return what is known ahead where nothing is asked for.

    Columns that all end together, beside others without a hole, leave rows of the future: where the
    others are switches, such as holidays, or those that end have names of what is forecast.
    """
    ends, rows = ends_of(values), len(values)
    late, early = np.flatnonzero(complete).tolist(), np.flatnonzero(ends < rows).tolist()
    last = int(ends[early].max(initial=0))
    together = early and (ends[early] == last).all() and last >= rows / 2
    if not late or not together or len(late) + len(early) < len(names):
        return Future(int(ends.max(initial=0)))
    switches = all(len(np.unique(values[:, place])) <= _MOST_OF_SWITCH for place in late)
    if switches or all(names[place].lower() in _FORECAST for place in early):
        return Future(last, late)
    later = shorten(",".join(names[place] for place in late))
    return Future(rows, notes=[f"some go on after the others; if known ahead: --known {later}"])


def _require_complete(values: np.ndarray, names: Sequence[str], places: list[int]) -> None:
    for place in places:
        missing = ~np.isfinite(values[:, place])
        if missing.any():
            raise InputError(
                f"column {shown(names[place])}, which is known ahead, has no value at step"
                f" {int(missing.argmax()) + 1:,} of {len(values):,}",
                hint="fill it, or leave it out of --known",
            )


def column_of_series(
    cells: np.ndarray, steps: np.ndarray, series: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Return a long table's column by step and series: [T, D], or [T, 1] if all have the same.

    Args:
        cells: Its value in each of n rows.
        steps: Their steps [n].
        series: Places [n] of their series.
        shape: Steps and series, (T, D).
    """
    found = np.full(shape, np.nan)
    found[steps, series] = cells
    low, high = np.fmin.reduce(found, axis=1), np.fmax.reduce(found, axis=1)
    return found if (low < high).any() else low[:, None]


def ends_of(values: np.ndarray) -> np.ndarray:
    """Return the step after the last value of each column of ``values`` [T, D], or 0."""
    finite = np.isfinite(values)
    return np.where(finite.any(axis=0), len(values) - finite[::-1].argmax(axis=0), 0)


def _with_words(future: Future, names: Sequence[str], rows: int) -> Future:
    notes = list(future.notes)
    if rows > future.steps:
        notes.append(f"{rows - future.steps:,} rows after the last value are the future")
    if future.known:
        notes.append(known_words([names[place] for place in future.known]))
    return Future(future.steps, future.known, notes)


def known_words(names: Sequence[str]) -> str:
    """Return the note on columns that are known ahead."""
    return f"known ahead: {few(names)}"
