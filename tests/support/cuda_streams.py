"""Simulated CUDA streams and events: what was issued, and what has to come before it.

Every access to memory is noted with its stream and with all that is known to be done by then
(vector clocks). `Streams.races` are pairs that touch the same bytes, one of them writing, of which
neither is known to be done before the other begins.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import dataclass, field

import torch


@dataclass
class Event:
    clock: dict
    streams: Streams

    def synchronize(self):
        merge(self.streams.host, self.clock)


@dataclass
class Stream:
    name: str
    streams: Streams
    clock: dict = field(default_factory=dict)

    def begin(self):
        """Another piece of work, issued by the host now."""
        merge(self.clock, self.streams.host)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def wait_event(self, event):
        merge(self.clock, event.clock)

    def record_event(self):
        return Event(self.begin(), self.streams)

    def synchronize(self):
        merge(self.streams.host, self.clock)


@dataclass
class Access:
    stream: str
    clock: dict
    range: tuple[int, int]
    writes: bool
    tensor: torch.Tensor | None = None

    def before(self, other):
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


class Streams:
    """If ``frees``, tensors may go, and those that are followed are the computing stream's to write
    to from then on, as an allocator gives them to others at once; else all stay, so that no memory
    is another's."""

    def __init__(self, monkeypatch, *, frees=False):
        self.host, self.log, self.recorded = {}, [], []
        self._frees, self._followed, self.freed = frees, set(), 0
        self.computing = self.now = Stream("computing", self)
        names = (f"copies {number}" for number in itertools.count(1))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self._within)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda one, stream: self.recorded.append((one, stream))
        )
        copy = torch.Tensor.copy_

        def noted(target, source, non_blocking=False):
            if self.now is not self.computing:
                self.access(source, writes=False)
                self.access(target, writes=True)
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", noted)

    @contextlib.contextmanager
    def _within(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def access(self, tensor, *, writes):
        """The current stream touches a tensor."""
        kept = None if self._frees else tensor
        self.log.append(Access(self.now.name, self.now.begin(), extent(tensor), writes, kept))

    def follow(self, tensor):
        """Note when its memory goes."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._followed:
            self._followed.add(storage._cdata)
            where = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, where).atexit = False

    def _gone(self, key, where):
        self._followed.remove(key)
        self.freed += 1
        self.log.append(Access("computing", self.computing.begin(), where, writes=True))

    @property
    def races(self):
        found = []
        for one, other in itertools.combinations(self.log, 2):
            (a, b), (c, d) = one.range, other.range
            meet = a < d and c < b and (one.writes or other.writes)
            if meet and not (one.before(other) or other.before(one)):
                found.append((one, other))
        return found


def extent(tensor):
    """The addresses of one without gaps."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def merge(into, other):
    for name, count in other.items():
        into[name] = max(into.get(name, 0), count)
