"""Peak-memory estimates of a step without running it.

The step is traced on fake tensors, and the trace is priced for a device.
"""

from __future__ import annotations

import time
from contextvars import copy_context
from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from torch import nn

from lowtide.core.errors import LowtideError, UsageError
from lowtide.core.heap import HeapMode, current_heap_mode
from lowtide.core.units import format_bytes
from lowtide.memory.library_memory import require_room_to_plan
from lowtide.memory.plan import LedgerRow
from lowtide.memory.plan_store import JsonCacheTable, machine_facts
from lowtide.memory.prediction.calibration import BoundCalibration, shipped_calibration
from lowtide.memory.prediction.cpu import CpuWorkspaceMeter, predict_cpu
from lowtide.memory.prediction.cuda import predict_cuda
from lowtide.memory.prediction.extrapolation import extrapolate_peak
from lowtide.memory.prediction.result import (
    HEAP_ROW,
    LARGEST_KEPT,
    HeapUse,
    PredictedMemory,
    RuntimeObjectCounts,
    heap_row,
)
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.memory.profiles.simulated_device import (
    runs_alike,
    simulate_attention,
    simulate_autocast,
)
from lowtide.memory.tracing.fake import CachedFakeCallsMode, FakeModelConverter, model_tensors
from lowtide.memory.tracing.python_places import PythonStatePlaces
from lowtide.memory.tracing.steps import Step, TraceableStep, TrainingStep, input_tensors
from lowtide.memory.tracing.trace import MemoryTrace, MemoryTracer
from lowtide.memory.tracing.traced_code import traced_code

# Traces of one step, each with the device that it was made for.
TracesOfStep = list[tuple[DeviceProfile, MemoryTrace]]

_HEAP_TITLES: dict[HeapMode, str] = {
    "default": "glibc's heap as it comes",
    "cache": "the heap of Lowtide's command line",
    "trim": "a heap that returns freed memory",
}


class Estimate(BaseModel):
    """Predicted memory ledger of a run, with its upper bound.

    Attributes:
        device: Name of the device profile.
        method: ``"traced"``, or ``"probed"`` where smaller real runs were extrapolated.
        live_bytes: Peak bytes of live tensors, weights and inputs included; exact for a traced run.
        ledger: Rows of bytes by purpose.
        phase: Phase of the run in which the peak occurs.
        operator: Operator at which the peak occurs.
        seconds: Time that the estimate took.
        notes: Assumptions behind the figures.
        objects: Counts of compiled kernels and objects that a CPU run leaves in the process.
        heap: How the C heap of the CPU run treats freed blocks: ``"default"`` is glibc's as it
            comes, ``"cache"`` that of Lowtide's command line, ``"trim"`` returns them to the
            system. The ledger's row "heap" is what it keeps. None for a GPU.
        heap_use: Bytes of a CPU run in blocks that the heap keeps when they are freed.
    """

    model_config = ConfigDict(frozen=True)

    device: str
    method: Literal["traced", "probed"]
    live_bytes: int
    ledger: tuple[LedgerRow, ...]
    phase: str
    operator: str
    seconds: float
    notes: tuple[str, ...] = ()
    objects: RuntimeObjectCounts | None = None
    heap: HeapMode | None = None
    heap_use: HeapUse | None = None

    _trace: MemoryTrace | None = PrivateAttr(default=None)

    @property
    def predicted_bytes(self) -> int:
        """Expected peak in bytes, including the device's overhead."""
        return sum(row.value for row in self.ledger)

    @property
    def upper_bytes(self) -> int:
        """Upper bound of the peak in bytes, which a run should not exceed."""
        return sum(row.upper for row in self.ledger)

    @property
    def trimming_heap_bytes(self) -> tuple[int, int]:
        """Expected and upper bytes in a C heap that returns freed blocks to the system.

        Those of a process with ``MALLOC_MMAP_THRESHOLD_=65536`` in its environment.
        """
        rows = [row for row in self.ledger if row.name != HEAP_ROW]
        return sum(row.value for row in rows), sum(row.upper for row in rows)

    @property
    def trace(self) -> MemoryTrace | None:
        """Trace of every storage, for plots and replays; None for a probed estimate."""
        return self._trace

    def __str__(self) -> str:
        where = f" in {self.phase} ({self.operator})" if self.operator else ""
        heap = "" if self.heap is None else f" with {_HEAP_TITLES[self.heap]}"
        return (
            f"{format_bytes(self.predicted_bytes)}, at most {format_bytes(self.upper_bytes)}, on"
            f" {self.device}{heap}{where}; {self.method} in {self.seconds:.1f} s"
        )


