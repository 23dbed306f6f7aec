"""How this room sets libvips up, and what it has to do around it."""

from __future__ import annotations

import functools
import re

import pyvips

from lowtide.core.heap import trim_heap
from lowtide.media._vips_windows import shrink_windows

# libvips keeps rows for each worker between the stages of a pipeline, so its memory grows with
# the number of cores; and the AVIF encoder cuts its work by this number, so that the bytes of a
# file would depend on the machine. Compressing is serial and the network has the other cores.
WORKERS = 1

TRIM_READING, TRIM_WRITING = 8 << 20, 32 << 20
# Lines that say nothing, and one that fills pages when a file ends early.
_EMPTY_TALK = re.compile(r": bad seek to \d|^system error: Unknown error")
# Of libjpeg's warnings those that are not of damaged data. Bytes before a restart marker are data
# that could not be read.
_HARMLESS = re.compile(
    r"extraneous bytes before marker 0x(?!d[0-7])|unknown (Adobe|JFIF)|inconsistent progression"
    r"|invalid SOS parameters",
    re.IGNORECASE,
)


@functools.cache
def configure() -> None:
    """Make libvips streaming-only: no operation cache, one worker, small windows."""
    pyvips.cache_set_max(0)
    pyvips.cache_set_max_mem(0)
    # pyvips makes this one at run time, out of sight of type checkers.
    pyvips.concurrency_set(WORKERS)  # pyright: ignore[reportAttributeAccessIssue]
    windows_are_small()


@functools.cache
def windows_are_small() -> bool:
    """Whether libvips could be told to keep few rows; prices depend on it."""
    return shrink_windows()


class HeapTrimmer:
    """Gives freed pixel buffers back to the system every few megabytes.

    libvips takes its row buffers from glibc with an alignment, and glibc cannot reuse a freed
    aligned block for the next one of the same size: without this, three times the memory in use
    stays resident.
    """

    def __init__(self, every: int) -> None:
        self._every, self._pending = every, 0

    def add(self, count: int) -> None:
        """Note that ``count`` bytes passed through; returns free pages when enough have."""
        self._pending += count
        if self._pending >= self._every:
            self._pending = 0
            trim_heap()


# What pyvips raises of a file that libvips cannot read: the second where libvips quotes bytes of it
# that are no text.
FILE_ERRORS = (pyvips.Error, UnicodeDecodeError)


def is_harmless(error: pyvips.Error | UnicodeDecodeError) -> bool:
    """Whether what libvips said last of a JPEG is no loss of pixels: bytes that belong to nothing,
    as many cameras leave between segments, or a number that is not known."""
    if isinstance(error, UnicodeDecodeError):
        return False
    lines = [line for line in str(error.detail or error.message).splitlines() if line.strip()]
    return bool(lines) and _HARMLESS.search(lines[-1]) is not None


def reason(error: pyvips.Error | UnicodeDecodeError) -> str:
    """What libvips said last, on one line and without its repetitions."""
    if isinstance(error, UnicodeDecodeError):
        return "libvips quotes bytes that are no text"
    lines = (line.strip() for line in str(error.detail or error.message).splitlines())
    unique = list(dict.fromkeys(line for line in lines if line and not _EMPTY_TALK.search(line)))
    # What it said of another file before, which could be read.
    before = [line for line in unique[-2:-1] if not _HARMLESS.search(line)]
    return "; ".join([*before, *unique[-1:]]) or "libvips gives no reason"
