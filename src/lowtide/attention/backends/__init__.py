"""Attention backends, in order of preference.

The order decides between backends that support the same call.
"""

from __future__ import annotations

from lowtide.attention.backends.backend import (
    AttentionBackend,
    MissingRequirement,
    ReferenceBackend,
)
from lowtide.attention.backends.chunked import ChunkedBackend
from lowtide.attention.backends.packages import Flash2Backend, FlexBackend, SageBackend
from lowtide.attention.backends.sdpa import SdpaBackend
from lowtide.core.errors import UsageError

__all__ = ["BACKENDS", "AttentionBackend", "MissingRequirement", "get_backend"]

_ALL: tuple[AttentionBackend, ...] = (
    SdpaBackend("flash"),
    SdpaBackend("cudnn"),
    SdpaBackend("efficient"),
    Flash2Backend(),
    SageBackend(),
    FlexBackend(),
    ChunkedBackend(),
    SdpaBackend("math"),
    ReferenceBackend(),
)
BACKENDS = {backend.name: backend for backend in _ALL}


def get_backend(name: str) -> AttentionBackend:
    """Return the backend called ``name``; raises `UsageError` for unknown names."""
    if name not in BACKENDS:
        raise UsageError(
            f"attention backend {name!r} is not known", hint=f"one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
