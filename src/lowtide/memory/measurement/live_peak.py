"""Peak of live tensors and operator workspace during one call on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.memory.measurement import profiler_events


def live_peak_bytes(call: Callable[[], Any]) -> int:
    """Run ``call`` on the CPU and return the peak bytes of tensors and workspace.

    Read from the profiler's memory events, which see every allocation that this thread requests
    from PyTorch's CPU allocator, operators' own workspace included. The result of ``call`` is
    dropped inside.
    """
    blocks = profiler_events.start_events()
    try:
        call()
    finally:
        profiler_events.stop_events(blocks)
    return blocks.peak
