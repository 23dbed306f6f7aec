"""Streams and events of a card that is not there: what was issued, and what has to come before it.

Every access to memory is noted with its stream and with all that is known to be done by then
(vector clocks). `Streams.races` are pairs that touch the same bytes, one of them writing, of which
neither is known to be done before the other begins.
"""

from __future__ import annotations

import contextlib
import itertools
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
    tensor: torch.Tensor
    writes: bool

    @property
    def range(self):
        first = self.tensor.data_ptr()
        return first, first + self.tensor.numel() * self.tensor.itemsize

    def before(self, other):
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


class Streams:
    def __init__(self, monkeypatch):
        self.host, self.log, self.recorded = {}, [], []
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
        """The current stream touches a tensor, which stays so that its memory is no other's."""
        self.log.append(Access(self.now.name, self.now.begin(), tensor, writes))

    @property
    def races(self):
        found = []
        for one, other in itertools.combinations(self.log, 2):
            (a, b), (c, d) = one.range, other.range
            meet = a < d and c < b and (one.writes or other.writes)
            if meet and not (one.before(other) or other.before(one)):
                found.append((one, other))
        return found


def merge(into, other):
    for name, count in other.items():
        into[name] = max(into.get(name, 0), count)
