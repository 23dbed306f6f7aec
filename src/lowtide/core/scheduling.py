"""Scheduling of this process's threads, kept where a library changes it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_THREADS = Path("/proc/self/task")

# Of a thread: its policy, and its priority within that.
Scheduling = tuple[int, int]


def thread_scheduling() -> dict[int, Scheduling]:
    """Return how each thread of this process is scheduled; nothing where there is no /proc."""
    found: dict[int, Scheduling] = {}
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            number = int(thread.name)
            priority = os.sched_getparam(number).sched_priority
            found[number] = os.sched_getscheduler(number), priority
    return found


@contextlib.contextmanager
def scheduling_kept() -> Iterator[None]:
    """Give threads the scheduling back that they had before, and new ones that of this thread.

    SVT-AV1 makes its own threads and the one that opens it real-time where it may: those of a
    whole machine then wait for them.
    """
    before = thread_scheduling()
    try:
        yield
    finally:
        for number, now in thread_scheduling().items():
            policy, priority = before.get(number) or before[threading.get_native_id()]
            if now != (policy, priority):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(number, policy, os.sched_param(priority))
