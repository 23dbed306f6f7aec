"""What memory was used: the process's resident memory on the CPU, reserved bytes on CUDA."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.core.heap import trim_heap

_STATUS = Path("/proc/self/status")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Usage:
    """Peak bytes of a run above its start.

    ``peak_bytes`` is judged against the budget. On the CPU it is anonymous resident memory,
    sampled every 20 ms; ``high_water_bytes`` is the kernel's own high-water mark of all
    resident pages (mapped files and library code touched for the first time included), an
    upper bound, or None where the kernel keeps none. On CUDA ``peak_bytes`` is what the
    allocator reserved plus the context.
    """

    peak_bytes: int
    high_water_bytes: int | None
    source: str

    def with_more(self, other: Usage) -> Usage:
        """The peak over both laps."""
        marks = (self.high_water_bytes, other.high_water_bytes)
        high = None if None in marks else max(mark or 0 for mark in marks)
        return Usage(max(self.peak_bytes, other.peak_bytes), high, self.source)


class HostMeter:
    """Follows this process's resident memory from `start` until `stop`, in laps."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._base = self._base_resident = self._peak = 0
        self._marks = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Take the baseline and begin to sample."""
        trim_heap()  # what the heap keeps from before would hide what the run adds
        self._marks = _reset_high_water()
        self._base, self._base_resident = anonymous_bytes(), _status_bytes("VmRSS")
        self._peak = self._base
        self._thread = threading.Thread(target=self._sample, name="lowtide-meter", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._look()

    def _look(self) -> int:
        with self._lock:
            now = anonymous_bytes()
            self._peak = max(self._peak, now)
            return now

    @property
    def now_bytes(self) -> int:
        """Bytes above the baseline at this moment; what is seen here counts for the peak."""
        return max(0, self._look() - self._base)

    @property
    def peak_bytes(self) -> int:
        """Highest sampled bytes above the baseline so far."""
        self._look()
        return max(0, self._peak - self._base)

    def lap(self) -> Usage:
        """The peak since `start` or the last lap, above the baseline of `start`."""
        high = max(0, _status_bytes("VmHWM") - self._base_resident) if self._marks else None
        usage = Usage(self.peak_bytes, high, "anonymous resident memory, sampled")
        with self._lock:
            self._peak = anonymous_bytes()
        _reset_high_water()
        return usage

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


class CudaMeter:
    """Follows the bytes this process holds on one CUDA device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._outside = 0

    def start(self) -> None:
        """Reset the allocator's peak; what the process held before counts, as does its context."""
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)
        self._outside = cuda_context_bytes(self._device)

    @property
    def now_bytes(self) -> int:
        """Reserved bytes and the context, now."""
        import torch

        return torch.cuda.memory_reserved(self._device) + self._outside

    @property
    def peak_bytes(self) -> int:
        """Highest reserved bytes and the context since `start`."""
        import torch

        return torch.cuda.max_memory_reserved(self._device) + self._outside

    def lap(self) -> Usage:
        """The peak since `start` or the last lap."""
        import torch

        usage = Usage(self.peak_bytes, None, "bytes reserved by the allocator, and the context")
        torch.cuda.reset_peak_memory_stats(self._device)
        return usage

    def stop(self) -> None:
        """Nothing to end: the allocator counts by itself."""


def open_meter(device: str) -> HostMeter | CudaMeter:
    """The meter for a device such as ``"cpu"`` or ``"cuda:0"``, not yet started."""
    return HostMeter() if device == "cpu" else CudaMeter(device)


def cuda_context_bytes(device: str) -> int:
    """Bytes this process holds on the device outside the allocator.

    Taken as everything in use minus what the allocator reserved, which is the context when no
    other program uses the card; capped at 1 GiB, because others' memory is not ours.
    """
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return min(max(0, total - free - torch.cuda.memory_reserved(device)), 1 << 30)


def anonymous_bytes() -> int:
    """Resident bytes of this process that belong to no file."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        _, resident, shared, *_ = statm.read_text().split()
        return (int(resident) - int(shared)) * _PAGE
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_host_bytes() -> int:
    """Host memory that programs could still take without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES")) * _PAGE


def total_host_bytes() -> int:
    """Host memory of this machine, used or free."""
    return int(os.sysconf("SC_PHYS_PAGES")) * _PAGE


def live_peak_bytes(call: Callable[[], Any]) -> int:
    """Peak bytes of tensors and kernel scratch that live at once while ``call`` runs, on the CPU.

    Read from the profiler's memory events, which see every allocation of PyTorch's CPU
    allocator, the operators' own scratch included. The result of ``call`` is dropped inside.
    """
    # Not torch.profiler: it imports 900 modules and 80 MiB that the run does not need.
    from torch.autograd.profiler import profile

    with _quiet_stderr(), profile(use_kineto=True, profile_memory=True) as run:
        call()
    live = peak = 0
    for event in run.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, live)
    return peak


def resident_peak_bytes(call: Callable[[], Any], runs: int = 3) -> int:
    """What ``call``, run a few times, adds to the process's resident memory on the CPU.

    More than is alive at once: the C heap keeps pieces it cannot reuse. Both differ by model.
    """
    trim_heap(collect=True)
    base, peak, stop = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    for _ in range(runs):
        call()
    peak = max(peak, anonymous_bytes())
    stop.set()
    thread.join()
    trim_heap(collect=True)
    return max(0, peak - base)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Send file descriptor 2 nowhere: the profiler's library greets there, past Python."""
    kept = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def _status_bytes(field: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_high_water() -> bool:
    """Forget the kernel's high-water mark; False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no such file, or a sandbox that forbids it: the mark is then not reported
        return False
    return True
