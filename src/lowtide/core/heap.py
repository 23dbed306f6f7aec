"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    # Only glibc has it, and only glibc needs it.
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def trim_heap(*, collect: bool = False) -> None:
    """Return what the C allocator keeps after `free`; with ``collect``, Python's garbage first.

    Large buffers that were freed stay resident otherwise, and count against a budget.
    """
    if collect:
        gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
