"""Ways to measure a region: memory events, live storages, resident memory, CUDA's allocator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.core.heap import trim_heap
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.measurement import profiler_events
from lowtide.memory.meter import HostMeter, Usage, cuda_context_bytes, cuda_peaks
from lowtide.memory.tracing.trace import KINDS, TITLES, Kind
from lowtide.memory.tracing.tracer import Tracer

How = Literal["events", "storages", "resident", "allocator"]

# The first one is taken where nothing is said.
WAYS: dict[str, tuple[How, ...]] = {
    "cpu": ("events", "storages", "resident"),
    "cuda": ("allocator",),
}


class MeterBackend(Protocol):
    """One way to measure. Bytes are those above what there was at `begin`, but for `rows`."""

    source: str

    def begin(self) -> None:
        """Start."""

    def lap(self) -> int:
        """Peak since `begin` or the last lap."""
        ...

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """What tensors are for."""

    def end(self) -> int:
        """Stop; the peak of the last lap."""
        ...

    def held(self) -> int:
        """After `end`: what had come by then and was still there."""
        ...

    def rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """After `end`: the ledger at ``peak``, the highest of all laps."""
        ...


class EventsBackend:
    """Tensors and operators' scratch, by the profiler's memory events."""

    source = "memory events of PyTorch's allocator on the CPU"

    def __init__(self) -> None:
        self._before: dict[int, tuple[Kind, int]] = {}

    def begin(self) -> None:
        """Open the profiler's session, or join it."""
        self._blocks = profiler_events.follow_events()

    def lap(self) -> int:
        """Peak of tensors and scratch since the last lap."""
        profiler_events.update_events(self._blocks)
        return self._blocks.restart()

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Remember those that were there before `begin`; an event does not say what it is for."""
        profiler_events.update_events(self._blocks)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if tensor.is_cpu and address not in self._blocks:
                self._before[address] = kind, storage.nbytes()

    def end(self) -> int:
        """Leave the session."""
        profiler_events.stop_events(self._blocks)
        return self._blocks.peak

    def held(self) -> int:
        """Bytes of blocks that came and did not go."""
        return self._blocks.live

    def rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """Labeled tensors from before by their kind, and one row for all that came."""
        kinds = dict.fromkeys(KINDS, 0)
        for kind, size in self._before.values():
            kinds[kind] += size
        return (*_rows(kinds), _row("live activations and scratch", peak))


class StoragesBackend:
    """Live storages by what they are for, by a dispatch mode; operators' scratch is not seen."""

    source = "live storages of tensors"

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._counted = self._live = 0

    def begin(self) -> None:
        """Enter the mode."""
        self.tracer.__enter__()

    def lap(self) -> int:
        """Peak of storages that came since `begin`."""
        peak = self._live
        for event in self.tracer.trace.events[self._counted :]:
            self._live += event.size
            peak = max(peak, self._live)
        self._counted = len(self.tracer.trace.events)
        return peak

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Count storages as of this kind."""
        self.tracer.label(tensors, kind)

    def end(self) -> int:
        """Leave the mode."""
        self.tracer.__exit__(None, None, None)
        return self.lap()

    def held(self) -> int:
        """Bytes of storages that came and did not go."""
        made: dict[int, int] = {}
        for event in self.tracer.trace.events:
            if event.size > 0:
                made[event.storage] = event.size
            else:
                made.pop(event.storage, None)
        return sum(made.values())

    def rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """One row for each kind, labeled storages from before included."""
        return _rows(self.tracer.trace.at_peak())


class ResidentBackend:
    """Anonymous resident memory of the whole process, sampled; all threads and libraries."""

    source = "anonymous resident memory of the process"

    def __init__(self) -> None:
        self._meter = HostMeter()
        self._highest: Usage | None = None

    def begin(self) -> None:
        """Give back what the heap keeps, and begin to sample."""
        self._meter.start()

    def lap(self) -> int:
        """Peak since the last lap, with what the kernel's mark shows between two samples."""
        usage = self._meter.lap()
        self._highest = usage if self._highest is None else self._highest.with_more(usage)
        return usage.spike_bytes

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Without effect: pages do not say whose they are."""

    def end(self) -> int:
        """End sampling."""
        peak = self.lap()
        self._meter.stop()
        trim_heap()
        self._held = self._meter.now_bytes
        return peak

    def held(self) -> int:
        """What the process has more than at `begin`, once the heap has given back what it can."""
        return self._held

    def rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """One row; its upper value is the kernel's own mark, mapped files included, if any."""
        assert self._highest is not None
        upper = max(peak, self._highest.high_water_bytes or 0)
        return (_row("resident memory", peak, upper),)


class AllocatorBackend:
    """What PyTorch's allocator handed out and reserved on a CUDA device, and the context."""

    source = "PyTorch's allocator on CUDA, and what is in use beside it"

    def __init__(self, device: str) -> None:
        self._device = device
        self._allocated = self._reserved = 0

    def begin(self) -> None:
        """Restart the allocator's marks."""
        self._reading = cuda_peaks(self._device).reading()
        self._reading.restart()
        self._before = torch.cuda.memory_allocated(self._device)

    def lap(self) -> int:
        """Peak of what was handed out, all threads and streams."""
        allocated, reserved = self._reading.peaks()
        self._allocated = max(self._allocated, allocated)
        self._reserved = max(self._reserved, reserved)
        self._reading.restart()
        return max(0, allocated - self._before)

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Without effect: the allocator counts what there was before as a whole."""

    def end(self) -> int:
        """Read the marks, what is left, and the context."""
        peak = self.lap()
        self._after = torch.cuda.memory_allocated(self._device)
        self._context = cuda_context_bytes(self._device)
        return peak

    def held(self) -> int:
        """What is handed out more than at `begin`."""
        return max(0, self._after - self._before)

    def rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """What there was before, what came, what is reserved beyond both, and the context."""
        return (
            _row("held before", self._allocated - peak),
            _row("live activations and scratch", peak),
            _row("allocator", max(0, self._reserved - self._allocated)),
            _row("context", self._context),
        )


def meter_backend(device: str, how: How) -> MeterBackend:
    """A new way of the given name, for one of the devices that have it (`WAYS`)."""
    if how == "events":
        return EventsBackend()
    if how == "storages":
        return StoragesBackend()
    if how == "resident":
        return ResidentBackend()
    if not torch.cuda.is_available():
        raise UsageError(f"there is no {device!r} here to measure", hint="run lowtide doctor")
    return AllocatorBackend(device)


def _rows(kinds: Mapping[Kind, int]) -> tuple[LedgerRow, ...]:
    return tuple(_row(TITLES[kind], kinds[kind]) for kind in KINDS if kinds[kind])


def _row(name: str, value: int, upper: int | None = None) -> LedgerRow:
    upper = value if upper is None else upper
    return LedgerRow(name=name, place="device", value=value, upper=upper, origin="measured")
