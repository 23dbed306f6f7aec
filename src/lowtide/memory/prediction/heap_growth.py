"""Bytes that a C heap which keeps freed blocks holds beyond the live tensors.

glibc serves a request from the smallest gap that fits, and PyTorch's aligned ones need a little
more than they keep, so that the gap of a freed tensor is often too small for the next of its size.
Small objects between tensors keep gaps apart. Which ones differs from run to run: the heap of a
simulated run is several times too small, so growth comes from measured runs instead.
"""

from __future__ import annotations

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

    ``max_live`` are the most alive at once, ``at_peak`` those alive at the run's peak.
    """

    max_live: int
    at_peak: int


def heap_use(trace: Trace, op: int, heap: HeapMode) -> HeapUse:
    """Return a trace's use of the heap, with its peak at operator ``op``.

    Weights and inputs are made before the run and stay; an optimizer's state is made in the first
    step, between gradients that are freed.
    """
    largest = LARGEST_KEPT[heap]
    now = sum(
        size
        for storage, size in trace.initial.items()
        if trace.kinds.get(storage) == "optimizer" and size < largest
    )
    most = at_peak = now
    for event in trace.events:
        if abs(event.size) < largest and event.storage not in trace.initial:
            now += event.size
        most = max(most, now)
        if event.op <= op:
            at_peak = now
    return HeapUse(most, at_peak)


def heap_row(use: HeapUse, heap: HeapMode, *, training: bool) -> LedgerRow | None:
    """Return the ledger row of what a heap keeps at the peak; None if it keeps nothing."""
    known = shipped_heap_growth(heap, training=training)
    if known is None:
        return None
    expected, most = (
        max(0, round(growth * use.max_live) - use.at_peak)
        for growth in (known.growth, known.upper_growth)
    )
    return device_row(HEAP_ROW, expected, "calibrated", most)
