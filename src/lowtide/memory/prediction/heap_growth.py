"""Bytes that a C heap which keeps freed blocks holds beyond the live tensors.

glibc serves a request from the smallest gap that fits, and PyTorch's aligned ones need a little
more than they keep, so that the gap of a freed tensor is often too small for the next of its size.
Small objects between tensors keep gaps apart. Which ones differs from run to run: the heap of a
simulated run is several times too small, so growth comes from measured runs instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lowtide.core.heap import DEFAULT_MMAP_THRESHOLD_MAX_BYTES, MMAP_THRESHOLD_BYTES, HeapMode
from lowtide.memory.ledger import LedgerRow, device_row
from lowtide.memory.prediction.calibration import shipped_heap_growth
from lowtide.memory.tracing.trace import Trace

HEAP_ROW = "heap"
# Blocks from these sizes on have pages of their own, which no gap keeps.
LARGEST_KEPT: dict[HeapMode, int] = {
    "default": DEFAULT_MMAP_THRESHOLD_MAX_BYTES,
    "cache": MMAP_THRESHOLD_BYTES,
    "trim": 0,
}


class HeapUse(NamedTuple):
    """Bytes of a run in blocks that the heap keeps when they are freed.

    ``max_live`` are the most alive at once, ``at_peak`` those alive at the run's peak, ``block``
    those of the largest.
    """

    max_live: int
    at_peak: int
    block: int


def heap_use(trace: Trace, op: int, heap: HeapMode) -> HeapUse:
    """Return a trace's use of the heap, with its peak at operator ``op``.

    Weights and inputs are made before the run and stay; an optimizer's state is made in the first
    step, between gradients that are freed.
    """
    states = [
        size for storage, size in trace.initial.items() if trace.kinds.get(storage) == "optimizer"
    ]
    kept = [event for event in trace.events if event.storage not in trace.initial]
    kept = [event for event in kept if abs(event.size) < LARGEST_KEPT[heap]]
    states = [size for size in states if size < LARGEST_KEPT[heap]]
    most = at_peak = now = sum(states)
    for event in kept:
        now += event.size
        most = max(most, now)
        if event.op <= op:
            at_peak = now
    return HeapUse(most, at_peak, max([*states, *(event.size for event in kept)], default=0))


def heap_row(use: HeapUse, heap: HeapMode, *, training: bool) -> LedgerRow | None:
    """Return the ledger row of what a heap keeps at the peak; None if it keeps nothing."""
    known = shipped_heap_growth(heap, training=training)
    if known is None:
        return None
    expected = max(0, round(known.growth * use.max_live) - use.at_peak)
    gaps = math.ceil(known.upper_gaps * use.block)
    return device_row(HEAP_ROW, expected, "calibrated", expected + gaps)
