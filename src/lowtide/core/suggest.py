"""The name that somebody meant, for hints beside an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` is a slip of, or None where it is like none of them."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def hint_for_name(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown ``name``: the one of ``known`` it is nearest to, or all of them."""
    names = list(known)
    meant = closest_name(name, names)
    return f"did you mean {meant!r}?" if meant else f"use one of {', '.join(names)}"
