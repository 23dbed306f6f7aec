"""The C heap: reusing freed memory, and giving it back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import Literal

# mallopt's names for its parameters (malloc.h); they are part of glibc's binary interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Blocks below this are reused; larger ones go back when they are freed, and come in huge pages.
REUSED_BELOW = 16 << 20
KEPT_AT_MOST = 512 << 20
_GIVEN_BACK_FROM = 64 << 10
# PyTorch asks for huge pages, 2 MiB each, for every block that is at least as large, if this is
# set before its first one; Linux gives them to who asks, as most systems are set.
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

_tuned = False


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library if it is glibc: only it has these calls, and only it needs them."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def tune_heap() -> bool:
    """Make this process reuse the memory of one tile for the next; True if that could be set.

    By default glibc returns large blocks to the system on every `free` and gets them back page
    by page, which costs a small network on the CPU a third of its time. The largest blocks still
    go back, but in huge pages, if this is called before PyTorch makes its first tensor; a value of
    ``THP_MEM_ALLOC_ENABLE`` in the environment stays. These are settings of the whole process, so
    only a program of its own should make them: the command line does.
    """
    global _tuned
    library = _glibc()
    if library is not None:
        os.environ.setdefault(_HUGE_PAGES, "1")
        _tuned = bool(
            library.mallopt(_M_MMAP_THRESHOLD, REUSED_BELOW)
            and library.mallopt(_M_TRIM_THRESHOLD, KEPT_AT_MOST)
        )
    return _tuned


def heap_is_tuned() -> bool:
    """Whether `tune_heap` is in effect; times measured with and without it differ."""
    return _tuned


HeapSetting = Literal["gives back", "keeps"]


def set_heap_mode(setting: HeapSetting) -> None:
    """Change what this process's C heap does with freed blocks, if it is `tune_heap`'s own.

    ``"keeps"`` is faster. ``"gives back"`` takes what lives and no more: kept blocks that no new
    one fits into made runs of window transformers take up to 1.8 times that.
    """
    library = _glibc()
    if library is None or not _tuned:
        return
    keeps = setting == "keeps"
    library.mallopt(_M_MMAP_THRESHOLD, REUSED_BELOW if keeps else _GIVEN_BACK_FROM)
    library.mallopt(_M_TRIM_THRESHOLD, KEPT_AT_MOST if keeps else _GIVEN_BACK_FROM)
    library.malloc_trim(0)


@contextlib.contextmanager
def trimming_heap() -> Iterator[None]:
    """What is freed inside leaves no gaps for what comes after, if the heap is `tune_heap`'s own.

    A heap that keeps blocks fills with those of a model file while it is read: gaps that a run's
    own blocks hardly fit, and that no run in a heap which gives blocks back ever gives back, since
    the C library takes what fits into a gap from there.
    """
    set_heap_mode("gives back")
    try:
        yield
    finally:
        set_heap_mode("keeps")


def heap_mode() -> HeapSetting | None:
    """What this process's C heap does with freed blocks, where that is settled.

    ``"keeps"`` after `tune_heap`; ``"gives back"`` where the environment made every block of
    1 MiB or less one of its own pages. Otherwise glibc changes its mind as the program runs,
    and other libraries have their own ways.
    """
    if _tuned:
        return "keeps"
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    settled = _glibc() is not None and threshold.isdigit() and int(threshold) <= 1 << 20
    return "gives back" if settled else None


def trim_heap(*, collect: bool = False) -> None:
    """Return what the C allocator keeps after `free`; with ``collect``, Python's garbage first.

    Large buffers that were freed stay resident otherwise, and count against a budget.
    """
    if collect:
        gc.collect()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
