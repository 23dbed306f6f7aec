"""RLIMIT_DATA limit on this process: real CPU allocation failures, for tests."""

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
    """Limit this process to ``extra_bytes`` more private memory than it has now.

    Inside, a CPU allocation of PyTorch beyond that raises the `RuntimeError` that
    `is_out_of_memory` of ``lowtide.memory.oom`` recognizes, and one of numpy a `MemoryError`.
    Memory counts from the moment it is requested, used or not, stacks of new threads included
    (usually 8 MiB each): start threads before. What the C heap keeps for reuse does not count
    again. Libraries that do not check their allocations may crash, so this is for tests and for
    separate processes.

    It is the soft limit RLIMIT_DATA of the whole process, restored on exit; a lower existing limit
    stays.

    Raises:
        UsageError: on systems other than Linux, and for ``extra_bytes`` below 1.
        LowtideError: where the kernel accepts the limit but does not enforce it, as some sandboxes.
    """
    if extra_bytes < 1:
        raise UsageError(f"extra_bytes must be at least 1, not {extra_bytes}")
    if not sys.platform.startswith("linux"):
        raise UsageError(
            "only Linux can limit the memory of a process",
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
    """Return writable private memory of this process, as RLIMIT_DATA counts it."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise LowtideError(f"{_STATUS} has no VmData line, the private memory of this process")


def _try_to_exceed(extra_bytes: int) -> None:
    """Raise `LowtideError` if twice the allowance can be mapped; it is not touched."""
    size = 2 * extra_bytes + mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return
    memory.close()
    raise LowtideError(
        f"this system does not enforce the limit: {format_bytes(size)} could be mapped beyond it",
        hint="lowtide.memory.simulation.virtual_device.VirtualDevice simulates one anywhere",
    )
