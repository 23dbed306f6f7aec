"""What PyTorch's state says where a process has loaded it, and what counts where it has not."""

from __future__ import annotations

import os
import sys
from types import ModuleType

_chosen = 0  # threads of a process without PyTorch; 0 where nobody chose


def loaded_torch() -> ModuleType | None:
    """Return PyTorch if this process has loaded it."""
    return sys.modules.get("torch")


def thread_count() -> int:
    """Return the number of threads that compute: PyTorch's, or one for each processor."""
    if (torch := loaded_torch()) is not None:
        return torch.get_num_threads()
    if _chosen:
        return _chosen
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_thread_count(count: int) -> None:
    """Set the number of threads that compute in this process."""
    global _chosen
    _chosen = count
    if (torch := loaded_torch()) is not None:
        torch.set_num_threads(count)
