"""Trace of a run's memory: lifetime and kind of every storage, and the operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Kind = Literal["weights", "gradients", "optimizer", "inputs", "activations"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer", "inputs", "activations")
# Row names in ledgers.
KIND_TITLES: dict[Kind, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "inputs": "inputs",
    "activations": "live activations",
}


class StorageEvent(NamedTuple):
    """Allocation or release of a storage during operator ``op``.

    ``size`` is positive for an allocation and negative for a release.
    """

    op: int
    storage: int
    size: int


class OpRecord(NamedTuple):
    """One operator call, with the bytes alive before it and with its results.

    ``call`` is the input of `signature` in ``prediction.op_signature``, or None for operators that
    need no memory beyond their results. The record stands for ``repeats`` calls in sequence.
    """

    name: str
    bytes_before: int
    bytes_after: int
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None
    repeats: int = 1

    @property
    def result_bytes(self) -> int:
        """Bytes of the results, less the bytes freed for them."""
        return max(0, self.bytes_after - self.bytes_before)


class TensorFacts(NamedTuple):
    """Sizes, strides and type of a tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Trace:
    """All storages and operators of one run, in order; sizes in bytes.

    ``initial`` are storages that existed before the first operator (weights, inputs). They count as
    alive throughout, or until their release.
    """

    initial: dict[int, int] = field(default_factory=dict)
    events: list[StorageEvent] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def initial_bytes(self) -> int:
        """Bytes that existed before the run."""
        return sum(self.initial.values())

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes, with those held before the run."""
        return max(itertools.chain([self.initial_bytes], self.live_bytes()))

    @property
    def has_backward(self) -> bool:
        """Whether this is a training step, which repeats, with a backward pass."""
        return any(phase == "backward" for _, phase in self.marks)

    def live_bytes(self) -> Iterator[int]:
        """Yield the live bytes after each event."""
        now = self.initial_bytes
        for event in self.events:
            now += event.size
            yield now

    def live_by_kind(self) -> Iterator[tuple[int, dict[Kind, int]]]:
        """Yield (operator index, live bytes of each kind) after each event.

        The dict is one object, updated in place.
        """
        now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        for storage, size in self.initial.items():
            now[self.kinds.get(storage, "activations")] += size
        yield 0, now
        for event in self.events:
            now[self.kinds.get(event.storage, "activations")] += event.size
            yield event.op, now

    def live_during(self, op: int) -> dict[Kind, int]:
        """Return the bytes of each kind while operator ``op`` runs, results included."""
        now: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        for storage, size in self._alive(op).items():
            now[self.kinds.get(storage, "activations")] += size
        return now

    def sizes_during(self, op: int, *, include_initial: bool = True) -> list[int]:
        """Return the bytes of each storage alive while operator ``op`` runs.

        ``include_initial`` says whether to include those that existed before the run.
        """
        alive = self._alive(op)
        return [
            size
            for storage, size in alive.items()
            if include_initial or storage not in self.initial
        ]

    def _alive(self, op: int) -> dict[int, int]:
        alive = dict(self.initial)
        for event in self.events:
            # A release after the operator has the index of the next one.
            if event.op > op:
                break
            if event.size > 0:
                alive[event.storage] = event.size
            else:
                alive.pop(event.storage, None)  # empty storages were never added
        return alive

    def peak_op(self) -> int:
        """Return the index of the operator with whose results most bytes are alive."""
        best, most = 0, self.initial_bytes
        for event, live in zip(self.events, self.live_bytes(), strict=True):
            if live > most:
                best, most = event.op, live
        return best

    def phase(self, op: int) -> str:
        """Return the marked phase of operator ``op``; "" before the first mark."""
        names = [name for start, name in self.marks if start <= op]
        return names[-1] if names else ""

    def live_at_peak(self) -> dict[Kind, int]:
        """Return the bytes of each kind at the peak of live bytes."""
        best, most = dict.fromkeys(KINDS, 0), -1
        for _, now in self.live_by_kind():
            if (total := sum(now.values())) > most:
                best, most = dict(now), total
        return best
