"""Asynchronous copies of pages between a device and pinned host memory.

All device calls for pages are in this file. A transfer object belongs to one device and has four
operations:

    allocate  host memory for one page
    store     start a copy from the device to the host
    fetch     start a copy from the host to the device, after the copies started by ``store``
    release   return the host memory for other pages; all copies from it must be over

Copies have their own streams, but all device memory is allocated on the computing stream. A block
used on another stream is not reused until the GPU reports that it is free, so the memory of a run
could not be predicted. Blocks in flight are therefore held until the computing stream waits for
their copy. Python waits for nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.core.units import MIB
from lowtide.memory.process_memory import total_host_bytes

# The size of a huge page on x86-64 and most other architectures.
_HUGE = 2 * MIB


class PinnedMemoryAllocator:
    """Allocator of pinned host memory of exact size, up to the platform's share.

    PyTorch's own pinned allocator rounds up to powers of two (pytorch/pytorch#95823). Beyond the
    share, or where the driver refuses, memory is pageable: copies from it are slower, not wrong.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.pinned_bytes = 0
        self._registered: list[torch.Tensor] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized memory, uint8 (``nbytes``,), pinned where possible."""
        if not torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8)
        memory = _in_huge_pages(nbytes)
        if self.limit_bytes is None:
            self.limit_bytes = int(_pinned_share() * total_host_bytes())
        if nbytes and self.pinned_bytes + nbytes <= self.limit_bytes and _register(memory):
            self.pinned_bytes += nbytes
            self._registered.append(memory)
        return memory

    def close(self) -> None:
        """Unpin all memory; no copy may be in flight."""
        for memory in self._registered:
            _runtime().cudaHostUnregister(memory.data_ptr())
        self._registered.clear()
        self.pinned_bytes = 0


def _pinned_share() -> float:
    """Return the share of host memory that may be pinned, a prior, lower on Windows."""
    windows = sys.platform == "win32" or "microsoft" in platform.release().lower()  # or WSL
    return 0.4 if windows else 0.5


def _in_huge_pages(nbytes: int) -> torch.Tensor:
    """Return uninitialized uint8 memory in huge pages where the system has them.

    The driver locks memory page by page, small pages at about 1 GiB per second.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or nbytes < _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    region = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE)
    with contextlib.suppress(OSError):  # a kernel without huge pages: small ones will do
        region.madvise(advice)
    return torch.frombuffer(region, dtype=torch.uint8, count=nbytes)


def _register(memory: torch.Tensor) -> bool:
    if int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    # The runtime reports the refusal again at the next kernel launch, anybody's.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False


def _runtime() -> Any:
    return torch.cuda.cudart()


# Divisor of the host's memory: the share that free buffers may keep between runs.
_FREE_BUFFER_DIVISOR = 8


@dataclass(eq=False)
class HostBuffer:
    """Host memory of one page, uint8 (bytes,), and the event of its last write."""

    memory: Tensor
    write_event: Any = None


@dataclass
class PendingCopy:
    """A copy of uint8 (bytes,) in flight; the memory on the device must be held until it is done.

    Attributes:
        data: Source of a copy to the host, destination of a copy to the device.
        copy_event: Event of the copy; None for one that is done.
        compute_stream: Stream that owns the memory.
        reads_done: Event after that stream's last read of the bytes, once `end_reads` was called.
    """

    data: Tensor
    copy_event: Any = None
    compute_stream: Any = None
    reads_done: Any = None

    def wait(self) -> None:
        """Order later work of the computing stream after the copy."""
        if self.copy_event is not None:
            self.compute_stream.wait_event(self.copy_event)

    def result(self) -> Tensor:
        """Return the bytes, uint8 (bytes,), ordered so that later work may read them."""
        self.wait()
        return self.data

    def end_reads(self) -> None:
        """Mark the end of all reads of the bytes: their memory may be freed or reused."""
        self.wait()
        if self.copy_event is not None:
            self.reads_done = self.compute_stream.record_event()


