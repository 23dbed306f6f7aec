"""PyAV, which is optional."""

from __future__ import annotations

from types import ModuleType

from lowtide.core.errors import UsageError


def load_av() -> ModuleType:
    """Import PyAV; raises `UsageError` where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise UsageError(
            "video files need PyAV, which is not installed", hint="pip install 'lowtide[video]'"
        ) from error
    return av
