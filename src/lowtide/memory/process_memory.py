"""Memory of this process and of the host, and the limits on it.

The limits are those of its container and of the shell (``ulimit``). A process that passes the limit
of its control group is killed without a message, so budgets have to know it: a container of 2 GiB
on a machine of 64 GiB has 2 GiB.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowtide.core.units import format_bytes

# Bytes of a container above which no planning passes its limit.
_AMPLE = 4 << 30
# Memory of the kernel for this process, and what comes between two looks at the container.
_PAGE_TABLES = 16 << 20
# The limit of the shell, while `failing_beyond_container` has set a lower one.
_data_limits = list[int]()

# What a limit counts: resident memory, private memory whether resident or not, or all addresses.
Counted = Literal["resident", "data", "addresses"]

_STATUS, _GROUPS = Path("proc/self/status"), Path("proc/self/cgroup")
_GROUP_FILES = Path("sys/fs/cgroup")
_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes, what is left of it, the name of what sets it, and what it counts."""

    limit_bytes: int
    free_bytes: int
    name: str
    counts: Counted = "resident"

    def __str__(self) -> str:
        return f"{format_bytes(self.limit_bytes)} by {self.name}"


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits on this process's memory; none where the system does not tell.

    Args:
        root: Folder that holds ``proc`` and ``sys``.
    """
    return [*_process_limits(root), *_group_limits(root)]


def _process_limits(root: Path) -> list[MemoryLimit]:
    """Return the limits of private memory and of addresses, which every request counts against."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    kinds: tuple[tuple[int, str, str, Counted], ...] = (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d", "data"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v", "addresses"),
    )
    found = list[MemoryLimit]()
    for which, field, name, counts in kinds:
        soft, _hard = resource.getrlimit(which)
        if which == resource.RLIMIT_DATA and _data_limits:
            soft = _data_limits[0]
        if soft != resource.RLIM_INFINITY:
            used = status_bytes(field, root)
            found.append(MemoryLimit(soft, max(0, soft - used), name, counts))
    return found


def status_bytes(field: str, root: Path = Path("/")) -> int:
    """Return a size field of this process's status file such as ``"VmRSS"``; 0 if absent."""
    file = root / _STATUS
    return _fields(file).get(f"{field}:", 0) * 1024 if file.exists() else 0


@contextlib.contextmanager
def failing_beyond_container(root: Path = Path("/")) -> Iterator[None]:
    """Let memory requests fail inside that the container of this process has no room for.

    The kernel would end the process. Requests of other threads fail too. Nothing is done where a
    container leaves gigabytes.
    """
    groups = _group_limits(root)
    free = min((one.free_bytes for one in groups), default=_AMPLE)
    if free >= _AMPLE or _data_limits:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    free = max(0, free - _PAGE_TABLES - _heap_holes(root))
    most = status_bytes("VmData", root) + free
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    _data_limits.append(soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        _data_limits.pop()


def _heap_holes(root: Path) -> int:
    """Return bytes of the C heap without memory, which later blocks fill without any request."""
    holes, inside = 0, False
    for line in (root / "proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # the line that begins a mapping
            inside = rest[-1] == "[heap]"
        elif inside and name in ("Size:", "Rss:"):
            holes += int(rest[0]) * 1024 * (1 if name == "Size:" else -1)
    return holes


def _group_limits(root: Path) -> list[MemoryLimit]:
    """Return the limits of the control groups that this process is in, of either version.

    A group counts what its parents count, so the limits of all of them hold. A container sees its
    own group as the root.
    """
    try:
        lines = (root / _GROUPS).read_text().splitlines()
    except OSError:
        return []
    found = list[MemoryLimit]()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, files = root / _GROUP_FILES, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / _GROUP_FILES / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = base / path.lstrip("/")
        while group.is_relative_to(base):
            found.extend(_limit_of(group, *files))
            group = group.parent
    return found


def _limit_of(group: Path, limit: str, used: str, prefix: str) -> list[MemoryLimit]:
    """Return the limit of one group, if it has one.

    Files that were read and can be read again are used, but give way; half of those that are in
    use, such as libraries, since without them a program crawls.
    """
    try:
        most, current = (group / limit).read_text(), int((group / used).read_text())
        stat = _fields(group / "memory.stat")
        given_back = (
            stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0) // 2
        )
    except OSError:
        return []
    # 2^63 less a page is the first version's word for none.
    if most.strip() == "max" or int(most) >= 1 << 62:
        return []
    free = max(0, int(most) - current + given_back)
    return [MemoryLimit(int(most), min(free, int(most)), "the memory limit of the container")]


def _fields(file: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by the word before it."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


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


class SharedHighWaterMark:
    """System-wide high-water mark that any reset clears, shared by several readers.

    ``read`` returns one or more byte counts that only grow until ``reset`` sets them back to what
    is used at that moment; ``reset`` returns whether that is possible here.
    """

    def __init__(self, read: Callable[[], tuple[int, ...]], reset: Callable[[], bool]) -> None:
        self._read, self._reset = read, reset
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[HighWaterMarkReader] = weakref.WeakSet()

    def reader(self) -> HighWaterMarkReader:
        """Return a new reader; start it with `HighWaterMarkReader.restart`."""
        return HighWaterMarkReader(self)


class HighWaterMarkReader:
    """Highest values since this reader's own last `reset`, whatever others reset."""

    def __init__(self, mark: SharedHighWaterMark) -> None:
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
RESIDENT_PEAK = SharedHighWaterMark(lambda: (status_bytes("VmHWM"),), _reset_resident_peak)