def estimate(
    model: nn.Module,
    step: Step,
    *,
    device: str | DeviceProfile = "cpu",
    dtype: torch.dtype | None = None,
    operators: JsonCacheTable | None = None,
    calibration: BoundCalibration | None = None,
    heap: HeapMode | None = None,
) -> Estimate:
    """Estimate the peak memory of one step of a model on a device, without running it.

    A model that cannot be traced is run for real on two or three small inputs instead, and the
    estimate says so.

    Args:
        model: Any module, which may be on the ``meta`` device; it is not changed.
        step: The inference or training step.
        device: A profile or its name (``"cpu"``, ``"rtx3060-12gb"``; `profile_names`). The device
            need not be present.
        dtype: Type that weights and inputs are taken to have; by default their own.
        operators: Cache of measured workspaces of the CPU's operators; by default in the package's
            cache folder.
        calibration: Upper bound of the prediction, without what the heap keeps; by default the
            packaged one.
        heap: C heap of the process that will run the step on the CPU (`Estimate.heap`); by default
            that of this process.

    Raises:
        ModelError: The model can neither be traced nor run on smaller inputs.
        UsageError: The device is unknown, or ``step`` is none.
    """
    if not isinstance(step, Step):
        raise UsageError(
            f"a step is no {type(step).__name__}",
            hint="lowtide.InferenceStep((tensor,)), or lowtide.TrainingStep((tensor,))",
        )
    started = time.perf_counter()
    profile = load_profile(device) if isinstance(device, str) else device
    try:
        return traced_estimate(
            model,
            step,
            profile,
            dtype=dtype,
            operators=operators,
            calibration=calibration,
            heap=heap,
        )
    except LowtideError:
        raise  # one of our own errors: the fallback would fail in the same way
    except Exception as error:  # noqa: BLE001 - any error of a trace leads to the fallback
        with PythonStatePlaces(model).kept():
            predicted = extrapolate_peak(model, step, error, dtype)
    if profile.kind == "cpu":
        heap = heap or current_heap_mode()
        activations = predicted.rows[-1].value
        # Sizes of blocks are not known: all may be kept.
        largest = min(activations, LARGEST_KEPT[heap])
        use = HeapUse(max_live=activations, at_peak=activations, block=largest)
        row = heap_row(use, heap, training=isinstance(step, TrainingStep))
        if row is not None:
            predicted = replace(predicted, rows=(*predicted.rows, row), heap_use=use)
    return _estimate(predicted, profile, "probed", started, heap)


def traced_estimate(
    model: nn.Module,
    step: TraceableStep,
    profile: DeviceProfile,
    *,
    dtype: torch.dtype | None = None,
    operators: JsonCacheTable | None = None,
    calibration: BoundCalibration | None = None,
    heap: HeapMode | None = None,
    traced: TracesOfStep | None = None,
) -> Estimate:
    """Estimate the peak memory of a step by tracing only, without the fallback.

    For comparing steps with one another: a figure from another method would make differences
    meaningless. Whatever stops the trace is raised unchanged. Arguments are those of `estimate`,
    and ``traced``, the traces of this step so far: one of a device on which it allocates alike
    serves, and a new one is added.
    """
    started = time.perf_counter()
    bound = calibration or shipped_calibration(profile.kind)
    made = traced if traced is not None else []
    alike = (one for device, one in made if runs_alike(profile, device, one.attention))
    trace = next(alike, None)
    if trace is None:
        trace = trace_step(model, step, profile=profile, dtype=dtype)
        made.append((profile, trace))
    if profile.kind == "cpu":
        store = operators or JsonCacheTable("operators", *machine_facts())
        heap = heap or current_heap_mode()
        predicted = predict_cpu(trace, CpuWorkspaceMeter(store), bound, heap)
        store.save()
    else:
        predicted = predict_cuda(trace, profile, bound)
    result = _estimate(predicted, profile, "traced", started, heap)
    result._trace = trace
    return result


def _estimate(
    predicted: PredictedMemory,
    profile: DeviceProfile,
    method: Literal["traced", "probed"],
    started: float,
    heap: HeapMode | None,
) -> Estimate:
    result = Estimate(
        device=profile.name,
        method=method,
        live_bytes=predicted.live_bytes,
        ledger=predicted.rows,
        phase=predicted.phase,
        operator=predicted.operator,
        seconds=time.perf_counter() - started,
        notes=predicted.notes,
        objects=predicted.objects,
        heap=heap if profile.kind == "cpu" else None,
        heap_use=predicted.heap_use,
    )
    if any(row.name == HEAP_ROW for row in result.ledger):
        expected, upper = map(format_bytes, result.trimming_heap_bytes)
        note = (
            f"{_HEAP_TITLES[heap or 'default']} keeps freed memory; with"
            f" MALLOC_MMAP_THRESHOLD_=65536 set, expected {expected}, at most {upper}"
        )
        result = result.model_copy(update={"notes": (*result.notes, note)})
    return result


def trace_step(
    model: nn.Module,
    step: TraceableStep,
    *,
    profile: DeviceProfile | None = None,
    dtype: torch.dtype | None = None,
    twins: FakeModelConverter | None = None,
) -> MemoryTrace:
    """Trace a step on fake CPU tensors, with a device's attention and autocast.

    ``profile`` is the device, the CPU by default; ``dtype`` is the type that weights and inputs are
    taken to have, unless ``twins`` of earlier traces are given.

    Raises:
        BudgetError: A limit on this process leaves too little for what tracing imports.
        ModelError: The model's code keeps fake tensors where they cannot be taken back.
    """
    require_room_to_plan("tracing a network")
    faker = twins or FakeModelConverter(dtype)
    with traced_code(model) as code:
        if twins is None:
            code.watch(faker.mode)
        # in a copy of the context variables, which are put back so
        run = copy_context().run
        return run(_trace, model, step, faker, profile or load_profile("cpu"))


def _trace(
    model: nn.Module, step: TraceableStep, faker: FakeModelConverter, profile: DeviceProfile
) -> MemoryTrace:
    twin, fake_step = faker.model(model), faker.step(step)
    tracer = MemoryTracer(keep_calls=True, call=faker.calls)
    attention = simulate_attention(profile, tracer.trace.attention)
    with faker.fake_mode(), simulate_autocast(profile), attention:
        tracer.label(model_tensors(twin), "weights")
        tracer.label(input_tensors(fake_step), "inputs")
        with CachedFakeCallsMode(faker.calls):
            run = fake_step.prepare(twin)
        with tracer:
            run(tracer)
    return tracer.trace