class CpuHostTransfer:
    """Synchronous transfer of the CPU, whose memory is that of the host."""

    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> HostBuffer:
        """Allocate pageable memory."""
        return HostBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def store(self, source: Tensor, buffer: HostBuffer, at: int) -> PendingCopy:
        """Copy ``source``, uint8 (bytes,), at once."""
        buffer.memory[at : at + len(source)].copy_(source)
        return PendingCopy(source)

    def fetch(
        self,
        buffer: HostBuffer,
        byte_ranges: Sequence[tuple[int, int]],
        destination: Tensor,
        after: PendingCopy | None = None,
    ) -> PendingCopy:
        """Copy byte ranges of a page to ``destination``, uint8 (bytes,) on the device, at once.

        ``byte_ranges`` are (first, past the last) bytes, which are concatenated.
        """
        torch.cat([buffer.memory[first:last] for first, last in byte_ranges], out=destination)
        return PendingCopy(destination)

    def release(self, buffer: HostBuffer) -> None:
        """Do nothing: memory is freed with its last reference."""


@dataclass
class CudaHostTransfer:
    """Transfer of one CUDA device, with one copy stream in each direction.

    Copies overlap the current stream, since each waits only for what it needs: to the host for the
    work issued before, from the host for the last copy to the same page and for the last reads of
    the memory it overwrites. Buffers are reused, also by the next run, since pinning takes longer
    than copying. If the buffers of a run exceed a small share of the host's memory, they are
    unpinned at its end, otherwise with this object.
    """

    device: torch.device
    _pinned: PinnedMemoryAllocator = field(default_factory=PinnedMemoryAllocator)
    _free: list[HostBuffer] = field(default_factory=list)
    _taken: int = 0

    def __post_init__(self) -> None:
        self._store_stream, self._fetch_stream = (
            torch.cuda.Stream(self.device),
            torch.cuda.Stream(self.device),
        )
        streams = self._store_stream, self._fetch_stream
        weakref.finalize(self, _unpin, streams, self._pinned).atexit = False

    def allocate(self, nbytes: int) -> HostBuffer:
        """Return the smallest free buffer that is large enough, or a new one of this size."""
        self._taken += 1
        fitting = [room for room in self._free if len(room.memory) >= nbytes]
        if not fitting:
            return HostBuffer(self._pinned.empty(nbytes))
        buffer = min(fitting, key=lambda one: len(one.memory))
        self._free.remove(buffer)
        return buffer

    def store(self, source: Tensor, buffer: HostBuffer, at: int) -> PendingCopy:
        """Copy ``source``, uint8 (bytes,), on the stream to the host.

        After the work issued on the current stream.
        """
        computing = torch.cuda.current_stream(self.device)
        self._store_stream.wait_event(computing.record_event())
        with torch.cuda.device(self.device), torch.cuda.stream(self._store_stream):
            buffer.memory[at : at + len(source)].copy_(source, non_blocking=True)
            buffer.write_event = self._store_stream.record_event()
        return PendingCopy(source, buffer.write_event, computing)

    def fetch(
        self,
        buffer: HostBuffer,
        byte_ranges: Sequence[tuple[int, int]],
        destination: Tensor,
        after: PendingCopy | None = None,
    ) -> PendingCopy:
        """Copy to ``destination``, uint8 (bytes,), on the stream from the host.

        The copy starts once ``after``, the former content of ``destination``, is over; without it,
        once all work issued so far is done.
        """
        computing = torch.cuda.current_stream(self.device)
        free = computing.record_event() if after is None else after.reads_done
        with torch.cuda.device(self.device), torch.cuda.stream(self._fetch_stream):
            self._fetch_stream.wait_event(free)
            if buffer.write_event is not None:
                self._fetch_stream.wait_event(buffer.write_event)
            at = 0
            for first, last in byte_ranges:
                part = destination[at : at + last - first]
                part.copy_(buffer.memory[first:last], non_blocking=True)
                at += last - first
            copied = self._fetch_stream.record_event()
        return PendingCopy(destination, copied, computing)

    def release(self, buffer: HostBuffer) -> None:
        """Keep the buffer for the next page, or unpin all after the last page of many."""
        self._free.append(buffer)
        self._taken -= 1
        held = sum(len(one.memory) for one in self._free)
        if not self._taken and held > total_host_bytes() // _FREE_BUFFER_DIVISOR:
            self._free.clear()
            _unpin((self._store_stream, self._fetch_stream), self._pinned)


def _unpin(streams: Sequence[torch.cuda.Stream], pinned: PinnedMemoryAllocator) -> None:
    for stream in streams:
        stream.synchronize()
    pinned.close()


HostTransfer = CpuHostTransfer | CudaHostTransfer


def host_transfer_for(device: torch.device) -> HostTransfer:
    """Return the transfer object for a device; on "meta" a run is only planned."""
    return CpuHostTransfer() if device.type in ("cpu", "meta") else CudaHostTransfer(device)
