"""The most that is alive at once while a call runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.memory.measurement import profiler_events


def live_peak_bytes(call: Callable[[], Any]) -> int:
    """Peak bytes of tensors and kernel scratch that live at once while ``call`` runs, on the CPU.

    Read from the profiler's memory events, which see every allocation that this thread asks of
    PyTorch's CPU allocator, the operators' own scratch included. The result of ``call`` is
    dropped inside.
    """
    blocks = profiler_events.follow_events()
    try:
        call()
    finally:
        profiler_events.stop_events(blocks)
    return blocks.peak
