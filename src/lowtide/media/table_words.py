"""Words on tables: rows that cannot be used, and lists of names, of many the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lowtide.core.errors import InputError, shorten, shown

_MOST_NAMES = 12


class RowError(Exception):
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
        raise InputError(f"two columns are called {shown(twice[0])}")


def listed(names: Sequence[str], chosen: np.ndarray) -> str:
    """Return the names that a mask [D] has chosen, of many the first."""
    return few([names[one] for one in np.flatnonzero(chosen).tolist()])


def few(words: Sequence[str]) -> str:
    """Return the first of many words, and how many there are besides."""
    more = len(words) - _MOST_NAMES
    return ", ".join(map(shorten, words[:_MOST_NAMES])) + (
        f" and {more:,} more" if more > 0 else ""
    )
