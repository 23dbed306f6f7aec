"""Planning of bands by stored facts alone, in processes that have no memory to compute others in.

Dry runs measure operators, and a certificate runs the network: both leave compiled kernels and a
fragmented heap in the process, more than a run in bands takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_stored_only: ContextVar[bool] = ContextVar("_stored_only", default=False)


class NotStoredError(Exception):
    """A fact is needed that is not stored, inside of `stored_only`."""


@contextmanager
def stored_only() -> Iterator[None]:
    """Raise `NotStoredError` inside where a plan needs what is not in the cache folder."""
    token = _stored_only.set(True)
    try:
        yield
    finally:
        _stored_only.reset(token)


def may_compute() -> None:
    """Raise `NotStoredError` inside of `stored_only`; called before a fact is computed."""
    if _stored_only.get():
        raise NotStoredError
