"""Measured memory of a region of code, with one API for the CPU and CUDA."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.core.units import MIB
from lowtide.memory.meter import CudaMemoryMeter, HostMemoryMeter, PeakUsage, open_meter
from lowtide.memory.plan import LedgerRow, device_row

P = ParamSpec("P")
R = TypeVar("R")


class PhasePeak(BaseModel):
    """Name and peak of one marked phase, in bytes above the region's start."""

    model_config = ConfigDict(frozen=True)

    name: str
    peak_bytes: int


class RegionUsage(BaseModel):
    """Measured memory of a region, in bytes.

    ``peak_bytes`` is the peak above the region's start, ``retained_bytes`` what of it was left at
    the end, and ``source`` says what was read. ``ledger`` is all that was seen: on the CPU the
    resident memory above the start, whose upper value is the kernel's high-water mark, mapped files
    included; on CUDA what was allocated before and since, what the allocator reserved beyond both,
    and the CUDA context.
    """

    model_config = ConfigDict(frozen=True)

    device: str
    source: str
    peak_bytes: int
    retained_bytes: int
    ledger: tuple[LedgerRow, ...]
    phases: tuple[PhasePeak, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Sum of the ledger's values."""
        return sum(row.value for row in self.ledger)


class MeasuredRegion:
    """Measured region of code, made by `measure`; its figures exist once it ends."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._meter = open_meter(device)
        self._phase, self._phases = "", list[PhasePeak]()
        self._seen: PeakUsage | None = None
        self._usage: RegionUsage | None = None
        self._meter.start()

    @property
    def usage(self) -> RegionUsage:
        """Measured figures; `UsageError` while the region is still open."""
        if self._usage is None:
            raise UsageError(
                "the measured region has not ended", hint="read it after the region has ended"
            )
        return self._usage

    @property
    def peak_bytes(self) -> int:
        """Peak bytes above the region's start."""
        return self.usage.peak_bytes

    @property
    def retained_bytes(self) -> int:
        """Bytes above the region's start that were left at its end."""
        return self.usage.retained_bytes

    @property
    def ledger(self) -> tuple[LedgerRow, ...]:
        """Ledger rows, of origin ``"measured"``."""
        return self.usage.ledger

    @property
    def phases(self) -> tuple[PhasePeak, ...]:
        """Marked phases with the peak of each, in order."""
        return self.usage.phases

    def as_json(self) -> str:
        """Return the figures as a JSON object."""
        return self.usage.model_dump_json()

    def mark(self, phase: str) -> None:
        """Start a named phase, which gets its own peak."""
        if self._usage is not None:
            raise UsageError("the measured region is not open", hint="call this inside it")
        self._end_phase()
        self._phase = phase

    def label(self, tensors: Iterable[Tensor], kind: Any) -> None:
        """Do nothing, whatever the tensors: a meter cannot say which memory is theirs.

        `lowtide.InferenceStep` and `lowtide.TrainingStep` name theirs to whatever observes them.
        """

    def _end_phase(self) -> None:
        usage = self._meter.lap()
        self._seen = usage if self._seen is None else self._seen.merged(usage)
        if self._phase or _peak_bytes(usage) >= MIB:  # less is nothing, as accurate as it is
            self._phases.append(PhasePeak(name=self._phase, peak_bytes=_peak_bytes(usage)))

    def _end(self) -> None:
        self._end_phase()
        self._meter.stop()
        assert self._seen is not None
        marked = any(phase.name for phase in self._phases)
        self._usage = RegionUsage(
            device=self.device,
            source=self._seen.source,
            peak_bytes=_peak_bytes(self._seen),
            retained_bytes=self._meter.retained_bytes,
            ledger=_ledger(self._meter, self._seen),
            phases=tuple(self._phases) if marked else (),
        )


def _peak_bytes(usage: PeakUsage) -> int:
    allocated = usage.allocated_bytes
    return usage.corrected_peak_bytes if allocated is None else allocated


def _ledger(meter: HostMemoryMeter | CudaMemoryMeter, usage: PeakUsage) -> tuple[LedgerRow, ...]:
    peak = _peak_bytes(usage)
    if isinstance(meter, HostMemoryMeter):
        upper = max(peak, usage.high_water_bytes or 0)
        return (device_row("resident memory", peak, "measured", upper),)
    rows = {
        "allocated before": meter.allocated_before,
        "live activations and workspace": peak,
        "allocator": max(0, usage.peak_bytes - meter.context_bytes - peak),
        "context": meter.context_bytes,
    }
    return tuple(device_row(name, value, "measured") for name, value in rows.items())


class RegionMeter:
    """Reusable context manager and decorator that measures memory; made by `measure`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._local = threading.local()

    def __enter__(self) -> MeasuredRegion:
        if self._device != "cpu" and not torch.cuda.is_available():
            raise UsageError(
                f"{self._device!r} cannot be measured: CUDA is not available",
                hint="run lowtide doctor",
            )
        region = MeasuredRegion(self._device)
        self._regions().append(region)
        return region

    def __exit__(self, *_: object) -> None:
        self._regions().pop()._end()

    def __call__(self, function: Callable[P, R]) -> MeasuredFunction[P, R]:
        return MeasuredFunction(function, self)

    def _regions(self) -> list[MeasuredRegion]:
        """Open regions of this thread, the innermost last."""
        if not hasattr(self._local, "regions"):
            self._local.regions = []
        return self._local.regions


class MeasuredFunction(Generic[P, R]):
    """Function whose every call is a measured region.

    ``last_region`` is the region of the call that ended last.
    """

    def __init__(self, function: Callable[P, R], meter: RegionMeter) -> None:
        runs_later = (
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        if any(test(function) for test in runs_later):
            name = getattr(function, "__name__", "it")
            raise UsageError(
                f"{name} is a generator or async: code that runs between its parts would count too",
                hint="measure inside it, around the parts that do not wait",
            )
        functools.update_wrapper(self, function)
        self._function, self._meter = function, meter
        self.last_region: MeasuredRegion | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._meter as region:
            try:
                return self._function(*args, **kwargs)
            finally:
                self.last_region = region

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        return self if instance is None else types.MethodType(self, instance)


def measure(device: str | torch.device = "cpu") -> RegionMeter:
    """Measure the memory of a region of code, as a context manager or as a decorator.

    The figures are those by which jobs keep a budget. Regions can be nested and repeated, and run
    in several threads. An error inside ends the region, with its figures, and propagates.

    On the CPU they are the growth of the process's anonymous resident memory, of all threads and
    libraries, sampled every 20 ms and corrected by the kernel's high-water mark. What is alive at
    once is seen within 1 MiB, as far as it is written. Blocks below 32 MiB that are freed inside
    may stay with the C heap: these count for the peak, not for what is left at the end. Memory of
    before that is freed inside hides as much new memory. To begin, Python's garbage is collected,
    which takes about 0.1 s once PyTorch is loaded, so a region is for work that takes longer.

    On CUDA the peak is that of allocated bytes, of all threads and streams of the process; the
    ledger adds the peak of what the caching allocator reserved and the CUDA context, and is the
    device's use where no other program uses it. To begin, the allocator's cache is emptied.
    ``torch.cuda.reset_peak_memory_stats`` must not be called inside.

    Args:
        device: Where the region computes, ``"cpu"`` or a CUDA device.

    Raises:
        UsageError: The device is another one, or is not here when a region begins.
    """
    if callable(device):
        raise UsageError(
            "measure was called with a function", hint='write @measure("cpu") above it'
        )
    name, kind = str(device), str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"cannot measure on {name!r}", hint="devices: cpu, cuda, cuda:N")
    return RegionMeter("cpu" if kind == "cpu" else name)
