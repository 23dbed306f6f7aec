"""Peak-memory meters: resident memory on the CPU, reserved bytes on CUDA."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.core.heap import trim_heap
from lowtide.memory.oom import trim_allocators
from lowtide.memory.process_memory import (
    RESIDENT_PEAK,
    SharedHighWaterMark,
    anonymous_bytes,
    resident_parts,
)

_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class PeakUsage:
    """Peak bytes of a run above its baseline.

    ``peak_bytes`` is compared with the budget. On the CPU it is anonymous resident memory, sampled
    every 20 ms unless the meter has another interval; ``high_water_bytes`` is the kernel's own
    high-water mark of all resident pages (mapped files and library code touched for the first time
    included), an upper bound, or None where the kernel keeps none. On CUDA ``peak_bytes`` is what
    the allocator reserved plus the CUDA context; ``allocated_bytes``, None on the CPU, is the part
    that tensors and workspaces had. ``corrected_peak_bytes`` is the peak including what came and
    went between two samples: the kernel's mark minus the growth of mapped files. A file mapped for
    as short a time would be counted as such a spike.
    """

    peak_bytes: int
    high_water_bytes: int | None
    source: str
    corrected_peak_bytes: int = 0
    allocated_bytes: int | None = None

    def merged(self, other: PeakUsage) -> PeakUsage:
        """Return the peak over both laps."""
        return PeakUsage(
            max(self.peak_bytes, other.peak_bytes),
            _higher(self.high_water_bytes, other.high_water_bytes),
            self.source,
            max(self.corrected_peak_bytes, other.corrected_peak_bytes),
            _higher(self.allocated_bytes, other.allocated_bytes),
        )


def _higher(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


class HostMemoryMeter:
    """Meter of this process's resident memory (CPU), from `start` to `stop`, in laps.

    A thread samples every ``sample_seconds``; every call samples too.
    """

    def __init__(self, sample_seconds: float = _SAMPLE_SECONDS) -> None:
        self._seconds = sample_seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._baseline = self._baseline_mapped = self._peak = self._mapped = 0
        self._peak_reader, self._has_high_water_mark = RESIDENT_PEAK.reader(), False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Take the baseline and start sampling."""
        # Memory that the heap still holds, and garbage that Python would free meanwhile, would hide
        # what the run adds.
        trim_heap(collect=True)
        self._has_high_water_mark = self._peak_reader.reset()
        self._baseline, self._baseline_mapped = resident_parts()
        self._peak, self._mapped = self._baseline, self._baseline_mapped
        self._thread = threading.Thread(target=self._sample, name="lowtide-meter", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds):
            self._read_sample()

    def _read_sample(self) -> int:
        with self._lock:
            now, mapped = resident_parts()
            self._peak, self._mapped = max(self._peak, now), max(self._mapped, mapped)
            return now

    @property
    def baseline_bytes(self) -> int:
        """Resident bytes outside the count: Python and libraries, mapped files included."""
        return self._baseline + self._baseline_mapped

    @property
    def current_bytes(self) -> int:
        """Bytes above the baseline now; this sample counts for the peak."""
        return max(0, self._read_sample() - self._baseline)

    @property
    def retained_bytes(self) -> int:
        """Bytes above the baseline that remain once the C heap returns what it holds for reuse."""
        trim_heap()
        return self.current_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest sampled bytes above the baseline since `start` or the last lap."""
        self._read_sample()
        return max(0, self._peak - self._baseline)

    @contextlib.contextmanager
    def excluding(self) -> Iterator[None]:
        """Exclude memory that the block leaves behind, such as libraries loaded inside."""
        before = resident_parts()
        yield
        with self._lock:
            now = resident_parts()
            self._baseline += max(0, now[0] - before[0])
            self._baseline_mapped += max(0, now[1] - before[1])
            self._peak, self._mapped = now
        self._peak_reader.reset()

    def lap(self) -> PeakUsage:
        """Return the peak since `start` or the last lap, above the baseline of `start`."""
        peak, high, spike = self.peak_bytes, None, 0
        if self._has_high_water_mark:
            most = self._peak_reader.peaks()[0]
            high = max(0, most - self._baseline - self._baseline_mapped)
            spike = most - self._baseline - self._mapped
        usage = PeakUsage(peak, high, "anonymous resident memory, sampled", max(peak, spike))
        with self._lock:
            self._peak, self._mapped = resident_parts()
        self._peak_reader.reset()
        return usage

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


class CudaMemoryMeter:
    """Meter of the bytes this process holds on one CUDA device above a baseline.

    The baseline is ``allocated_before``, what was allocated at `start`; ``context_bytes`` is the
    CUDA context, which counts for the run.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._peak_reader = cuda_peaks(device).reader()
        self.allocated_before = self.context_bytes = 0

    @property
    def baseline_bytes(self) -> None:
        """None: what the host's memory holds is not counted here."""
        return None

    def start(self) -> None:
        """Take allocated memory as the baseline and reset the allocator's peak.

        The CUDA context, which every run needs, counts as used by the run.
        """
        import torch

        # Cached blocks of earlier runs belong to nobody, and would count for this one.
        trim_allocators(self._device, collect=True)
        self._peak_reader.reset()
        self.allocated_before = torch.cuda.memory_allocated(self._device)
        self.context_bytes = cuda_context_bytes(self._device)

    @property
    def current_bytes(self) -> int:
        """Bytes reserved above the baseline now, plus the CUDA context."""
        import torch

        return self._above_baseline(torch.cuda.memory_reserved(self._device))

    @property
    def retained_bytes(self) -> int:
        """Bytes of tensors above the baseline now, of all threads and streams."""
        import torch

        return max(0, torch.cuda.memory_allocated(self._device) - self.allocated_before)

    @property
    def peak_bytes(self) -> int:
        """Highest reserved bytes above the baseline, plus the CUDA context.

        Since `start` or the last lap.
        """
        return self._above_baseline(self._peak_reader.peaks()[1])

    def _above_baseline(self, reserved: int) -> int:
        return max(0, reserved - self.allocated_before) + self.context_bytes

    def lap(self) -> PeakUsage:
        """Return the peak since `start` or the last lap."""
        allocated, reserved = self._peak_reader.peaks()
        peak = self._above_baseline(reserved)
        usage = PeakUsage(
            peak,
            None,
            "bytes reserved by the CUDA allocator, plus the CUDA context",
            peak,
            max(0, allocated - self.allocated_before),
        )
        self._peak_reader.reset()
        return usage

    @contextlib.contextmanager
    def excluding(self) -> Iterator[None]:
        """Do nothing: libraries loaded inside take host memory, not counted here."""
        yield

    def stop(self) -> None:
        """Do nothing: the allocator keeps its own statistics."""


