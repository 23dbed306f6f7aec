"""What operators need while they run beyond their results: measured once each, then remembered."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lowtide.core.heap import trim_heap
from lowtide.memory.cache import WorkspaceStore
from lowtide.memory.measurement.live_peak import live_peak_bytes
from lowtide.memory.prediction.isolated_measurement import (
    NotMeasuredError,
    is_safe_in_process,
    measure_isolated,
)
from lowtide.memory.prediction.op_signature import (
    WIDEST_LOW_PRECISION,
    Call,
    is_low_precision,
    operand_bytes,
    row_count,
    signature,
    with_rows,
    workspace_bound,
)
from lowtide.memory.process_memory import RESIDENT_PEAK, available_host_bytes, status_bytes
from lowtide.memory.tracing.rnn_workspace import RNN_LAYER
from lowtide.memory.tracing.trace import TensorFacts, Trace

TOO_LARGE = "too large to be measured here"

# Larger ones are measured on some of their rows and scaled, since their scratch grows by the
# row; on fewer bytes than that, libraries choose other algorithms.
_SCALE_ABOVE, _SCALED_BYTES = 64 << 20, 12 << 20
_LEAST_ROWS = 128
_SMALL, _TOUCHES = 1 << 20, 3
_MOST = 1 << 32
_SCALABLE = frozenset(
    {
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    }
)


class WorkspacePeak(NamedTuple):
    """The most that a run needs at once, scratch included, and the operator that needs it."""

    total: int
    live: int
    op: int
    name: str

    @property
    def scratch(self) -> int:
        """Bytes beyond the storages that are alive before and after."""
        return self.total - self.live


@dataclass
class CpuWorkspace:
    """Measures operators on this machine's CPU, each signature once, kept in a store.

    ``measured`` counts what was not known yet. No operator is run whose operands and results
    exceed ``limit_bytes`` (by default a part of what is free), and one that might end this process
    is run in another. What cannot be measured is taken at its bound and listed in ``assumed``, by
    signature: its name, and why.
    """

    store: WorkspaceStore
    limit_bytes: int = field(default_factory=lambda: _limit(available_host_bytes()))
    measured: int = 0
    assumed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def inside(self, call: Call, made: int = 0) -> int:
        """Peak bytes between the start and the end of one operator, its results included.

        ``made`` are the bytes of those results, as far as they are known.
        """
        key = signature(call)
        known = self.store.get(key)
        if isinstance(known, str):
            return self._bound(call, made, known)
        if known is None:
            operands = operand_bytes(call)
            if operands > _SCALE_ABOVE and call[0] in _SCALABLE and row_count(call) > _LEAST_ROWS:
                known = self._scaled(call)
            elif operands + made > self.limit_bytes:
                return self._bound(call, made, TOO_LARGE)
            else:
                try:
                    known = measure(call) if is_safe_in_process(call) else measure_isolated(call)
                except NotMeasuredError as error:
                    if error.lasting:
                        self.store.put(key, str(error))
                    return self._bound(call, made, str(error))
            self.measured += 1
            self.store.put(key, known)
        return known

    def _bound(self, call: Call, made: int, why: str) -> int:
        self.assumed[signature(call)] = call[0].__name__, why
        return workspace_bound(call, made)

    def _scaled(self, call: Call) -> int:
        share = _SCALED_BYTES / operand_bytes(call)
        few = max(_LEAST_ROWS // 4, math.ceil(row_count(call) * share))
        (low, low_bytes), (high, high_bytes) = (
            (rows, _asked(with_rows(call, rows))) for rows in (few, 2 * few)
        )
        slope = (high_bytes - low_bytes) / (high - low)
        asked = math.ceil(high_bytes + slope * (row_count(call) - high))
        if not is_low_precision(call):
            return asked
        # A share of one measurement: a slope would multiply its noise.
        return math.ceil(asked * measure(with_rows(call, 2 * few)) / high_bytes)


def _limit(free_bytes: int) -> int:
    """What a measured operator may take: with scratch it is several times as much."""
    return min(_MOST, free_bytes // WIDEST_LOW_PRECISION)


def peak_with_workspace(trace: Trace, inside: Callable[[Call, int], int]) -> WorkspacePeak:
    """The peak of a trace with every operator's scratch, asking ``inside`` for as few as possible.

    Operators are taken in the order of what they could reach at most, so that those which
    cannot exceed the peak found so far are never measured.
    """
    best = WorkspacePeak(trace.peak_bytes, trace.peak_bytes, -1, "storages")
    candidates = sorted(
        (
            (op.before + workspace_bound(op.call, op.made), index, op)
            for index, op in enumerate(trace.ops)
            if op.call
        ),
        key=lambda candidate: -candidate[0],
    )
    for most, index, op in candidates:
        if most <= best.total:
            break
        assert op.call is not None
        total = op.before + inside(op.call, op.made)
        if total > best.total:
            best = WorkspacePeak(total, max(op.before, op.after), index, op.name)
    return best


def measure(call: Call) -> int:
    """Peak bytes between the start and the end of one operator, run here on zeros."""
    asked = _asked(call)
    if asked < _SMALL or not is_low_precision(call):
        return asked
    # In low precision oneDNN asks for room that it may not use; pages count when touched.
    with _as_traced(call):
        return min(asked, _touched_bytes(materialize_call(call)) or asked)


def _asked(call: Call) -> int:
    with _as_traced(call):
        return live_peak_bytes(materialize_call(call))


def _as_traced(call: Call) -> AbstractContextManager[Any]:
    """Without gradients, but where an operator that trains keeps more for its backward pass."""
    trains = call[0] is RNN_LAYER and call[1][-1]
    return torch.enable_grad() if trains else torch.inference_mode()


def materialize_call(call: Call, device: torch.device | None = None) -> Callable[[], Any]:
    """The operator with real arguments of the described kinds, on a device (None: the CPU)."""
    function, args, keywords = call
    given = [_make(arg, device) for arg in args]
    named = {name: _make(value, device) for name, value in keywords.items()}
    return lambda: function(*given, **named)


def _touched_bytes(run: Callable[[], Any]) -> int | None:
    """Pages that ``run`` touches, results included; None where the system keeps no mark.

    What the process lets go of meanwhile makes the figure too low, so the highest of a few counts.
    """
    run()  # what is compiled and kept once is no scratch
    reading, most = RESIDENT_PEAK.reading(), 0
    for _ in range(_TOUCHES):
        trim_heap()  # so that what the heap reuses is touched anew
        before = status_bytes("VmRSS")
        if not reading.restart() or not before:
            return None
        run()
        most = max(most, reading.peaks()[0] - before)
    return most


def _make(value: Any, device: torch.device | None) -> Any:
    """Arguments of the described kind; zeros are valid as values and as indices."""
    if isinstance(value, TensorFacts):
        span = sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True)) + 1
        storage = torch.zeros(0 if 0 in value.shape else span, dtype=value.dtype, device=device)
        return storage.as_strided(value.shape, value.stride)
    if isinstance(value, tuple):
        return [_make(part, device) for part in value]
    return value
