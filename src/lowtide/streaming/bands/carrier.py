"""Bytes on their way between a device and the memory of its host; all calls to a device for pages
are in this file.

A carrier belongs to one device and knows four moves:

    room     memory on the host for one page; on CUDA no copy to it overtakes those from it that
             its last owner began
    out      begin to copy from the device to the host
    back     begin to copy from the host to the device, after what was begun with ``out`` there
    release  the room may be another page's

Python issues the work of a card faster than that does it, and whatever was issued keeps its memory
until it is done. Runs of bytes on their way can therefore be waited for.
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
class Room:
    """Host memory of one page, uint8, and when it was last written and read (events)."""

    memory: Tensor
    written: Any = None
    read: Any = None


class Leaving(Protocol):
    """Bytes on their way to the host, which are kept until they are waited for."""

    def wait(self) -> None:
        """Return when they are there."""
        ...


class Coming(Protocol):
    """Bytes on their way to the device."""

    def here(self) -> Tensor:
        """The bytes, which whatever is computed from now on may read."""
        ...

    def read(self) -> None:
        """What was issued so far is all that reads them."""
        ...

    def wait(self) -> None:
        """Return when all that reads them is done."""
        ...


class Carrier(Protocol):
    """Moves runs of bytes for one device."""

    device: torch.device

    def room(self, nbytes: int) -> Room:
        """Memory for a page."""
        ...

    def out(self, run: Tensor, room: Room, at: int) -> Leaving:
        """Begin to copy ``run``, uint8 on the device, to byte ``at`` of a page."""
        ...

    def back(self, room: Room, places: Sequence[tuple[int, int]]) -> Coming:
        """Begin to copy bytes (from, to before) of a page, one after another, to the device."""
        ...

    def release(self, room: Room) -> None:
        """The page is not needed any longer."""
        ...


@dataclass(frozen=True)
class Done:
    """Bytes that are where they are wanted, and read as soon as a call returns."""

    run: Tensor

    def here(self) -> Tensor:
        """The bytes."""
        return self.run

    def read(self) -> None:
        """Nothing to mark."""

    def wait(self) -> None:
        """Nothing to wait for."""


class HostCarrier:
    """The CPU, whose memory the host's is: a copy is done when the call returns."""

    device = torch.device("cpu")

    def room(self, nbytes: int) -> Room:
        """Ordinary memory."""
        return Room(torch.empty(nbytes, dtype=torch.uint8))

    def out(self, run: Tensor, room: Room, at: int) -> Leaving:
        """A copy."""
        room.memory[at : at + len(run)].copy_(run)
        return Done(run)

    def back(self, room: Room, places: Sequence[tuple[int, int]]) -> Coming:
        """A copy."""
        return Done(torch.cat([room.memory[first:last] for first, last in places]))

    def release(self, room: Room) -> None:
        """Memory goes when nothing refers to it."""


@dataclass
class _OnItsWay:
    run: Tensor
    copied: Any
    used: Any = None

    def here(self) -> Tensor:
        """The current stream waits for the copy."""
        stream = torch.cuda.current_stream(self.run.device)
        stream.wait_event(self.copied)
        # Its memory is that of another stream, which would use it again too early.
        self.run.record_stream(stream)
        return self.run

    def read(self) -> None:
        """Mark where the current stream is."""
        self.used = torch.cuda.current_stream(self.run.device).record_event()

    def wait(self) -> None:
        """For the mark, or for the copy where nothing was marked."""
        (self.used or self.copied).synchronize()


@dataclass
class CudaCarrier:
    """One CUDA device: a stream for copies to the host, and one for copies from it.

    Both wait for just what they need, so that copies go on while the current stream computes: to
    the host for the computation that was issued before, from the host for the last copy to the
    same page. Rooms are used again, by the next run too, since locking pages takes longer than
    copying them. Those of a run that take more than a small part of the host's memory are unlocked
    at its end, all others with the carrier.
    """

    device: torch.device
    _pinned: PinnedMemory = field(default_factory=PinnedMemory)
    _free: list[Room] = field(default_factory=list)
    _taken: int = 0

    def __post_init__(self) -> None:
        self._out, self._back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        streams = self._out, self._back
        weakref.finalize(self, _unlock, streams, self._pinned).atexit = False

    def room(self, nbytes: int) -> Room:
        """The smallest free room that is large enough, or a new one of exactly this size."""
        self._taken += 1
        fitting = [room for room in self._free if len(room.memory) >= nbytes]
        if not fitting:
            return Room(self._pinned.empty(nbytes))
        room = min(fitting, key=lambda one: len(one.memory))
        self._free.remove(room)
        if room.read is not None:
            self._out.wait_event(room.read)
        return room

    def out(self, run: Tensor, room: Room, at: int) -> Leaving:
        """On the stream to the host, after what the current stream was given so far."""
        self._out.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.device(self.device), torch.cuda.stream(self._out):
            room.memory[at : at + len(run)].copy_(run, non_blocking=True)
            room.written = self._out.record_event()
        run.record_stream(self._out)
        return _OnItsWay(run, room.written)

    def back(self, room: Room, places: Sequence[tuple[int, int]]) -> Coming:
        """On the stream from the host, into memory of that stream."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._back):
            if room.written is not None:
                self._back.wait_event(room.written)
            size = sum(last - first for first, last in places)
            run, at = torch.empty(size, dtype=torch.uint8, device=self.device), 0
            for first, last in places:
                part = run[at : at + last - first]
                part.copy_(room.memory[first:last], non_blocking=True)
                at += last - first
            room.read = self._back.record_event()
        return _OnItsWay(run, room.read)

    def release(self, room: Room) -> None:
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


def carrier_of(device: torch.device) -> Carrier:
    """The carrier for one device."""
    return HostCarrier() if device.type == "cpu" else CudaCarrier(device)