def open_meter(device: str) -> HostMemoryMeter | CudaMemoryMeter:
    """Return a meter for a device such as ``"cpu"`` or ``"cuda:0"``, not yet started."""
    return HostMemoryMeter() if device == "cpu" else CudaMemoryMeter(device)


@functools.cache
def _cuda_peaks_of(index: int) -> SharedHighWaterMark:
    import torch

    def read() -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)

    def reset() -> bool:
        torch.cuda.reset_peak_memory_stats(index)
        return True

    return SharedHighWaterMark(read, reset)


def cuda_peaks(device: str) -> SharedHighWaterMark:
    """Return the CUDA allocator's peaks for a device: (allocated, reserved) bytes.

    ``device`` is such as ``"cuda:0"``.
    """
    import torch

    torch.cuda.init()  # the allocator keeps no statistics before
    index = torch.device(device).index
    return _cuda_peaks_of(torch.cuda.current_device() if index is None else index)


def cuda_context_bytes(device: str) -> int:
    """Return bytes this process holds on a CUDA device outside the caching allocator.

    Everything in use minus what the allocator reserved, which is the CUDA context if no other
    program uses the GPU; capped at 1 GiB, because others' memory is not this process's.
    """
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return min(max(0, total - free - torch.cuda.memory_reserved(device)), 1 << 30)


def resident_bytes_of(create: Callable[[], Any]) -> int:
    """Return resident bytes (CPU) that the result of ``create`` takes while alive."""
    trim_heap(collect=True)
    before = anonymous_bytes()
    result = create()
    trim_heap(collect=True)
    growth = anonymous_bytes() - before
    del result
    trim_heap(collect=True)
    return max(0, growth)


def resident_peak_bytes(call: Callable[[], Any], runs: int = 3) -> int:
    """Return the peak that ``runs`` calls add to the process's resident memory (CPU).

    More than is alive at once: the C heap keeps blocks it cannot reuse. Both differ by model.
    """
    trim_heap(collect=True)
    meter = HostMemoryMeter(sample_seconds=0.001)
    meter.start()
    for _ in range(runs):
        call()
    peak = meter.peak_bytes
    meter.stop()
    trim_heap(collect=True)
    return peak
