"""Trace of a run's memory: lifetime and kind of every storage, and the operators.

A `MemoryTracer` records a `MemoryTrace` of a run on real or fake tensors.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.attention.spec import AttentionCall

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
    need no memory beyond their results.
    """

    name: str
    bytes_before: int
    bytes_after: int
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None

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
class MemoryTrace:
    """All storages and operators of one run, in order; sizes in bytes.

    ``initial`` are storages that existed before the first operator (weights, inputs). They count as
    alive throughout, or until their release. ``attention`` are the calls of it that were run as on
    another device (`simulate_attention`).
    """

    initial: dict[int, int] = field(default_factory=dict)
    events: list[StorageEvent] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    attention: set[AttentionCall] = field(default_factory=set)

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


# Dispatched by a fake tensor's ``device`` attribute; it makes no tensor.
DEVICE_QUERY = torch.ops.prim.device.default

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _call_directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class MemoryTracer(TorchDispatchMode):
    """Dispatch mode that records a `MemoryTrace` of real or fake tensors.

    Storages are identified by object and followed by weak references, so views cost nothing
    and a storage ends with its last tensor. The mode sees what this thread dispatches: backward
    passes on the CPU, but no other threads. Operators' own workspace is not seen.

    Args:
        keep_calls: Whether to record the arguments of operators, for pricing and MAC counts.
        call: Calls an operator in place of the direct call, for instance a `FakeCallCache`.
    """

    def __init__(self, *, keep_calls: bool = False, call: Call | None = None) -> None:
        super().__init__()
        self.trace = MemoryTrace()
        self._keep_calls = keep_calls
        self._call = call or _call_directly
        self._live_bytes = 0
        self._entered, self._ended = 0, False
        # Own ids, because addresses are reused as soon as a storage is freed.
        self._storages: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self._next_id = itertools.count()

    def __enter__(self) -> Self:
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Composite operators re-enter the mode; releases after the last exit are no events.
        self._entered -= 1
        self._ended = self._entered == 0

    def label(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Assign a kind to the storages of tensors of any shape.

        Storages not seen before count as held before the run.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._storages.get(storage._cdata)
            number = self._track(storage) if known is None else known[0]
            if known is None:
                self.trace.initial[number] = storage.nbytes()
                self._live_bytes += storage.nbytes()
            self.trace.kinds[number] = kind

    def mark(self, phase: str) -> None:
        """Start a named phase, for tables and plots."""
        self.trace.marks.append((len(self.trace.ops), phase))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_QUERY:
            return self._call(func, args, kwargs)
        if _is_composite(func):
            # Inference mode dispatches these undecomposed; only their parts take memory.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        before = self._live_bytes
        # Describe arguments before the call, which may change them in place.
        call = None
        if self._keep_calls and _may_need_workspace(func):
            call = (
                func,
                tuple(map(describe_argument, args)),
                {k: describe_argument(v) for k, v in kwargs.items()},
            )
        result = self._call(func, args, kwargs)
        self._add(result)
        if self._live_bytes != before or call is not None:
            self.trace.ops.append(OpRecord(func.__name__, before, self._live_bytes, call))
        return result

    def _add(self, result: Any) -> None:
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self._storages:
                size = storage.nbytes()
                number = self._track(storage)
                self._live_bytes += size
                self.trace.events.append(StorageEvent(len(self.trace.ops), number, size))
        elif isinstance(result, list | tuple):
            for part in result:
                self._add(part)

    def _track(self, storage: Any) -> int:
        key, size, number = storage._cdata, storage.nbytes(), next(self._next_id)

        def on_free(_: object) -> None:
            if self._ended:
                return
            del self._storages[key]
            self._live_bytes -= size
            self.trace.events.append(StorageEvent(len(self.trace.ops), number, -size))

        self._storages[key] = number, size, weakref.ref(storage, on_free)
        return number


def describe_argument(value: Any) -> Any:
    """Convert an argument to plain data: `TensorFacts` for tensors, tuples for lists."""
    if isinstance(value, Tensor):
        return TensorFacts(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(describe_argument(part) for part in value)
    return value


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator only decomposes into others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), _COMPOSITE) and not has_kernel(func.name(), "CPU")


@functools.cache
def _may_need_workspace(func: Any) -> bool:
    """Return whether an operator could need workspace.

    Views and queries of a tensor's properties need none; elementwise operators do only when they
    mix types.
    """
    aliases = any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in func._schema.arguments
    )
    return func.namespace not in ("prim", "profiler") and not aliases
