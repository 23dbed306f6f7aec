"""Asynchronous copies of pages between a device and pinned host memory.

All device calls for pages are in this file. A transfer object belongs to one device and has four
operations:

    room     allocate host memory for one page
    out      start a copy from the device to the host
    back     start a copy from the host to the device, after the copies started by ``out``
    release  return the host memory for other pages; all copies from it must be over

Copies have their own streams, but all device memory is allocated on the computing stream. A block
used on another stream is not reused until the GPU reports that it is free, so the memory of a run
could not be predicted. Blocks in flight are therefore held until the computing stream waits for
their copy. Python waits for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.memory.pinned import PinnedMemory
from lowtide.memory.process_memory import total_host_bytes

# Divisor of the host's memory: the share that free buffers may keep between runs.
_FREE_BUFFER_DIVISOR = 8


@dataclass(eq=False)
class HostBuffer:
    """Host memory of one page, uint8 (bytes,), and the event of its last write."""

    memory: Tensor
    write_event: Any = None


class PendingStore(Protocol):
    """A copy to the host in flight; its source must be held until it is done."""

    def wait(self) -> None:
        """Order later work after the copy; then its source may be freed."""
        ...


class PendingFetch(Protocol):
    """A copy to the device in flight; its destination must be held until it is done."""

    @property
    def reads_done(self) -> Any:
        """Event after which the device no longer reads the bytes, once `end_reads` was called."""
        ...

    def result(self) -> Tensor:
        """Return the bytes, uint8 (bytes,), ordered so that later work may read them."""
        ...

    def end_reads(self) -> None:
        """Mark the end of all reads of the bytes: their memory may be freed or reused."""
        ...


class HostTransfer(Protocol):
    """Copies bytes between one device and its host."""

    device: torch.device

    def allocate(self, nbytes: int) -> HostBuffer:
        """Allocate host memory for a page."""
        ...

    def store(self, source: Tensor, buffer: HostBuffer, at: int) -> PendingStore:
        """Start a copy of uint8 (bytes,) on the device to byte ``at`` of a page."""
        ...

    def fetch(
        self,
        buffer: HostBuffer,
        byte_ranges: Sequence[tuple[int, int]],
        destination: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Start a copy of byte ranges of a page to ``destination``.

        ``destination`` is uint8 (bytes,) on the device. ``byte_ranges`` are (first, past the last)
        bytes, which are concatenated. The copy starts once ``after``, the former content of
        ``destination``, is over; without it, once all work issued so far is done.
        """
        ...

    def release(self, buffer: HostBuffer) -> None:
        """Return a page's memory, all of whose copies are over."""
        ...


@dataclass(frozen=True)
class CompletedCopy:
    """A copy of uint8 (bytes,) that is already done, used where calls are synchronous."""

    data: Tensor
    reads_done: Any = None

    def result(self) -> Tensor:
        """Return the bytes, uint8 (bytes,)."""
        return self.data

    def wait(self) -> None:
        """Do nothing: the copy is done."""

    def end_reads(self) -> None:
        """Do nothing: the reads are done."""


class SyncHostTransfer:
    """Synchronous transfer of the CPU, whose memory is that of the host."""

    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> HostBuffer:
        """Allocate pageable memory."""
        return HostBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def store(self, source: Tensor, buffer: HostBuffer, at: int) -> PendingStore:
        """Copy ``source``, uint8 (bytes,), at once."""
        buffer.memory[at : at + len(source)].copy_(source)
        return CompletedCopy(source)

    def fetch(
        self,
        buffer: HostBuffer,
        byte_ranges: Sequence[tuple[int, int]],
        destination: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Copy to ``destination``, uint8 (bytes,), at once."""
        torch.cat([buffer.memory[first:last] for first, last in byte_ranges], out=destination)
        return CompletedCopy(destination)

    def release(self, buffer: HostBuffer) -> None:
        """Do nothing: memory is freed with its last reference."""


@dataclass
class _AsyncCopy:
    """An asynchronous copy: its bytes, its event, and the computing stream.

    ``reads_done`` is the event after the computing stream's last read.
    """

    data: Tensor
    copy_event: Any
    compute_stream: Any
    reads_done: Any = None

    def result(self) -> Tensor:
        """Make the computing stream wait for the copy, and return the bytes."""
        self.compute_stream.wait_event(self.copy_event)
        return self.data

    def wait(self) -> None:
        """Make the computing stream, which owns the memory, wait for the copy."""
        self.result()

    def end_reads(self) -> None:
        """Record an event on the computing stream, after the copy even if nothing read it."""
        self.result()
        self.reads_done = self.compute_stream.record_event()


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
    _pinned: PinnedMemory = field(default_factory=PinnedMemory)
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

    def store(self, source: Tensor, buffer: HostBuffer, at: int) -> PendingStore:
        """Copy ``source``, uint8 (bytes,), on the stream to the host.

        After the work issued on the current stream.
        """
        computing = torch.cuda.current_stream(self.device)
        self._store_stream.wait_event(computing.record_event())
        with torch.cuda.device(self.device), torch.cuda.stream(self._store_stream):
            buffer.memory[at : at + len(source)].copy_(source, non_blocking=True)
            buffer.write_event = self._store_stream.record_event()
        return _AsyncCopy(source, buffer.write_event, computing)

    def fetch(
        self,
        buffer: HostBuffer,
        byte_ranges: Sequence[tuple[int, int]],
        destination: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Copy to ``destination``, uint8 (bytes,), on the stream from the host."""
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
        return _AsyncCopy(destination, copied, computing)

    def release(self, buffer: HostBuffer) -> None:
        """Keep the buffer for the next page, or unpin all after the last page of many."""
        self._free.append(buffer)
        self._taken -= 1
        held = sum(len(one.memory) for one in self._free)
        if not self._taken and held > total_host_bytes() // _FREE_BUFFER_DIVISOR:
            self._free.clear()
            _unpin((self._store_stream, self._fetch_stream), self._pinned)


def _unpin(streams: Sequence[torch.cuda.Stream], pinned: PinnedMemory) -> None:
    for stream in streams:
        stream.synchronize()
    pinned.close()


def host_transfer_for(device: torch.device) -> HostTransfer:
    """Return the transfer object for a device; on "meta" a run is only planned."""
    return SyncHostTransfer() if device.type in ("cpu", "meta") else CudaHostTransfer(device)
