"""What models make anew in every block, made once while a graph of them is captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_made: ContextVar[dict[str, Any] | None] = ContextVar("_made", default=None)

# Held while a module is traced, which PyTorch does for one at a time in a process: it puts other
# weights into the module meanwhile. Who runs a module that may be traced holds it too.
TRACING = threading.RLock()


@contextlib.contextmanager
def trace_cache() -> Iterator[None]:
    """Inside, `cached_in_trace` makes each thing once; what a trace made is of no use to another.
    Other threads' traces wait."""
    with TRACING:
        token = _made.set({})
        try:
            yield
        finally:
            _made.reset(token)


def cached_in_trace(key: object, make: Callable[[], _Made]) -> _Made:
    """What ``make`` gives, the same each time within `trace_cache`, and new each time elsewhere.

    Keys are told apart by their text: sizes of a graph for all sizes are symbols without a hash.
    """
    known = _made.get()
    if known is None:
        return make()
    text = repr(key)
    if text not in known:
        known[text] = make()
    return known[text]
