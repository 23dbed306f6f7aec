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

from lowtide.memory.meter import total_host_bytes
from lowtide.memory.pinned import PinnedMemory

# Divisor of the host's memory: the share that free buffers may keep between runs.
_KEPT = 8


@dataclass(eq=False)
class HostBuffer:
    """Host memory of one page, uint8, and the event of its last write."""

    memory: Tensor
    written: Any = None


class PendingStore(Protocol):
    """A copy to the host in flight; its source must be held until it is done."""

    def there(self) -> None:
        """Order later work after the copy; then its source may be freed."""
        ...


class PendingFetch(Protocol):
    """A copy to the device in flight; its destination must be held until it is done."""

    @property
    def done(self) -> Any:
        """Event after which the device no longer reads the bytes, once `over` was called."""
        ...

    def here(self) -> Tensor:
        """Return the bytes, ordered so that later work may read them."""
        ...

    def over(self) -> None:
        """Mark the end of all reads of the bytes: their memory may be freed or reused."""
        ...


class HostTransfer(Protocol):
    """Copies bytes between one device and its host."""

    device: torch.device

    def room(self, nbytes: int) -> HostBuffer:
        """Allocate host memory for a page."""
        ...

    def out(self, run: Tensor, room: HostBuffer, at: int) -> PendingStore:
        """Start a copy of ``run``, uint8 on the device, to byte ``at`` of a page."""
        ...

    def back(
        self,
        room: HostBuffer,
        places: Sequence[tuple[int, int]],
        run: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Start a copy of byte ranges of a page to ``run``, uint8 on the device.

        ``places`` are (first, past the last) bytes, which are concatenated. The copy starts once
        ``after``, the former content of ``run``, is over; without it, once all work issued so far
        is done.
        """
        ...

    def release(self, room: HostBuffer) -> None:
        """Return a page's memory, all of whose copies are over."""
        ...


@dataclass(frozen=True)
class CompletedCopy:
    """A copy that is already done, used where calls are synchronous."""

    run: Tensor
    done: Any = None

    def here(self) -> Tensor:
        """Return the bytes."""
        return self.run

    def there(self) -> None:
        """Do nothing: the copy is done."""

    def over(self) -> None:
        """Do nothing: the reads are done."""


class SyncHostTransfer:
    """Synchronous transfer of the CPU, whose memory is that of the host."""

    device = torch.device("cpu")

    def room(self, nbytes: int) -> HostBuffer:
        """Allocate pageable memory."""
        return HostBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def out(self, run: Tensor, room: HostBuffer, at: int) -> PendingStore:
        """Copy at once."""
        room.memory[at : at + len(run)].copy_(run)
        return CompletedCopy(run)

    def back(
        self,
        room: HostBuffer,
        places: Sequence[tuple[int, int]],
        run: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Copy at once."""
        torch.cat([room.memory[first:last] for first, last in places], out=run)
        return CompletedCopy(run)

    def release(self, room: HostBuffer) -> None:
        """Do nothing: memory is freed with its last reference."""


@dataclass
class _AsyncCopy:
    """An asynchronous copy: its bytes, its event, and the computing stream.

    ``done`` is the event after the computing stream's last read.
    """

    run: Tensor
    copied: Any
    computing: Any
    done: Any = None

    def here(self) -> Tensor:
        """Make the computing stream wait for the copy, and return the bytes."""
        self.computing.wait_event(self.copied)
        return self.run

    def there(self) -> None:
        """Make the computing stream, which owns the memory, wait for the copy."""
        self.here()

    def over(self) -> None:
        """Record an event on the computing stream, after the copy even if nothing read it."""
        self.here()
        self.done = self.computing.record_event()


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
        self._out, self._back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        streams = self._out, self._back
        weakref.finalize(self, _unlock, streams, self._pinned).atexit = False

    def room(self, nbytes: int) -> HostBuffer:
        """Return the smallest free buffer that is large enough, or a new one of this size."""
        self._taken += 1
        fitting = [room for room in self._free if len(room.memory) >= nbytes]
        if not fitting:
            return HostBuffer(self._pinned.empty(nbytes))
        room = min(fitting, key=lambda one: len(one.memory))
        self._free.remove(room)
        return room

    def out(self, run: Tensor, room: HostBuffer, at: int) -> PendingStore:
        """Copy on the stream to the host, after the work issued on the current stream."""
        computing = torch.cuda.current_stream(self.device)
        self._out.wait_event(computing.record_event())
        with torch.cuda.device(self.device), torch.cuda.stream(self._out):
            room.memory[at : at + len(run)].copy_(run, non_blocking=True)
            room.written = self._out.record_event()
        return _AsyncCopy(run, room.written, computing)

    def back(
        self,
        room: HostBuffer,
        places: Sequence[tuple[int, int]],
        run: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Copy on the stream from the host."""
        computing = torch.cuda.current_stream(self.device)
        free = computing.record_event() if after is None else after.done
        with torch.cuda.device(self.device), torch.cuda.stream(self._back):
            self._back.wait_event(free)
            if room.written is not None:
                self._back.wait_event(room.written)
            at = 0
            for first, last in places:
                part = run[at : at + last - first]
                part.copy_(room.memory[first:last], non_blocking=True)
                at += last - first
            copied = self._back.record_event()
        return _AsyncCopy(run, copied, computing)

    def release(self, room: HostBuffer) -> None:
        """Keep the buffer for the next page, or unpin all after the last page of many."""
        self._free.append(room)
        self._taken -= 1
        held = sum(len(one.memory) for one in self._free)
        if not self._taken and held > total_host_bytes() // _KEPT:
            self._free.clear()
            _unlock((self._out, self._back), self._pinned)


def _unlock(streams: Sequence[torch.cuda.Stream], pinned: PinnedMemory) -> None:
    for stream in streams:
        stream.synchronize()
    pinned.close()


def host_transfer_for(device: torch.device) -> HostTransfer:
    """Return the transfer object for a device."""
    return SyncHostTransfer() if device.type == "cpu" else CudaHostTransfer(device)
