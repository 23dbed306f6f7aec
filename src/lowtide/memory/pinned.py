"""Pinned (page-locked) host memory, for asynchronous copies to and from a GPU."""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
from typing import Any

import torch

from lowtide.core.units import MIB
from lowtide.memory.process_memory import total_host_bytes

# The size of a huge page on x86-64 and most other architectures.
_HUGE = 2 * MIB


class PinnedMemory:
    """Allocator of pinned host memory of exact size, up to the platform's share.

    PyTorch's own pinned allocator rounds up to powers of two (pytorch/pytorch#95823). Beyond the
    share, or where the driver refuses, memory is pageable: copies from it are slower, not wrong.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.pinned_bytes = 0
        self._registered: list[torch.Tensor] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized memory, uint8 (``nbytes``,), pinned where possible."""
        if not torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8)
        memory = _in_huge_pages(nbytes)
        if self.limit_bytes is None:
            self.limit_bytes = int(_pinned_share() * total_host_bytes())
        if nbytes and self.pinned_bytes + nbytes <= self.limit_bytes and _register(memory):
            self.pinned_bytes += nbytes
            self._registered.append(memory)
        return memory

    def close(self) -> None:
        """Unpin all memory; no copy may be in flight."""
        for memory in self._registered:
            _runtime().cudaHostUnregister(memory.data_ptr())
        self._registered.clear()
        self.pinned_bytes = 0


def _pinned_share() -> float:
    """Return the share of host memory that may be pinned, a prior, lower on Windows."""
    windows = sys.platform == "win32" or "microsoft" in platform.release().lower()  # or WSL
    return 0.4 if windows else 0.5


def _in_huge_pages(nbytes: int) -> torch.Tensor:
    """Return uninitialized uint8 memory in huge pages where the system has them.

    The driver locks memory page by page, small pages at about 1 GiB per second.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or nbytes < _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    region = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones will do
        region.madvise(advice)
    return torch.frombuffer(region, dtype=torch.uint8, count=nbytes)


def _register(memory: torch.Tensor) -> bool:
    if int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    # The runtime reports the refusal again at the next kernel launch, anybody's.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False


def _runtime() -> Any:
    return torch.cuda.cudart()
