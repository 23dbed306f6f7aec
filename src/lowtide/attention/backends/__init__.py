"""Attention backends, in order of preference.

The order decides between backends that support the same call.
"""

from __future__ import annotations

from lowtide.attention.backends.backend import Backend, Missing, Reference
from lowtide.attention.backends.chunked import Chunked, OneDnn
from lowtide.attention.backends.packages import Flash2, Flex, Sage
from lowtide.attention.backends.sdpa import Sdpa
from lowtide.core.errors import UsageError

__all__ = ["BACKENDS", "Backend", "Missing", "get"]

_ALL: tuple[Backend, ...] = (
    OneDnn(),
    Sdpa("flash"),
    Sdpa("cudnn"),
    Sdpa("efficient"),
    Flash2(),
    Sage(),
    Flex(),
    Chunked(),
    Sdpa("math"),
    Reference(),
)
BACKENDS = {backend.name: backend for backend in _ALL}


def get(name: str) -> Backend:
    """Return the backend called ``name``; raises `UsageError` for unknown names."""
    if name not in BACKENDS:
        raise UsageError(
            f"attention backend {name!r} is not known", hint=f"one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
