"""Series on one time grid, as forecasts take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.errors import InputError, UsageError, short_repr
from lowtide.media.series_columns import LONG
from lowtide.media.table_words import first_few, list_chosen_names
from lowtide.media.time_grid import TimeGrid

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TimeTable:
    """Several series on one time grid.

    Attributes:
        grid: Stamps [T], until the last value of any series.
        values: Values [T, D] in their own units, NaN where there is none.
        names: Names [D] of the series.
        columns: Names of the columns of series, stamp and value in a long frame.
        notes: Sentences on what was read, repaired or left out.
        known: Values [T + H, D, K] of columns that are known H steps ahead of the last value; NaN
            where one is not. [T + H, 1, K] where all series have the same.
        known_names: Names [K] of those.
        long: Whether the values are one column of a long table.
        number_ids: Whether results have the names of series as whole numbers.
    """

    grid: TimeGrid
    values: np.ndarray
    names: tuple[str, ...]
    columns: tuple[str, str, str] = LONG[0]
    notes: tuple[str, ...] = ()
    known: np.ndarray = field(default_factory=lambda: np.empty((0, 1, 0)))
    known_names: tuple[str, ...] = ()
    long: bool = False
    number_ids: bool = False

    @property
    def ends(self) -> np.ndarray:
        """Step [D] after the last value of each series, where its forecast begins."""
        return ends_of(self.values)

    def index(self, name: str) -> int:
        """Return the place of a series among the names.

        Raises:
            UsageError: There is no series of this name.
        """
        return place_among(name, self.names)

    def place_of_target(self, target: str | None) -> int | None:
        """Return the place of the one series that is wanted; None for all.

        In a long table the name of the column of values means all; raises as `index`.
        """
        if target is None or (self.long and target == self.columns[2] and target not in self.names):
            return None
        return self.index(target)

    def by_end(self) -> list[tuple[int, np.ndarray]]:
        """Return the steps that series end before, latest first, and the places of those."""
        ends = self.ends
        return [(end, np.flatnonzero(ends == end)) for end in sorted({*ends.tolist()})[::-1]]

    def ahead(self, steps: int) -> list[pd.Index]:
        """Return the stamps of ``steps`` [D] after the last value of each series."""
        made = {end: self.grid.after(steps, end) for end in set(self.ends.tolist())}
        return [made[end] for end in self.ends.tolist()]

    def of_series(self, places: np.ndarray | Sequence[int]) -> TimeTable:
        """Return the table of the series at ``places`` [d], or of those that a mask [D] has."""
        names = tuple(np.array(self.names, object)[places].tolist())
        known = self.known if self.known.shape[1] == 1 else self.known[:, places]
        return replace(self, values=self.values[:, places], names=names, known=known)

    def until(self, end: int) -> TimeTable:
        """Return the series up to before a step; what is known after it stays."""
        grid = replace(self.grid, stamps=self.grid.stamps[:end])
        return replace(self, grid=grid, values=self.values[:end])

    def without(self, left_out: np.ndarray, reason: str) -> TimeTable:
        """Return the table without the series of a mask [D], and a note that has the reason.

        Raises:
            InputError: No series is left.
        """
        if left_out.all():
            raise InputError(f"no series is left: all are {reason}")
        if not left_out.any():
            return self
        note = f"left out, {reason}: {list_chosen_names(self.names, left_out)}"
        return replace(self.of_series(~left_out), notes=(*self.notes, note))


def place_among(name: str, names: Sequence[str], what: str = "series") -> int:
    """Return the place of a series or another thing among ``names``."""
    if name not in names:
        raise UsageError(
            f"there is no {what} {short_repr(name)}", hint=f"there are: {first_few(names)}"
        )
    return list(names).index(name)


def ends_of(values: np.ndarray) -> np.ndarray:
    """Return the step after the last value of each column of ``values`` [T, D], or 0."""
    finite = np.isfinite(values)
    return np.where(finite.any(axis=0), len(values) - finite[::-1].argmax(axis=0), 0)
