"""Words for what differs between two configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lowtide.core.errors import shown

# Changes that are named; of more, their number is.
_MOST_NAMED = 8


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the dotted keys whose values differ, with the earlier value and the new one.

    Empty where none does.
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
    found = [
        f"{key} was {_word(old, key)} and is {_word(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if key not in old or key not in new or old[key] != new[key]
    ]
    more = f", and {len(found) - _MOST_NAMED:,} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else "absent"
