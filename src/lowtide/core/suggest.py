"""Spelling suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` most similar to ``name``, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def hint_for_name(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown ``name``: the closest known one, or all of them."""
    names = list(known)
    meant = closest_name(name, names)
    return f"did you mean {meant!r}?" if meant else f"use one of {', '.join(names)}"
