"""Resident memory of this process, its high-water marks, and host memory."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from lowtide.memory.memory_limits import memory_limits

_STATUS = Path("/proc/self/status")
_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def anonymous_bytes() -> int:
    """Return anonymous resident bytes of this process (not backed by a file)."""
    return resident_parts()[0]


def resident_parts() -> tuple[int, int]:
    """Return resident bytes of this process: (anonymous, of mapped files)."""
    try:
        # Without a Python file object: a run asks before each of its layers.
        descriptor = os.open(_STATM, os.O_RDONLY)
    except OSError:
        return _most_resident_bytes(), 0
    try:
        _, resident, shared, *_ = os.read(descriptor, 256).split()
    finally:
        os.close(descriptor)
    return (int(resident) - int(shared)) * _PAGE, int(shared) * _PAGE


def _most_resident_bytes() -> int:
    """Return the process's highest resident bytes, where the system tells no more."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_host_bytes() -> int:
    """Return host memory available to this process without swapping."""
    return min([_available_bytes(), *(one.free_bytes for one in memory_limits())])


def total_host_bytes() -> int:
    """Return the host memory that this process may have at the most: the machine's, or a limit."""
    return min([physical_host_bytes(), *(one.limit_bytes for one in memory_limits())])


def physical_host_bytes() -> int:
    """Return the total host memory of this machine."""
    return int(os.sysconf("SC_PHYS_PAGES")) * _PAGE


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES")) * _PAGE


def status_bytes(field: str) -> int:
    """Return a size field of ``/proc/self/status`` such as ``"VmRSS"``; 0 if absent."""
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 to the null device, for libraries that bypass Python."""
    try:
        saved = os.dup(2)
    except OSError:  # a program without a standard error has nothing to silence
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


class HighWaterMark:
    """System-wide high-water mark that any reset clears, shared by several readers.

    ``read`` returns one or more byte counts that only grow until ``reset`` sets them back to what
    is used at that moment; ``reset`` returns whether that is possible here.
    """

    def __init__(self, read: Callable[[], tuple[int, ...]], reset: Callable[[], bool]) -> None:
        self._read, self._reset = read, reset
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[MarkReader] = weakref.WeakSet()

    def reader(self) -> MarkReader:
        """Return a new reader; start it with `MarkReader.restart`."""
        return MarkReader(self)


class MarkReader:
    """Highest values since this reader's own last `reset`, whatever others reset."""

    def __init__(self, mark: HighWaterMark) -> None:
        self._mark = mark
        self._best: tuple[int, ...] = ()

    def reset(self) -> bool:
        """Restart this reader alone; returns False where the mark cannot be reset."""
        mark = self._mark
        with mark._lock:
            now = mark._read()
            for reading in mark._readers:
                reading._best = _higher(reading._best, now)
            works = mark._reset()
            self._best = ()
            mark._readers.add(self)
        return works

    def peaks(self) -> tuple[int, ...]:
        """Return the highest values since `reset`."""
        with self._mark._lock:
            return _higher(self._best, self._mark._read())


def _higher(known: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, known, now)) if known else now


def _reset_resident_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no such file, or a sandbox that forbids it: the mark is then not reported
        return False
    return True


# The kernel's mark of all resident pages, mapped files included.
RESIDENT_PEAK = HighWaterMark(lambda: (status_bytes("VmHWM"),), _reset_resident_peak)
