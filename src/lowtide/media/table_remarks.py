"""What is said of the series of a table, or refused: sizes, holes, ends, constants, distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, short_repr
from lowtide.media.table_words import first_few, list_chosen_names
from lowtide.media.time_grid import TimeGrid

if TYPE_CHECKING:
    import pandas as pd

# Values that are too many to be at every k-th step by chance.
_FEWEST_EVEN = 8
# Sizes of values whose squares are numbers.
_LEAST, _GREATEST = 1e-100, 1e100
# A share of empty steps that is said, and how many distances in a row are of another kind.
_LARGE_SHARE, _FEWEST_OTHERS, _MUCH_LONGER = 0.25, 4, 5


def require_sizes(values: np.ndarray, names: Sequence[str]) -> None:
    """Refuse a series whose squares would be infinite or nothing."""
    peaks = np.nanmax(np.abs(values), axis=0)
    wrong = (peaks > _GREATEST) | ((peaks < _LEAST) & (peaks > 0))
    if wrong.any():
        place = int(wrong.argmax())
        raise InputError(
            f"series {short_repr(names[place])} has values up to {peaks[place]:.3g}, which cannot "
            "be"
            " squared",
            hint="use another unit",
        )


def require_one_frequency(values: np.ndarray, names: Sequence[str]) -> None:
    """Refuse a series that has a value at every k-th step alone."""
    for name, column in zip(names, values.T, strict=True):
        places = np.flatnonzero(np.isfinite(column))
        distance = int(np.gcd.reduce(np.diff(places))) if len(places) >= _FEWEST_EVEN else 1
        if distance > 1:
            raise InputError(
                f"series {short_repr(name)} has a value only once in {distance:,} steps of the "
                "others",
                hint="resample all series to one distance, or forecast them one by one",
            )


def empty_steps(grid: TimeGrid, present: np.ndarray) -> list[str]:
    """Return notes on steps of a grid that have no row.

    Args:
        grid: The grid of T steps.
        present: Mask [T] of steps that have a row.
    """
    missing = int((~present).sum())
    if not missing:
        return []
    share = missing / len(present)
    large = f" ({share:.0%} of {len(present):,})" if share > _LARGE_SHARE else ""
    return [
        f"{missing:,} steps{large} without a row count as missing values",
        *_others(grid, present),
    ]


def moved_rows(
    stamps: pd.Index, moved: np.ndarray, left_out: np.ndarray, frequency: str
) -> list[str]:
    """Return notes on rows that are not on the calendar itself.

    Args:
        stamps: Stamps [rows].
        moved: Mask [rows] of those that count as on its day in their week or month.
        left_out: Mask [rows] of those that are on none of its days.
        frequency: The calendar's name.
    """
    notes = []
    for chosen, words in (
        (moved & ~left_out, f"{{}} rows on other days count as those of {frequency}"),
        (left_out, f"left out, {{}} rows on other days than {frequency}"),
    ):
        if chosen.any():
            days = [str(one).removesuffix(" 00:00:00") for one in stamps[chosen][:13]]
            days += [""] * (int(chosen.sum()) - len(days))
            notes.append(f"{words.format(f'{chosen.sum():,}')}: {first_few(days)}")
    return notes


def _others(grid: TimeGrid, present: np.ndarray) -> list[str]:
    """Return a note on rows in a run that are much further apart than the others."""
    rows = np.flatnonzero(present)
    far = np.diff(rows) >= _MUCH_LONGER
    edges = np.flatnonzero(np.diff(np.concatenate([[0], far.astype(int), [0]])))
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    first, last = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    if last - first < _FEWEST_OTHERS:
        return []
    distance = int(np.median(np.diff(rows)[first:last]))
    begin, end = (_day(grid, int(rows[place])) for place in (first, last))
    return [f"from {begin} to {end} rows are about {distance:,} steps apart, unlike the others"]


def _day(grid: TimeGrid, step: int) -> str:
    return str(grid.stamps[step]).removesuffix(" 00:00:00")


def table_remarks(values: np.ndarray, present: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return notes on holes, ragged ends and constant series.

    Args:
        values: Values [T, D], NaN where there is none; every series has one.
        present: Mask [T] of steps that have a row.
        names: Names [D] of the series.
    """
    known, notes = np.isfinite(values), []
    holes, step = (known.argmax(0), known[::-1].argmax(0)), np.arange(len(values))[:, None]
    between = (step >= holes[0]) & (step < len(values) - holes[1]) & present[:, None]
    inside = int((between & ~known).sum())
    if inside:
        notes.append(f"{inside:,} cells without a value, between others, count as missing")
    for steps, words in zip(holes, ("begin later than the table", "end before it"), strict=True):
        ragged = [f"{names[one]} by {steps[one]:,}" for one in np.flatnonzero(steps).tolist()]
        if ragged:
            notes.append(f"{len(ragged):,} series {words}, in steps: {first_few(ragged)}")
    constant = np.nanmax(values, axis=0) == np.nanmin(values, axis=0)
    if constant.any():
        notes.append(f"a single value throughout: {list_chosen_names(names, constant)}")
    return notes
