"""A limit that the system itself keeps: real allocation failures in this process, on the CPU."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.units import format_bytes

_STATUS = Path("/proc/self/status")


@contextlib.contextmanager
def process_limit(extra_bytes: int) -> Iterator[None]:
    """Let this process take at most ``extra_bytes`` more private memory than it has now.

    Inside, an allocation of PyTorch on the CPU beyond that raises the `RuntimeError` that
    `is_out_of_memory` of ``lowtide.memory.oom`` recognizes, and one of numpy a
    `MemoryError`. Memory counts from the moment it is asked for, used or not, stacks of new
    threads included (8 MiB each, as a rule): threads should be there before. What the C heap
    keeps for reuse can be had without asking. Libraries that do not check what they get may
    crash, so this is for tests and for processes of their own.

    It is the soft limit RLIMIT_DATA of the whole process, set back on leaving; a lower one that
    was there stays. Raises `UsageError` on systems other than Linux and for no bytes at all,
    and `LowtideError` where the kernel takes the limit but does not keep it, as some sandboxes.
    """
    if extra_bytes < 1:
        raise UsageError(f"a limit of {extra_bytes} more bytes leaves nothing to run in")
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "the memory of a process can be limited on Linux only",
            hint="lowtide.memory.simulation.virtual_device.VirtualDevice simulates one anywhere",
        )
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = [_private_bytes() + extra_bytes, soft, hard]
    limit = min(value for value in lowest if value != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        _try_to_exceed(extra_bytes)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _private_bytes() -> int:
    """Writable private memory of this process, as the kernel counts it for RLIMIT_DATA."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise LowtideError(f"{_STATUS} does not say how much data memory this process has")


def _try_to_exceed(extra_bytes: int) -> None:
    """Raise `LowtideError` if twice the allowance can be had after all; it is not touched."""
    size = 2 * extra_bytes + mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return
    memory.close()
    raise LowtideError(
        f"this system does not keep the limit: {format_bytes(size)} could be had beyond it",
        hint="lowtide.memory.simulation.virtual_device.VirtualDevice simulates one anywhere",
    )
