"""What is said of series in a table, and refused: sizes, frequencies, holes, constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core.errors import InputError

# Values that are too many to be at every k-th step by chance, and names that a note has.
_FEWEST_EVEN, _MOST_NAMES = 8, 12
# Sizes of values whose squares are numbers.
_LEAST, _GREATEST = 1e-100, 1e100


def require_sizes(values: np.ndarray, names: tuple[str, ...]) -> None:
    """Refuse a series whose squares would be infinite or nothing."""
    peaks = np.nanmax(np.abs(values), axis=0)
    wrong = (peaks > _GREATEST) | ((peaks < _LEAST) & (peaks > 0))
    if wrong.any():
        place = int(wrong.argmax())
        raise InputError(
            f"series {names[place]!r} has values up to {peaks[place]:.3g}, which cannot be squared",
            hint="use another unit",
        )


def require_one_frequency(values: np.ndarray, names: tuple[str, ...]) -> None:
    """Refuse a series that has a value at every k-th step alone."""
    for name, column in zip(names, values.T, strict=True):
        places = np.flatnonzero(np.isfinite(column))
        distance = int(np.gcd.reduce(np.diff(places))) if len(places) >= _FEWEST_EVEN else 1
        if distance > 1:
            raise InputError(
                f"series {name!r} has a value only once in {distance:,} steps of the others",
                hint="resample all series to one distance, or forecast them one by one",
            )


def remarks(values: np.ndarray, present: np.ndarray, names: tuple[str, ...]) -> list[str]:
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
        ragged = [f"{names[one]} by {steps[one]:,}" for one in np.flatnonzero(steps)]
        if ragged:
            notes.append(f"{len(ragged):,} series {words}, in steps: {few(ragged)}")
    constant = np.nanmax(values, axis=0) == np.nanmin(values, axis=0)
    if constant.any():
        notes.append(f"a single value throughout: {listed(names, constant)}")
    return notes


def listed(names: Sequence[str], chosen: np.ndarray) -> str:
    """Return the names that a mask [D] has chosen, of many the first."""
    return few([names[one] for one in np.flatnonzero(chosen).tolist()])


def few(words: list[str]) -> str:
    """Return the first of many words, and how many there are besides."""
    more = len(words) - _MOST_NAMES
    return ", ".join(words[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
