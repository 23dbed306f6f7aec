"""What a run does with memory: which storage lives when, and for whom."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["weights", "gradients", "optimizer", "inputs", "activations"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "inputs", "activations")
# As ledgers call them.
TITLES: dict[Kind, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "inputs": "inputs",
    "activations": "live activations",
}


class StorageEvent(NamedTuple):
    """A storage that came (``size`` > 0) or went (``size`` < 0) during operator ``op``."""

    op: int
    storage: int
    size: int


class OpRecord(NamedTuple):
    """One operator call: bytes alive when it began and when its results were there.

    ``call`` is what `signature` of ``estimating.calls`` reads, or None for operators that need
    no memory beyond their results. It stands for ``times`` calls, one after another.
    """

    name: str
    before: int
    after: int
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None
    times: int = 1

    @property
    def made(self) -> int:
        """Bytes of the results beyond those that went for them."""
        return max(0, self.after - self.before)


class TensorFacts(NamedTuple):
    """What matters of a tensor argument: sizes, strides and type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Trace:
    """All storages and operators of one run, in order. Sizes in bytes.

    ``held`` are storages that were there before the first operator (weights, inputs); they
    count as alive throughout, or until they go.
    """

    held: dict[int, int] = field(default_factory=dict)
    events: list[StorageEvent] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes that were there before the run."""
        return sum(self.held.values())

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, those held before included."""
        return max(itertools.chain([self.held_bytes], self.live()))

    def live(self) -> Iterator[int]:
        """Bytes alive after each event."""
        now = self.held_bytes
        for event in self.events:
            now += event.size
            yield now

    def by_kind(self) -> Iterator[tuple[int, dict[Kind, int]]]:
        """(operator number, bytes alive of each kind) after each event; one dict, reused."""
        now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        for storage, size in self.held.items():
            now[self.kinds.get(storage, "activations")] += size
        yield 0, now
        for event in self.events:
            now[self.kinds.get(event.storage, "activations")] += event.size
            yield event.op, now

    def during(self, op: int) -> dict[Kind, int]:
        """Bytes of each kind while operator ``op`` runs, its results included."""
        now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        for storage, size in self._alive(op).items():
            now[self.kinds.get(storage, "activations")] += size
        return now

    def sizes_during(self, op: int, *, held: bool = True) -> list[int]:
        """Bytes of each storage that is alive while operator ``op`` runs, with those ``held``
        since before the run or without."""
        alive = self._alive(op)
        return [size for storage, size in alive.items() if held or storage not in self.held]

    def _alive(self, op: int) -> dict[int, int]:
        alive = dict(self.held)
        for event in self.events:
            # What goes after the operator has the number of the next one.
            if event.op > op:
                break
            if event.size > 0:
                alive[event.storage] = event.size
            else:
                alive.pop(event.storage, None)  # empty ones never came in
        return alive

    def peak_op(self) -> int:
        """The operator after whose results most bytes are alive."""
        best, most = 0, self.held_bytes
        for event, live in zip(self.events, self.live(), strict=True):
            if live > most:
                best, most = event.op, live
        return best

    def phase(self, op: int) -> str:
        """The part of the run in which operator ``op`` is, as marked; "" before the first mark."""
        names = [name for start, name in self.marks if start <= op]
        return names[-1] if names else ""

    def at_peak(self) -> dict[Kind, int]:
        """Bytes of each kind at the moment when most bytes are alive."""
        best, most = dict.fromkeys(KINDS, 0), -1
        for _, now in self.by_kind():
            if (total := sum(now.values())) > most:
                best, most = dict(now), total
        return best
