"""Measurement backends of a region of code.

They read the profiler's memory events, live storages, resident memory, or CUDA's allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from lowtide.core.errors import UsageError
from lowtide.core.heap import trim_heap
from lowtide.memory.ledger import LedgerRow, device_row
from lowtide.memory.measurement import profiler_events
from lowtide.memory.meter import HostMeter, Usage, cuda_context_bytes, cuda_peaks
from lowtide.memory.tracing.trace import KIND_TITLES, KINDS, Kind
from lowtide.memory.tracing.tracer import Tracer

BackendName = Literal["events", "storages", "resident", "allocator"]

# The first one is the default.
BACKENDS: dict[str, tuple[BackendName, ...]] = {
    "cpu": ("events", "storages", "resident"),
    "cuda": ("allocator",),
}


class EventsBackend:
    """CPU tensors and operator workspace, from the profiler's memory events."""

    source = "memory events of PyTorch's CPU allocator"

    def __init__(self) -> None:
        self._existing: dict[int, tuple[Kind, int]] = {}

    def begin(self) -> None:
        """Open the profiler's session, or join it."""
        self._blocks = profiler_events.start_events()

    def lap(self) -> int:
        """Return the peak bytes of tensors and workspace since the last lap."""
        profiler_events.update_events(self._blocks)
        return self._blocks.reset_peak()

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Record tensors, of any shape, that existed before `begin`.

        The others count without their kind, since an event does not say what its block is for.
        """
        profiler_events.update_events(self._blocks)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if tensor.is_cpu and address not in self._blocks:
                self._existing[address] = kind, storage.nbytes()

    def end(self) -> int:
        """Leave the session and return the peak bytes of the last lap."""
        profiler_events.stop_events(self._blocks)
        return self._blocks.peak

    def retained_bytes(self) -> int:
        """Return the bytes of blocks allocated inside and not released."""
        return self._blocks.live

    def ledger_rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """Return a row per kind of earlier labeled tensors, and one for all new blocks."""
        kinds = dict.fromkeys(KINDS, 0)
        for kind, size in self._existing.values():
            kinds[kind] += size
        return (*_rows(kinds), _row("live activations and workspace", peak))


class StoragesBackend:
    """Live storages by kind, recorded by a dispatch mode.

    Operators' workspace is not seen.
    """

    source = "live storages of tensors"

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._events_seen = self._live = 0

    def begin(self) -> None:
        """Enter the dispatch mode."""
        self.tracer.__enter__()

    def lap(self) -> int:
        """Return the peak bytes of storages made since `begin`."""
        peak = self._live
        for event in self.tracer.trace.events[self._events_seen :]:
            self._live += event.size
            peak = max(peak, self._live)
        self._events_seen = len(self.tracer.trace.events)
        return peak

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Assign a kind to the storages of tensors of any shape."""
        self.tracer.label(tensors, kind)

    def end(self) -> int:
        """Leave the dispatch mode and return the peak bytes of the last lap."""
        self.tracer.__exit__(None, None, None)
        return self.lap()

    def retained_bytes(self) -> int:
        """Return the bytes of storages made inside and not freed."""
        live: dict[int, int] = {}
        for event in self.tracer.trace.events:
            if event.size > 0:
                live[event.storage] = event.size
            else:
                live.pop(event.storage, None)
        return sum(live.values())

    def ledger_rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """Return a row per kind, earlier labeled storages included."""
        return _rows(self.tracer.trace.live_at_peak())


class ResidentBackend:
    """Anonymous resident memory of the whole process, sampled.

    Covers all threads and libraries.
    """

    source = "anonymous resident memory of the process"

    def __init__(self) -> None:
        self._meter = HostMeter()
        self._highest: Usage | None = None

    def begin(self) -> None:
        """Trim the C heap and start to sample."""
        self._meter.start()

    def lap(self) -> int:
        """Return the peak bytes since the last lap.

        The kernel's high-water mark adds what the samples miss.
        """
        usage = self._meter.lap()
        self._highest = usage if self._highest is None else self._highest.merged(usage)
        return usage.corrected_peak_bytes

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Do nothing, whatever the tensors: pages do not say which they hold."""

    def end(self) -> int:
        """Stop to sample and return the peak bytes of the last lap."""
        peak = self.lap()
        self._meter.stop()
        trim_heap()
        self._retained = self._meter.current_bytes
        return peak

    def retained_bytes(self) -> int:
        """Return the growth in bytes since `begin`, after the C heap is trimmed."""
        return self._retained

    def ledger_rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """Return one row.

        Its upper value is the kernel's high-water mark, mapped files included, if there is one.
        """
        assert self._highest is not None
        upper = max(peak, self._highest.high_water_bytes or 0)
        return (_row("resident memory", peak, upper),)


class AllocatorBackend:
    """Allocated and reserved bytes of PyTorch's CUDA allocator, and the CUDA context."""

    source = "PyTorch's CUDA allocator, plus the CUDA context"

    def __init__(self, device: str) -> None:
        self._device = device
        self._allocated = self._reserved = 0

    def begin(self) -> None:
        """Reset the allocator's peaks."""
        self._peak_reader = cuda_peaks(self._device).reader()
        self._peak_reader.reset()
        self._before = torch.cuda.memory_allocated(self._device)

    def lap(self) -> int:
        """Return the peak allocated bytes, all threads and streams included."""
        allocated, reserved = self._peak_reader.peaks()
        self._allocated = max(self._allocated, allocated)
        self._reserved = max(self._reserved, reserved)
        self._peak_reader.reset()
        return max(0, allocated - self._before)

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Do nothing: the allocator counts earlier tensors, of any shape, as a whole."""

    def end(self) -> int:
        """Read the peaks, what remains allocated, and the context."""
        peak = self.lap()
        self._after = torch.cuda.memory_allocated(self._device)
        self._context = cuda_context_bytes(self._device)
        return peak

    def retained_bytes(self) -> int:
        """Return the growth of allocated bytes since `begin`."""
        return max(0, self._after - self._before)

    def ledger_rows(self, peak: int) -> tuple[LedgerRow, ...]:
        """Return the rows of a CUDA device.

        They are what was allocated before, what came since, what is reserved beyond both, and the
        context.
        """
        return (
            _row("allocated before", self._allocated - peak),
            _row("live activations and workspace", peak),
            _row("allocator", max(0, self._reserved - self._allocated)),
            _row("context", self._context),
        )


# Bytes count from `begin` on, except those of `ledger_rows`, which may include what existed before.
MeterBackend = EventsBackend | StoragesBackend | ResidentBackend | AllocatorBackend


def meter_backend(device: str, how: BackendName) -> MeterBackend:
    """Create the backend ``how`` for a device; see `BACKENDS`."""
    if how == "events":
        return EventsBackend()
    if how == "storages":
        return StoragesBackend()
    if how == "resident":
        return ResidentBackend()
    if not torch.cuda.is_available():
        raise UsageError(
            f"{device!r} cannot be measured: CUDA is not available", hint="run lowtide doctor"
        )
    return AllocatorBackend(device)


def _rows(kinds: Mapping[Kind, int]) -> tuple[LedgerRow, ...]:
    return tuple(_row(KIND_TITLES[kind], kinds[kind]) for kind in KINDS if kinds[kind])


def _row(name: str, value: int, upper: int | None = None) -> LedgerRow:
    return device_row(name, value, "measured", upper)
