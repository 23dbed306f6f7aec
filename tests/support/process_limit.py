"""RLIMIT_DATA limit on this process: real CPU allocation failures."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

_STATUS = Path("/proc/self/status")


@contextlib.contextmanager
def process_limit(extra_bytes: int) -> Iterator[None]:
    """Limit this process to ``extra_bytes`` more private memory than it has now.

    Inside, an allocation of PyTorch beyond that raises a `RuntimeError`, and one of numpy a
    `MemoryError`. Memory counts from the moment it is requested, used or not, stacks of new threads
    included (usually 8 MiB each): start threads before. What the C heap keeps for reuse does not
    count again. It is the soft limit RLIMIT_DATA, restored on exit; a lower existing one stays.
    """
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
    raise OSError(f"{_STATUS} has no VmData line, the private memory of this process")


def _try_to_exceed(extra_bytes: int) -> None:
    """Raise `OSError` if twice the allowance can be mapped; it is not touched."""
    size = 2 * extra_bytes + mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return
    memory.close()
    raise OSError(f"this system does not enforce the limit: {size} bytes could be mapped beyond it")
