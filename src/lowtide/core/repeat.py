"""Calls that stand for others just like them, while a run is traced without bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

_times: ContextVar[int] = ContextVar("_times", default=1)


def repeat_count() -> int:
    """How many calls the one stands for that is made now; 1 outside of `repeat_call`."""
    return _times.get()


def repeat_call(count: int, call: Callable[[int], object], *, alike: bool) -> None:
    """``call`` with 0 to ``count`` - 1; where all take as much, with 0 for all of them."""
    if not alike:
        for number in range(count):
            call(number)
    elif count:
        token = _times.set(_times.get() * count)
        try:
            call(0)
        finally:
            _times.reset(token)
