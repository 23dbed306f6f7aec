"""Values that a model makes once while it is traced.

Models recompute some values in every block; in the graph they appear once. None may outlive the
trace: they are not made of numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_cached_values: ContextVar[dict[str, Any] | None] = ContextVar("_made", default=None)

# Held while a module is traced, which PyTorch does for one at a time in a process: it replaces the
# module's weights meanwhile. Whoever runs a module that may be traced holds it too.
TRACE_LOCK = threading.RLock()


@contextlib.contextmanager
def trace_cache() -> Iterator[None]:
    """Cache `cached_in_trace` values within one trace; other threads' traces wait.

    Values made in one trace are of no use in another.
    """
    with TRACE_LOCK, value_cache():
        yield


@contextlib.contextmanager
def value_cache() -> Iterator[None]:
    """Cache `cached_in_trace` values inside, in this thread alone."""
    token = _cached_values.set({})
    try:
        yield
    finally:
        _cached_values.reset(token)


def cached_in_trace(key: object, make: Callable[[], _Made]) -> _Made:
    """Return ``make()``, cached under ``key`` within `trace_cache`.

    Outside of it, the value is made at each call.

    Keys are compared by their repr: sizes of a graph with dynamic shapes are symbols without a
    hash.
    """
    known = _cached_values.get()
    if known is None:
        return make()
    text = repr(key)
    if text not in known:
        known[text] = make()
    return known[text]
