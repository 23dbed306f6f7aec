"""What a run will use, said beforehand: traced on fake tensors, priced for a device."""

from __future__ import annotations

import time
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from torch import nn

from lowtide.core.errors import LowtideError
from lowtide.core.units import format_bytes
from lowtide.memory.cache import WorkspaceStore, cache_folder
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.prediction.calibration import Calibration, shipped_calibration
from lowtide.memory.prediction.cpu import predict_cpu
from lowtide.memory.prediction.cpu_workspace import CpuWorkspace
from lowtide.memory.prediction.cuda import predict_cuda
from lowtide.memory.prediction.extrapolation import extrapolate_peak
from lowtide.memory.prediction.runtime_objects import RuntimeObjects
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.memory.profiles.attention import attention_as_on
from lowtide.memory.tracing.autocast import autocast_as_on
from lowtide.memory.tracing.fake import FakeTwins, model_tensors
from lowtide.memory.tracing.fake_calls import CachedFakeCalls
from lowtide.memory.tracing.steps import Step, Traceable, input_tensors
from lowtide.memory.tracing.trace import Trace
from lowtide.memory.tracing.tracer import Tracer


class Estimate(BaseModel):
    """The ledger of a run that has not happened.

    ``live_bytes`` is the most that tensors hold at once, weights and inputs included, exact for
    a traced run. ``predicted_bytes`` adds what the device needs besides; ``upper_bytes`` is what
    a run should not exceed. ``phase`` and ``operator`` say where the peak is; ``objects`` counts
    what a run on the CPU leaves beside its tensors.
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
    objects: RuntimeObjects | None = None

    _trace: Trace | None = PrivateAttr(default=None)

    @property
    def predicted_bytes(self) -> int:
        """Expected peak."""
        return sum(row.value for row in self.ledger)

    @property
    def upper_bytes(self) -> int:
        """Upper bound of the peak."""
        return sum(row.upper for row in self.ledger)

    @property
    def trace(self) -> Trace | None:
        """Every storage over time, for plots and replays; None for a probed estimate."""
        return self._trace

    def __str__(self) -> str:
        where = f" in {self.phase} ({self.operator})" if self.operator else ""
        return (
            f"{format_bytes(self.predicted_bytes)}, at most {format_bytes(self.upper_bytes)}, on"
            f" {self.device}{where}; {self.method} in {self.seconds:.1f} s"
        )


def estimate(
    model: nn.Module,
    step: Step,
    *,
    device: str | DeviceProfile = "cpu",
    dtype: torch.dtype | None = None,
    operators: WorkspaceStore | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Peak memory of ``step`` on ``model`` on ``device``, without running it.

    ``model`` may be on the ``meta`` device; it is not changed. ``device`` is a profile or its
    name (``"cpu"``, ``"rtx3060-12gb"``; `profile_names`), which need not be present. With
    ``dtype`` weights and inputs are taken to be of that type. Workspaces of the CPU's operators
    are measured once and kept in ``operators`` (the package's cache folder by default).

    A model that cannot be traced is run for real on two or three small inputs instead, and the
    estimate says so. Raises `ModelError` when it cannot be run on those either, `UsageError`
    for an unknown device.
    """
    started = time.perf_counter()
    profile = load_profile(device) if isinstance(device, str) else device
    try:
        return traced_estimate(
            model, step, profile, dtype=dtype, operators=operators, calibration=calibration
        )
    except LowtideError:
        raise  # ours: what was asked for cannot be, however it is tried
    except Exception as error:  # noqa: BLE001 - whatever stops a trace, a real run must decide
        priced = extrapolate_peak(model, step, error, dtype)
    return Estimate(
        device=profile.name,
        method="probed",
        live_bytes=priced.live_bytes,
        ledger=priced.rows,
        phase=priced.phase,
        operator=priced.operator,
        seconds=time.perf_counter() - started,
        notes=priced.notes,
    )


def traced_estimate(
    model: nn.Module,
    step: Traceable,
    profile: DeviceProfile,
    *,
    dtype: torch.dtype | None = None,
    operators: WorkspaceStore | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Peak memory of ``step`` as `estimate` gives it, but never from a run on smaller inputs.

    For comparing steps with one another: a figure from another method would make differences
    meaningless. Whatever stops the trace is raised as it is.
    """
    started = time.perf_counter()
    bound = calibration or shipped_calibration(profile.kind)
    trace = trace_step(model, step, profile=profile, dtype=dtype)
    if profile.kind == "cpu":
        store = operators or WorkspaceStore(cache_folder())
        priced = predict_cpu(trace, CpuWorkspace(store), bound)
        store.save()
    else:
        priced = predict_cuda(trace, profile, bound)
    result = Estimate(
        device=profile.name,
        method="traced",
        live_bytes=trace.peak_bytes,
        ledger=priced.rows,
        phase=priced.phase,
        operator=priced.operator,
        seconds=time.perf_counter() - started,
        notes=priced.notes,
        objects=priced.objects,
    )
    result._trace = trace
    return result


def trace_step(
    model: nn.Module,
    step: Traceable,
    *,
    profile: DeviceProfile | None = None,
    dtype: torch.dtype | None = None,
) -> Trace:
    """The trace of ``step`` on fake CPU tensors, with ``profile``'s attention and autocast."""
    faker = FakeTwins(dtype)
    twin, fake_step = faker.model(model), faker.step(step)
    tracer = Tracer(keep_calls=True, call=faker.calls)
    profile = profile or load_profile("cpu")
    with faker.running(), autocast_as_on(profile), attention_as_on(profile):
        tracer.label(model_tensors(twin), "weights")
        tracer.label(input_tensors(fake_step), "inputs")
        with CachedFakeCalls(faker.calls):
            run = fake_step.prepare(twin)
        with tracer:
            run(tracer)
    return tracer.trace
