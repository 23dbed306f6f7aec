"""CPU memory ledger of a traced run.

Storages are exact, operator workspace is measured, and page rounding is simulated.
"""

from __future__ import annotations

import itertools

from lowtide.core.heap import HeapMode
from lowtide.memory.ledger import device_row
from lowtide.memory.prediction.calibration import Calibration, shipped_runtime
from lowtide.memory.prediction.cpu_workspace import CpuWorkspace, peak_with_workspace
from lowtide.memory.prediction.heap_growth import heap_row, heap_use
from lowtide.memory.prediction.op_signature import signature
from lowtide.memory.prediction.result import PredictedMemory, live_tensor_rows, margin_row
from lowtide.memory.prediction.runtime_objects import count_runtime_objects
from lowtide.memory.tracing.trace import Trace

_PAGE = 4096
# From this size on an untuned C library gives an allocation its own pages.
_MMAP_THRESHOLD = 64 << 10
# Bytes of alignment and header that posix_memalign adds to one allocation.
_HEADER = 80


def predict_cpu(
    trace: Trace, workspace: CpuWorkspace, calibration: Calibration, heap: HeapMode = "trim"
) -> PredictedMemory:
    """Predict the peak resident memory of ``trace`` on this machine's CPU, in a C heap."""
    peak = peak_with_workspace(trace, workspace.operator_peak)
    op = peak.op if peak.op >= 0 else None
    peak_op = trace.peak_op() if op is None else op
    rows = live_tensor_rows(trace, op)
    live = sum(row.value for row in rows)
    call = None if op is None else trace.ops[op].call
    assumed = call is not None and signature(call) in workspace.assumed
    rows.append(
        device_row("workspace", max(0, peak.total - live), "prior" if assumed else "probed")
    )
    rows.append(device_row("allocator", _rounding(trace, peak_op), "simulated"))
    objects = count_runtime_objects(trace, peak_op)
    rows.append(device_row("runtime", shipped_runtime().total_bytes(objects), "calibrated"))
    predicted = sum(row.value for row in rows)
    rows.append(margin_row(rows, calibration.upper(predicted)))
    use = heap_use(trace, peak_op, heap)
    kept = heap_row(use, heap, training=trace.has_backward)
    if kept is not None:
        rows.append(kept)
    reasons = sorted({(why, what) for what, why in workspace.assumed.values()})
    notes = tuple(
        f"{why}, counted at their upper bound: {', '.join(what for _, what in these)}"
        for why, these in itertools.groupby(reasons, key=lambda reason: reason[0])
    )
    name = trace.ops[peak_op].name if peak_op < len(trace.ops) else ""
    return PredictedMemory(
        tuple(rows), trace.phase(peak_op), name, trace.peak_bytes, notes, objects, use
    )


def _rounding(trace: Trace, op: int) -> int:
    """Return the bytes that pages and headers add to the storages alive at the peak."""
    sizes = trace.sizes_during(op)
    return sum(
        -(-(size + _HEADER) // _PAGE) * _PAGE - size if size >= _MMAP_THRESHOLD else _HEADER
        for size in sizes
    )
