"""Bytes on their way between a device and the memory of its host; all calls to a device for pages
are in this file.

A carrier belongs to one device and knows four moves:

    room     memory on the host for one page
    out      begin to copy from the device to the host
    back     begin to copy from the host to the device, after what was begun with ``out`` there
    release  the room may be another page's: all that came from it is over

Copies have streams of their own, but all device memory is that of the stream that computes: blocks
of others are not used again by it, nor known to be free before the card says so, and what a run
takes could not be told. Bytes on their way are therefore held until the computing stream was made
to wait for them. Python waits for nothing.
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

# The part of the host's memory that rooms may take between runs.
_KEPT = 8


@dataclass(eq=False)
class HostBuffer:
    """Host memory of one page, uint8, and when it was last written (an event)."""

    memory: Tensor
    written: Any = None


class PendingStore(Protocol):
    """Bytes on their way to the host, whose memory has to be held until they are there."""

    def there(self) -> None:
        """Whatever is computed from now on finds them there: their memory may be let go."""
        ...


class PendingFetch(Protocol):
    """Bytes on their way to the device, whose memory has to be held until they are here."""

    @property
    def done(self) -> Any:
        """When the device is done with them: an event, once they are over."""
        ...

    def here(self) -> Tensor:
        """The bytes, which whatever is computed from now on may read."""
        ...

    def over(self) -> None:
        """What was issued so far is all that reads them: their memory may be let go, or others may
        come to it."""
        ...


class HostTransfer(Protocol):
    """Moves runs of bytes for one device."""

    device: torch.device

    def room(self, nbytes: int) -> HostBuffer:
        """Memory for a page."""
        ...

    def out(self, run: Tensor, room: HostBuffer, at: int) -> PendingStore:
        """Begin to copy ``run``, uint8 on the device, to byte ``at`` of a page."""
        ...

    def back(
        self,
        room: HostBuffer,
        places: Sequence[tuple[int, int]],
        run: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """Begin to copy bytes (from, to before) of a page, one after another, to ``run``, uint8 on
        the device: as soon as those are over that came there before, or, without ``after``, when
        all is done that was issued so far."""
        ...

    def release(self, room: HostBuffer) -> None:
        """The page is not needed any longer, and all that came from it is over."""
        ...


@dataclass(frozen=True)
class CompletedCopy:
    """Bytes that are where they are wanted, and read as soon as a call returns."""

    run: Tensor
    done: Any = None

    def here(self) -> Tensor:
        """The bytes."""
        return self.run

    def there(self) -> None:
        """They are."""

    def over(self) -> None:
        """They are."""


class SyncHostTransfer:
    """The CPU, whose memory the host's is: a copy is done when the call returns."""

    device = torch.device("cpu")

    def room(self, nbytes: int) -> HostBuffer:
        """Ordinary memory."""
        return HostBuffer(torch.empty(nbytes, dtype=torch.uint8))

    def out(self, run: Tensor, room: HostBuffer, at: int) -> PendingStore:
        """A copy."""
        room.memory[at : at + len(run)].copy_(run)
        return CompletedCopy(run)

    def back(
        self,
        room: HostBuffer,
        places: Sequence[tuple[int, int]],
        run: Tensor,
        after: PendingFetch | None = None,
    ) -> PendingFetch:
        """A copy."""
        torch.cat([room.memory[first:last] for first, last in places], out=run)
        return CompletedCopy(run)

    def release(self, room: HostBuffer) -> None:
        """Memory goes when nothing refers to it."""


@dataclass
class _AsyncCopy:
    """A run of bytes, the event of its copy, the stream that computes, and when that was done with
    them (an event)."""

    run: Tensor
    copied: Any
    computing: Any
    done: Any = None

    def here(self) -> Tensor:
        """The computing stream waits for the copy."""
        self.computing.wait_event(self.copied)
        return self.run

    def there(self) -> None:
        """The computing stream waits for the copy, whose memory is its own."""
        self.here()

    def over(self) -> None:
        """Mark where the computing stream is, after the copy even where nothing read it."""
        self.here()
        self.done = self.computing.record_event()


@dataclass
class CudaHostTransfer:
    """One CUDA device: a stream for copies to the host, and one for copies from it.

    Both wait for just what they need, so that copies go on while the current stream computes: to
    the host for the computation that was issued before, from the host for the last copy to the same
    page and for what read the memory that they go to. Rooms are used again, by the next run too,
    since locking pages takes longer than copying them. Those of a run that take more than a small
    part of the host's memory are unlocked at its end, all others with the carrier.
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
        """The smallest free room that is large enough, or a new one of exactly this size."""
        self._taken += 1
        fitting = [room for room in self._free if len(room.memory) >= nbytes]
        if not fitting:
            return HostBuffer(self._pinned.empty(nbytes))
        room = min(fitting, key=lambda one: len(one.memory))
        self._free.remove(room)
        return room

    def out(self, run: Tensor, room: HostBuffer, at: int) -> PendingStore:
        """On the stream to the host, after what the current stream was given so far."""
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
        """On the stream from the host."""
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
        """Keep the room for the next page, or unlock all if this was the last page of many."""
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
    """The carrier for one device."""
    return SyncHostTransfer() if device.type == "cpu" else CudaHostTransfer(device)
