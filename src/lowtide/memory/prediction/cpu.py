"""CPU memory ledger of a traced run, and the workspace of its operators.

Storages are exact, and page rounding is simulated. The workspace, which an operator allocates while
it runs in addition to its results, is measured once per call signature and cached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lowtide.core.heap import HeapMode
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.plan import device_row
from lowtide.memory.plan_store import JsonCacheTable
from lowtide.memory.prediction.calibration import BoundCalibration
from lowtide.memory.prediction.operator_costs import (
    MAX_WORKSPACE_RATIO_LOW_PRECISION,
    Call,
    convolution_rows,
    convolution_with_rows,
    is_foreign,
    operand_bytes,
    operand_tensors,
    operator_signature,
    workspace_bound,
)
from lowtide.memory.prediction.result import (
    PredictedMemory,
    count_runtime_objects,
    heap_row,
    heap_use,
    live_tensor_rows,
    margin_row,
    shipped_runtime,
)
from lowtide.memory.process_memory import available_host_bytes
from lowtide.memory.tracing.fake_fixes import RNN_LAYER, RNN_LAYER_BACKWARD
from lowtide.memory.tracing.trace import MemoryTrace, TensorFacts

TOO_LARGE, UNSAFE = "too large to be measured here", "not safe to be run on zeros"

# Convolutions with larger operands are measured on some of their rows and scaled, since their
# workspace grows linearly with the rows. With fewer bytes libraries choose other algorithms.
_SCALE_ABOVE, _SCALED_BYTES = 64 << 20, 12 << 20
_MIN_ROWS = 128
_MAX_OPERAND_BYTES = 1 << 32
_SCALABLE = frozenset(
    {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
)


class WorkspacePeak(NamedTuple):
    """Peak of a run with operator workspace included, and the operator that sets it.

    ``total`` is the peak in bytes and ``live`` the bytes of the storages alive around it; ``op`` is
    the operator's index in the trace (-1 where the storages alone set the peak), ``name`` its name.
    """

    total: int
    live: int
    op: int
    name: str

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace, on top of the storages alive around the operator."""
        return self.total - self.live


