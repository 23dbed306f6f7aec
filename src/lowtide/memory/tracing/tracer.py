"""Dispatch mode that traces every tensor storage of a run, real or fake."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.core.trace_cache import repeat_count
from lowtide.memory.tracing.trace import Kind, OpRecord, StorageEvent, TensorFacts, Trace

# Dispatched by a fake tensor's ``device`` attribute; it makes no tensor.
DEVICE_QUERY = torch.ops.prim.device.default

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _call_directly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Tracer(TorchDispatchMode):
    """Dispatch mode that records a `Trace` of real or fake tensors.

    Storages are identified by object and followed by weak references, so views cost nothing
    and a storage ends with its last tensor. The mode sees what this thread dispatches: backward
    passes on the CPU, but no other threads. Operators' own workspace is not seen.

    Args:
        keep_calls: Whether to record the arguments of operators, for pricing and MAC counts.
        call: Calls an operator in place of the direct call, for instance a `FakeCallCache`.
    """

    def __init__(self, *, keep_calls: bool = False, call: Call | None = None) -> None:
        super().__init__()
        self.trace = Trace()
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
            self.trace.ops.append(
                OpRecord(func.__name__, before, self._live_bytes, call, repeat_count())
            )
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


def record_trace(
    run: Callable[[Tracer], Any], *, weights: Iterable[Tensor] = (), inputs: Iterable[Tensor] = ()
) -> Trace:
    """Run ``run(tracer)`` and return its trace.

    ``weights`` and ``inputs``, tensors of any shape, count as alive from the start.
    """
    tracer = Tracer()
    tracer.label(weights, "weights")
    tracer.label(inputs, "inputs")
    del weights, inputs  # tensors that the model replaces must be freed
    with tracer:
        run(tracer)
    return tracer.trace
