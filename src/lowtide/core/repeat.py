"""Trace one of several identical calls, and count it for all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

_repeats: ContextVar[int] = ContextVar("_times", default=1)


def repeat_count() -> int:
    """Return how many calls the current one is traced for; 1 outside `repeat_call`."""
    return _repeats.get()


def repeat_call(count: int, call: Callable[[int], object], *, identical: bool) -> None:
    """Call ``call`` with 0 to ``count`` - 1, or once for all if they are ``identical``.

    ``identical`` calls take the same memory: ``call(0)`` is then traced for all of them.
    """
    if not identical:
        for number in range(count):
            call(number)
    elif count:
        token = _repeats.set(_repeats.get() * count)
        try:
            call(0)
        finally:
            _repeats.reset(token)
