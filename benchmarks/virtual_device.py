"""Virtual CUDA device: real CPU runs that run out of simulated memory on purpose."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import UsageError
from lowtide.memory.allocator import SimulatedAllocator, SimulatedOutOfMemory

Role = Literal["composite", "makes", "takes over", "writes", "views", "no tensors"]

# `torch.tensor` ends with it, and so does `torch.from_numpy`, whose storage is numpy's.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_roles: dict[Any, Role] = {}


class VirtualDevice:
    """Context in which new CPU tensors are charged to a simulated CUDA allocator.

    Each storage made by an operator is charged once, with its full size, to a `SimulatedAllocator`
    of ``capacity`` bytes (None: no limit), until its last tensor is freed. Storages from before,
    and memory that others own (``torch.from_numpy``), are not charged. Where the device has no
    room, or at the allocations numbered in ``fail_at`` (from 0, since the device was entered,
    failed ones counted), the operator raises `SimulatedOutOfMemory`, and its result is dropped.
    Values are those of the same run without the device. An operator has run by the time it is
    refused, so the host must have the memory, except for fake tensors, whose sizes are charged as
    if they were real.

    Workspace of operators and sparse tensors are not charged. Only the entering thread is followed,
    with the backward passes it runs on the CPU; work of other threads (a loader, say) is not. It
    can be entered again after it is left, with a fresh state, but not while it is entered, nor
    inside another: that raises `UsageError`.
    """

    _active: VirtualDevice | None = None

    def __init__(
        self,
        capacity: int | None = None,
        *,
        fail_at: int | Collection[int] | None = None,
    ) -> None:
        numbers = [fail_at] if isinstance(fail_at, int) else fail_at or ()
        self._fail_at = frozenset(numbers)
        self._fresh = partial(SimulatedAllocator, capacity)
        self._ledger = _Ledger(self._fresh(), self._fail_at)
        self._mode = _ChargeMode(self._ledger)

    def __enter__(self) -> VirtualDevice:
        if VirtualDevice._active is not None:
            raise UsageError("a virtual device is already active", hint="exit that one first")
        self._ledger = _Ledger(self._fresh(), self._fail_at)
        self._mode = _ChargeMode(self._ledger)
        self._mode.__enter__()
        VirtualDevice._active = self
        return self

    def __exit__(self, *error: Any) -> None:
        VirtualDevice._active = None
        self._mode.__exit__(*error)

    @property
    def allocator(self) -> SimulatedAllocator:
        """The device's allocator, up to date."""
        self._ledger.process_frees()
        return self._ledger.allocator

    @property
    def allocations(self) -> int:
        """Number of storages requested, refused ones included."""
        return self._ledger.requests

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages alive now that were made while the device was entered."""
        self._ledger.process_frees()
        return self._ledger.live_bytes

    @property
    def peak_live_bytes(self) -> int:
        """Peak of the bytes alive at once."""
        return self._ledger.peak_live_bytes

    @property
    def peak_reserved(self) -> int:
        """Peak of the bytes that the allocator reserved on the device."""
        return self._ledger.allocator.peak_reserved


class _Charge(weakref.ref[Any]):
    """Weak reference to one storage, with the bytes charged for it."""

    __slots__ = ("handle", "key", "size")

    key: int
    handle: int
    size: int


class _Ledger:
    """Charged storages, by address.

    Addresses are reused, so `process_frees` comes before any lookup.
    """

    def __init__(self, allocator: SimulatedAllocator, fail_at: frozenset[int]) -> None:
        self.allocator = allocator
        self.requests = self.live_bytes = self.peak_live_bytes = 0
        self._fail_at = fail_at
        self._charges: dict[int, _Charge] = {}
        # Storages are freed at any moment, in any thread, even within a call of the allocator. They
        # are queued here and settled before the next one is charged, which gives the same result.
        self._freed: deque[_Charge] = deque()

    def process_frees(self) -> None:
        """Free the storages released since the last call."""
        freed = self._freed
        while freed:
            charge = freed.popleft()
            self.allocator.free(charge.handle)
            self.live_bytes -= charge.size
            if self._charges.get(charge.key) is charge:
                del self._charges[charge.key]

    def charge(self, result: Any, arguments: Iterable[Any]) -> SimulatedOutOfMemory | None:
        """Charge the new storages of an operator's result; returns the error if one fails.

        ``arguments`` are the operator's arguments: their storages in the result are not new.
        """
        self.process_frees()
        for tensor in (result,) if isinstance(result, Tensor) else _tensors(result):
            # Sparse tensors have no storage of their own, and their components are not followed.
            if not tensor.is_cpu or not torch._C._has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._charges and not _is_among(key, arguments):
                error = self._add(storage, key)
                if error is not None:
                    return error
        return None

    def recharge(self, result: Any) -> SimulatedOutOfMemory | None:
        """Charge again storages that an operator enlarged in place."""
        self.process_frees()
        for tensor in _tensors(result):
            if not torch._C._has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            old = self._charges.get(storage._cdata)
            if old is not None and storage.nbytes() > old.size:
                error = self._add(storage, storage._cdata)
                if error is not None:
                    return error
                # Both exist while the smaller one is copied into the larger.
                self._freed.append(old)
                self.process_frees()
        return None

    def _add(self, storage: Any, key: int) -> SimulatedOutOfMemory | None:
        size = storage.nbytes()
        if size == 0:
            return None
        number, self.requests = self.requests, self.requests + 1
        if number in self._fail_at:
            return self.allocator.out_of_memory_error(
                size, f" (allocation {number} is listed in fail_at)"
            )
        try:
            handle = self.allocator.allocate(size)
        except SimulatedOutOfMemory as error:
            # Its traceback would hold the storage through this frame.
            return error.with_traceback(None)
        charge = self._charges[key] = _Charge(storage, self._freed.append)
        charge.key, charge.handle, charge.size = key, handle, size
        self.live_bytes += size
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return None


class _ChargeMode(TorchDispatchMode):
    """Dispatch mode that charges the storages made by each operator of its thread."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        role = _roles.get(func) or _role(func)
        kwargs = kwargs or {}
        if role == "composite":
            # In inference mode composite operators arrive whole; their parts allocate what must be
            # charged.
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if role == "makes":
            error = self._ledger.charge(result, (*args, *kwargs.values()))
        elif role == "takes over" and result.untyped_storage().resizable():
            error = self._ledger.charge(result, ())
        elif role == "writes":
            error = self._ledger.recharge(result)
        else:
            return result
        if error is not None:
            # The traceback holds this frame, which must not hold what was refused.
            del result, args, kwargs
            raise error
        return result


def _role(func: Any) -> Role:
    """Classify an operator's effect on memory by its registration and schema."""
    role: Role = "makes"
    returned = [value.alias_info for value in func._schema.returns]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if func is _LIFT_FRESH:
        role = "takes over"
    elif func.namespace == "prim":
        role = "no tensors"
    elif has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CPU"):
        role = "composite"
    elif returned and all(returned):
        role = "writes" if any(alias.is_write for alias in returned) else "views"
    elif not any("Tensor" in str(value.type) for value in func._schema.returns):
        role = "no tensors"
    _roles[func] = role
    return role


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors(part)


def _is_among(key: int, arguments: Iterable[Any]) -> bool:
    """Return whether a tensor among the arguments, nested or not, has storage ``key``."""
    for value in arguments:
        if isinstance(value, Tensor):
            if torch._C._has_storage(value) and value.untyped_storage()._cdata == key:
                return True
        elif isinstance(value, list | tuple) and _is_among(key, value):
            return True
    return False
