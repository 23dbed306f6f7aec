"""Control of the C heap (glibc malloc): reuse of freed memory, and trimming."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Literal

# mallopt's names for its parameters (malloc.h); they are part of glibc's binary interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Smaller blocks are reused; larger ones are unmapped when freed, and use huge pages.
MMAP_THRESHOLD_BYTES = 16 << 20
TRIM_THRESHOLD_BYTES = 512 << 20
_TRIM_MODE_THRESHOLD_BYTES = 64 << 10
# PyTorch requests huge pages, 2 MiB each, for every block of at least that size, if this is set
# before its first one; by default most Linux systems grant them on request.
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# oneDNN, and PyTorch in front of it, keep the kernels compiled for the last so many shapes, by
# default 1024 of about 70 KiB. In a folder of many sizes they grew to 70 MiB.
_KERNEL_CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
_MAX_KERNELS = 128
# Variables that set glibc's heap, or put another in its place (jemalloc, tcmalloc), by their value.
_HEAP_SETTERS = "GLIBC_TUNABLES", "LD_PRELOAD"

_tuned = False
HeapSetting = Literal["trim", "cache"]
# "default" is glibc's heap where nobody has set anything: it learns from what is freed which blocks
# to keep.
HeapMode = Literal["default", "trim", "cache"]
# From this size on the default heap always gives a block pages of its own (malloc.h:
# DEFAULT_MMAP_THRESHOLD_MAX), which are returned when it is freed.
DEFAULT_MMAP_THRESHOLD_MAX_BYTES = 32 << 20

# What `set_heap_mode` set, and how many blocks of `trimming_heap` are open, in any thread.
_mode: HeapSetting = "cache"
_trimming = 0
_mode_lock = threading.Lock()


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc: only glibc has, and needs, these calls."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def tune_heap() -> bool:
    """Make this process's heap keep the memory of one tile for the next.

    By default glibc returns large blocks to the system on every `free` and gets them back page by
    page, which costs a small network on the CPU a third of its time. The largest blocks are still
    returned, but in huge pages, and only the last 128 compiled kernels are kept, if this is called
    before PyTorch makes its first tensor; values that the environment has for these are kept. These
    are settings of the whole process, so only an application should make them: the command line
    does.

    Returns:
        Whether the settings took effect.
    """
    global _tuned
    library = _glibc()
    if library is not None:
        os.environ.setdefault(_HUGE_PAGES, "1")
        for name in _KERNEL_CACHES:
            os.environ.setdefault(name, str(_MAX_KERNELS))
        _tuned = bool(
            library.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
            and library.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
        )
    return _tuned


def heap_is_tuned() -> bool:
    """Return whether `tune_heap` is in effect; it changes measured times."""
    return _tuned


def set_heap_mode(setting: HeapSetting) -> None:
    """Set how the C heap treats freed blocks, if `tune_heap` is in effect.

    ``"cache"`` is faster. ``"trim"`` takes only the bytes alive: kept blocks that no new one
    fits into made runs of window transformers take up to 1.8 times that. Inside `trimming_heap` it
    takes effect at the end.
    """
    global _mode
    with _mode_lock:
        _mode = setting
        if not _trimming:
            _apply(setting)


def _apply(setting: HeapSetting) -> None:
    library = _glibc()
    if library is None or not _tuned:
        return
    keeps = setting == "cache"
    library.mallopt(
        _M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES if keeps else _TRIM_MODE_THRESHOLD_BYTES
    )
    library.mallopt(
        _M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES if keeps else _TRIM_MODE_THRESHOLD_BYTES
    )
    library.malloc_trim(0)


@contextlib.contextmanager
def restored_heap_mode() -> Iterator[None]:
    """Set the heap mode that was found before, whatever is set inside."""
    found = _mode
    try:
        yield
    finally:
        set_heap_mode(found)


@contextlib.contextmanager
def trimming_heap() -> Iterator[None]:
    """Return freed blocks to the system inside, to avoid fragmentation, in all threads.

    Only if `tune_heap` is in effect. A heap that keeps blocks fills with those of a model file, or
    of an image that is decoded as a whole, with gaps that the blocks of a run hardly fit. Later
    runs that give blocks back do not return such gaps either, since the C library serves from a gap
    what fits into it.
    """
    global _trimming
    with _mode_lock:
        _trimming += 1
        _apply("trim")
    try:
        yield
    finally:
        with _mode_lock:
            _trimming -= 1
            if not _trimming:
                _apply(_mode)


def heap_mode() -> HeapMode | None:
    """Return how the C heap treats freed blocks, or None where that is not known.

    ``"cache"`` after `tune_heap`; ``"trim"`` where the environment has every block above a
    threshold of 1 MiB or less mapped on its own; ``"default"`` where nothing sets glibc's heap.
    Other settings of it, and other heaps, are not known.
    """
    if _tuned:
        return "cache"
    if _glibc() is None:
        return None
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if threshold.isdigit() and int(threshold) <= 1 << 20:
        return "trim"
    set_by_name = any(name.startswith("MALLOC_") for name in os.environ)
    set_by_value = any("malloc" in os.environ.get(name, "") for name in _HEAP_SETTERS)
    return None if set_by_name or set_by_value else "default"


def current_heap_mode() -> HeapMode:
    """Return how this process's C heap treats freed blocks; ``"default"`` where not known."""
    return heap_mode() or "default"


def trim_heap(*, collect: bool = False) -> None:
    """Return freed memory that the C heap holds to the system (``malloc_trim``).

    Large freed buffers stay resident otherwise, and count against a budget. With ``collect``,
    Python's garbage is collected first.
    """
    if collect:
        gc.collect()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