@dataclass
class CpuWorkspaceMeter:
    """Measures the peak bytes of CPU operators, once per signature.

    An operator whose operands and results exceed ``limit_bytes`` is not run; by default the limit
    is a share of free memory. An operator that zeros might make crash is not run either. One that
    is not run is taken at its bound.

    Attributes:
        store: Cache of what was measured.
        limit_bytes: Largest operands and results of an operator that is run, in bytes.
        measured: Number of signatures that were not in ``store`` yet.
        assumed: By signature, the (name, reason) of each operator taken at its bound.
    """

    store: JsonCacheTable
    limit_bytes: int = field(default_factory=lambda: _measurable_bytes(available_host_bytes()))
    measured: int = 0
    assumed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def operator_peak(self, call: Call, result_bytes: int = 0) -> int:
        """Return the peak bytes of one operator while it runs, its results included.

        ``result_bytes`` are the bytes of those results, as far as they are known.
        """
        key = operator_signature(call)
        known = self.store.get(key)
        if known is None:
            operands = operand_bytes(call)
            if not _is_safe(call):
                return self._bound(call, result_bytes, UNSAFE)
            if (
                operands > _SCALE_ABOVE
                and call[0] in _SCALABLE
                and convolution_rows(call) > _MIN_ROWS
            ):
                known = self._extrapolated(call)
            elif operands + result_bytes > self.limit_bytes:
                return self._bound(call, result_bytes, TOO_LARGE)
            else:
                known = measure_operator(call)
            self.measured += 1
            self.store.put(key, known)
        return known

    def _bound(self, call: Call, result_bytes: int, why: str) -> int:
        self.assumed[operator_signature(call)] = call[0].__name__, why
        return workspace_bound(call, result_bytes)

    def _extrapolated(self, call: Call) -> int:
        share = _SCALED_BYTES / operand_bytes(call)
        few = max(_MIN_ROWS // 4, math.ceil(convolution_rows(call) * share))
        (low, low_bytes), (high, high_bytes) = (
            (rows, measure_operator(convolution_with_rows(call, rows))) for rows in (few, 2 * few)
        )
        slope = (high_bytes - low_bytes) / (high - low)
        return math.ceil(high_bytes + slope * (convolution_rows(call) - high))


# In addition to `torch.Tag.core`: they copy integer elements, or read only their shape.
_COPY_OPERATORS = frozenset(
    """
    copy_ stack roll fill_ ones_like empty_like rand_like randn_like
    """.split()
)


def _is_safe(call: Call) -> bool:
    """Return whether an operator can be run on zeros of the recorded layouts in this process.

    It can if it only computes with its arguments, or checks those that are indices. A kernel that
    does not check its indices, or that PyTorch's fake results describe wrongly, ends the process.
    """
    function = call[0]
    if is_foreign(call):
        return False
    if torch.Tag.core in function.tags or torch.Tag.pointwise in function.tags:
        return True
    if function is RNN_LAYER_BACKWARD:
        return call[1][-1].shape != (0,)  # beyond the end of an empty workspace it would read
    values = {facts.dtype for facts in operand_tensors(call)} - {torch.bool}
    return all(kind.is_floating_point or kind.is_complex for kind in values) or (
        function.overloadpacket.__name__ in _COPY_OPERATORS
    )


def _measurable_bytes(free_bytes: int) -> int:
    """Return the most bytes of operands and results of an operator that is measured.

    With its workspace an operator takes several times as much.
    """
    return min(_MAX_OPERAND_BYTES, free_bytes // MAX_WORKSPACE_RATIO_LOW_PRECISION)


def peak_with_workspace(
    trace: MemoryTrace, operator_peak: Callable[[Call, int], int]
) -> WorkspacePeak:
    """Return the peak of a trace with every operator's workspace included.

    Operators are visited by their largest possible peak, in descending order. Those that cannot
    exceed the peak found so far are never measured.

    Args:
        trace: A trace made with ``keep_calls``.
        operator_peak: Returns the peak bytes of a call, given the bytes of its results; it may
            measure, so it is called for as few operators as possible.
    """
    best = WorkspacePeak(trace.peak_bytes, trace.peak_bytes, -1, "storages")
    candidates = sorted(
        (
            (op.bytes_before + workspace_bound(op.call, op.result_bytes), index, op)
            for index, op in enumerate(trace.ops)
            if op.call
        ),
        key=lambda candidate: -candidate[0],
    )
    for most, index, op in candidates:
        if most <= best.total:
            break
        assert op.call is not None
        total = op.bytes_before + operator_peak(op.call, op.result_bytes)
        if total > best.total:
            best = WorkspacePeak(total, max(op.bytes_before, op.bytes_after), index, op.name)
    return best


def peak_within(trace: MemoryTrace, enough: int, operator_peak: Callable[[Call, int], int]) -> int:
    """Return a bound of the bytes that a run adds to those held before it.

    Only operators whose bound exceeds ``enough`` bytes are measured: to know whether a run stays
    within these, the others need not be. A bound above ``enough`` may be short of the peak.

    Args:
        trace: A trace made with ``keep_calls``.
        enough: Bytes to add to those held before the run.
        operator_peak: As for `peak_with_workspace`.
    """
    held = trace.initial_bytes
    peak = trace.peak_bytes - held
    for op in trace.ops:
        if op.call is None or peak > enough:
            continue
        before = op.bytes_before - held
        most = before + workspace_bound(op.call, op.result_bytes)
        if most > enough:
            most = before + operator_peak(op.call, op.result_bytes)
        peak = max(peak, most)
    return peak


def measure_operator(call: Call) -> int:
    """Run one operator on zeros in this process and return its peak bytes, results included."""
    # A recurrent layer in training keeps more for its backward pass.
    trains = call[0] is RNN_LAYER and call[1][-1]
    with torch.enable_grad() if trains else torch.inference_mode():
        return live_peak_bytes(materialize_call(call))


def materialize_call(call: Call, device: torch.device | None = None) -> Callable[[], Any]:
    """Return a closure that runs the operator on zero tensors of the recorded layouts.

    Args:
        call: The operator and its described arguments.
        device: Where the tensors are made; None means the CPU.
    """
    function, args, keywords = call
    positional = [_make(arg, device) for arg in args]
    named = {name: _make(value, device) for name, value in keywords.items()}
    return lambda: function(*positional, **named)


def _make(value: Any, device: torch.device | None) -> Any:
    """Replace `TensorFacts` by zero tensors; zeros are valid as values and as indices."""
    if isinstance(value, TensorFacts):
        span = sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True)) + 1
        storage = torch.zeros(0 if 0 in value.shape else span, dtype=value.dtype, device=device)
        return storage.as_strided(value.shape, value.stride)
    if isinstance(value, tuple):
        return [_make(part, device) for part in value]
    return value


_PAGE = 4096
# From this size on an untuned C library gives an allocation its own pages.
_MMAP_THRESHOLD = 64 << 10
# Bytes of alignment and header that posix_memalign adds to one allocation.
_HEADER = 80


def predict_cpu(
    trace: MemoryTrace,
    workspace: CpuWorkspaceMeter,
    calibration: BoundCalibration,
    heap: HeapMode = "trim",
) -> PredictedMemory:
    """Predict the peak resident memory of ``trace`` on this machine's CPU, in a C heap."""
    peak = peak_with_workspace(trace, workspace.operator_peak)
    op = peak.op if peak.op >= 0 else None
    peak_op = trace.peak_op() if op is None else op
    rows = live_tensor_rows(trace, op)
    live = sum(row.value for row in rows)
    call = None if op is None else trace.ops[op].call
    assumed = call is not None and operator_signature(call) in workspace.assumed
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


def _rounding(trace: MemoryTrace, op: int) -> int:
    """Return the bytes that pages and headers add to the storages alive at the peak."""
    sizes = trace.sizes_during(op)
    return sum(
        -(-(size + _HEADER) // _PAGE) * _PAGE - size if size >= _MMAP_THRESHOLD else _HEADER
        for size in sizes
    )
