"""Result of a memory prediction: its ledger rows, and where the peak occurs.

Two kinds of rows of a CPU run are no tensors:

Compiled kernels and objects. oneDNN compiles a kernel for each size and type of a convolution or a
matrix product and keeps it; autograd keeps objects for every result that a backward pass will need.
Together they are a few percent of a small run.

What a C heap that keeps freed blocks holds beyond the live tensors. glibc serves a request from the
smallest gap that fits, and PyTorch's aligned ones need a little more than they keep, so that the
gap of a freed tensor is often too small for the next of its size. Small objects between tensors
keep gaps apart. Which ones differs from run to run: the heap of a simulated run is several times
too small, so growth comes from measured runs instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from lowtide.attention.cpu_ops import ONEDNN_LINEAR
from lowtide.core.heap import DEFAULT_MMAP_THRESHOLD_MAX_BYTES, MMAP_THRESHOLD_BYTES, HeapMode
from lowtide.memory.plan import LedgerRow, device_row
from lowtide.memory.prediction.calibration import shipped_data
from lowtide.memory.tracing.trace import KIND_TITLES, KINDS, MemoryTrace, TensorFacts

_CONVOLUTION, _BACKWARD = "convolution", "convolution_backward"
# In fp32 the BLAS library runs these and compiles nothing; `ONEDNN_LINEAR` runs in oneDNN.
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class RuntimeObjectCounts(BaseModel):
    """Counts of the compiled kernels and storages of a CPU run.

    Attributes:
        convolutions: Different fp32 convolutions.
        backward_convolutions: Different backward passes of fp32 convolutions.
        low_convolutions: Different convolutions and backward passes in bf16 or fp16.
        products: Different matrix products by oneDNN: those in bf16 or fp16, and linear layers that
            are passed to it.
        storages: Storages alive at the peak.
    """

    model_config = ConfigDict(frozen=True)

    convolutions: int
    backward_convolutions: int
    low_convolutions: int
    products: int
    storages: int


class RuntimeObjectCosts(BaseModel):
    """Bytes per compiled kernel and storage, fitted to runs by a committed script."""

    model_config = ConfigDict(frozen=True)

    convolution_bytes: int
    backward_convolution_bytes: int
    low_convolution_bytes: int
    product_bytes: int
    storage_bytes: int

    def total_bytes(self, objects: RuntimeObjectCounts) -> int:
        """Return the total bytes of ``objects``."""
        return (
            objects.convolutions * self.convolution_bytes
            + objects.backward_convolutions * self.backward_convolution_bytes
            + objects.low_convolutions * self.low_convolution_bytes
            + objects.products * self.product_bytes
            + objects.storages * self.storage_bytes
        )


def shipped_runtime() -> RuntimeObjectCosts:
    """Load the packaged CPU costs of compiled kernels and objects."""
    return RuntimeObjectCosts.model_validate(shipped_data()["runtime"])


def count_runtime_objects(trace: MemoryTrace, op: int) -> RuntimeObjectCounts:
    """Count the kernels and storages of a CPU run by its peak, at operator ``op``.

    A training step repeats, so its kernels exist from the step before and all of them count.
    """
    found: dict[str, set[tuple[Any, ...]]] = {
        "convolutions": set(),
        "backward_convolutions": set(),
        "low_convolutions": set(),
        "products": set(),
    }
    for record in trace.ops if trace.has_backward else trace.ops[: op + 1]:
        if record.call is None:
            continue
        function, tensors = (
            record.call[0],
            tuple(arg for arg in record.call[1] if isinstance(arg, TensorFacts)),
        )
        if (kind := _counted_as(function, tensors)) is not None:
            found[kind].add((function, _kernel_key(record.call, tensors)))
    counts = {kind: len(different) for kind, different in found.items()}
    return RuntimeObjectCounts(**counts, storages=len(trace.sizes_during(op)))


def _kernel_key(call: tuple[Any, ...], tensors: tuple[TensorFacts, ...]) -> tuple[Any, ...]:
    """Return the key for which oneDNN compiles one kernel.

    That of a linear layer depends on its token count, not on their layout, and on the operation
    fused to its result.
    """
    function, arguments = call[:2]
    if function is not ONEDNN_LINEAR:
        return tensors
    (x, weight), fused = tensors[:2], arguments[3]
    return math.prod(x.shape[:-1]), *weight.shape, fused


def _counted_as(function: Any, tensors: tuple[TensorFacts, ...]) -> str | None:
    """Return the `RuntimeObjectCounts` field that an operator adds to, or None."""
    name = function.overloadpacket.__name__
    low = any(facts.dtype in _LOW_PRECISION for facts in tensors)
    if name in (_CONVOLUTION, _BACKWARD):
        if low:
            return "low_convolutions"
        return "convolutions" if name == _CONVOLUTION else "backward_convolutions"
    by_onednn = function is ONEDNN_LINEAR or (low and name in _MATMULS)
    return "products" if by_onednn else None


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


class HeapGrowth(BaseModel):
    """Size of a C heap that keeps freed blocks, fitted to ``count`` runs.

    ``growth`` is how many times the most bytes alive in it, in the middle of the runs. Above that,
    the bound allows for ``upper_gaps`` gaps of the largest block's size.
    """

    model_config = ConfigDict(frozen=True)

    growth: float
    upper_gaps: float
    count: int


def heap_use(trace: MemoryTrace, op: int, heap: HeapMode) -> HeapUse:
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
    if heap == "trim":
        return None
    kinds = shipped_data()["heap_growth"][heap]
    known = HeapGrowth.model_validate(kinds["training" if training else "inference"])
    expected = max(0, round(known.growth * use.max_live) - use.at_peak)
    gaps = math.ceil(known.upper_gaps * use.block)
    return device_row(HEAP_ROW, expected, "calibrated", expected + gaps)


@dataclass(frozen=True)
class PredictedMemory:
    """Ledger of a predicted run, with the phase and the operator of its peak.

    ``live_bytes`` is the peak of live tensors.
    """

    rows: tuple[LedgerRow, ...]
    phase: str
    operator: str
    live_bytes: int
    notes: tuple[str, ...] = ()
    objects: RuntimeObjectCounts | None = None
    heap_use: HeapUse | None = None


def live_tensor_rows(trace: MemoryTrace, op: int | None) -> list[LedgerRow]:
    """Return the live tensor bytes by kind as ledger rows.

    They are those while operator ``op`` runs; None means at the peak of live bytes.
    """
    kinds = trace.live_at_peak() if op is None else trace.live_during(op)
    return [device_row(KIND_TITLES[kind], kinds[kind], "traced") for kind in KINDS if kinds[kind]]


def margin_row(rows: list[LedgerRow], upper: int) -> LedgerRow:
    """Return the ledger row that raises the upper total to ``upper`` bytes.

    Its expected value is 0: it allows for what past runs took beyond their predictions.
    """
    allowed = upper - sum(row.upper for row in rows)
    return device_row("margin", 0, "calibrated", allowed)
