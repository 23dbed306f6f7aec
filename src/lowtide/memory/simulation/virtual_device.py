"""A device that exists only as its allocator: real CPU runs that run out of memory on purpose."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.core.errors import UsageError
from lowtide.memory.simulation.allocator import CachingAllocator, SimulatedOutOfMemory

Role = Literal["composite", "makes", "takes over", "writes", "views", "no tensors"]

# `torch.tensor` ends with it, and so does `torch.from_numpy`, whose storage is numpy's.
_TAKES_OVER = torch.ops.aten.lift_fresh.default
_roles: dict[Any, Role] = {}


class VirtualDevice:
    """While it is entered, new CPU tensors take the memory of a simulated CUDA device.

    Each storage made by an operator is charged once, with its full size, to a
    `CachingAllocator` of ``capacity`` bytes (None: no limit), until its last tensor goes.
    Storages from before, and memory that others own (``torch.from_numpy``), are not charged.
    Where the device has no room, or at the allocations numbered in ``fail_at`` (from 0 on, since
    the device was entered, failed ones counted), the operator raises `SimulatedOutOfMemory`, and
    its result is dropped. The numbers computed are those of the same run without the device. An
    operator has run by the time it is refused, so the host must have what it asks for, except
    for fake tensors, whose sizes are charged as if they were real.

    An operator's own scratch is not seen, nor are sparse tensors. Only the entering thread
    is followed, with the backward passes it calls for on the CPU; work that other threads do
    meanwhile (a loader, say) is not. Can be entered again once it is left, then from a fresh
    state, but not while it is entered, nor inside another: that raises `UsageError`.
    """

    _entered: VirtualDevice | None = None

    def __init__(
        self,
        capacity: int | None = None,
        *,
        fail_at: int | Collection[int] | None = None,
        expandable_segments: bool = False,
    ) -> None:
        numbers = [fail_at] if isinstance(fail_at, int) else fail_at or ()
        self._fail_at = frozenset(numbers)
        self._fresh = partial(CachingAllocator, capacity, expandable_segments=expandable_segments)
        self._ledger = _Ledger(self._fresh(), self._fail_at)
        self._mode = _ChargeMode(self._ledger)

    def __enter__(self) -> VirtualDevice:
        if VirtualDevice._entered is not None:
            raise UsageError("a virtual device is entered already", hint="leave that one first")
        self._ledger = _Ledger(self._fresh(), self._fail_at)
        self._mode = _ChargeMode(self._ledger)
        self._mode.__enter__()
        VirtualDevice._entered = self
        return self

    def __exit__(self, *error: Any) -> None:
        VirtualDevice._entered = None
        self._mode.__exit__(*error)

    @property
    def allocator(self) -> CachingAllocator:
        """The device's allocator, up to date."""
        self._ledger.settle()
        return self._ledger.allocator

    @property
    def allocations(self) -> int:
        """How many storages were asked for, those refused included."""
        return self._ledger.asked

    @property
    def live(self) -> int:
        """Bytes of the storages alive now that were made while the device was entered."""
        self._ledger.settle()
        return self._ledger.live

    @property
    def peak_live(self) -> int:
        """Most bytes alive at once."""
        return self._ledger.peak_live

    @property
    def peak_reserved(self) -> int:
        """Most bytes that the allocator held of the device."""
        return self._ledger.allocator.peak_reserved


class _Charge(weakref.ref[Any]):
    """A watch on one storage, with what it was charged for."""

    __slots__ = ("handle", "key", "size")

    key: int
    handle: int
    size: int


class _Ledger:
    """Which storages are charged. Storages are told apart by their address while they live.

    Addresses are used again, so `settle` comes before any is looked up.
    """

    def __init__(self, allocator: CachingAllocator, fail_at: frozenset[int]) -> None:
        self.allocator = allocator
        self.asked = self.live = self.peak_live = 0
        self._fail_at = fail_at
        self._charges: dict[int, _Charge] = {}
        # Storages go at any moment, in any thread and within a call of the allocator too. They
        # are noted here and settled before the next one is charged, which comes to the same.
        self._gone: deque[_Charge] = deque()

    def settle(self) -> None:
        """Release what has gone since the last call."""
        gone = self._gone
        while gone:
            charge = gone.popleft()
            self.allocator.free(charge.handle)
            self.live -= charge.size
            if self._charges.get(charge.key) is charge:
                del self._charges[charge.key]

    def charge(self, result: Any, others: Iterable[Any]) -> SimulatedOutOfMemory | None:
        """Charge the storages of an operator's result that are new; the error if one fails.

        ``others`` are the operator's arguments: what it only hands on is not new.
        """
        self.settle()
        for tensor in (result,) if isinstance(result, Tensor) else _tensors(result):
            # Sparse tensors have no storage of their own, and their parts are not followed.
            if not tensor.is_cpu or not torch._C._has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._charges and not _is_among(key, others):
                error = self._add(storage, key)
                if error is not None:
                    return error
        return None

    def recharge(self, result: Any) -> SimulatedOutOfMemory | None:
        """Charge storages anew that an operator made larger in place."""
        self.settle()
        for tensor in _tensors(result):
            if not torch._C._has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            old = self._charges.get(storage._cdata)
            if old is not None and storage.nbytes() > old.size:
                error = self._add(storage, storage._cdata)
                if error is not None:
                    return error
                # Both are there while the smaller one is copied into the larger.
                self._gone.append(old)
                self.settle()
        return None

    def _add(self, storage: Any, key: int) -> SimulatedOutOfMemory | None:
        size = storage.nbytes()
        if size == 0:
            return None
        number, self.asked = self.asked, self.asked + 1
        if number in self._fail_at:
            return self.allocator.exhausted(size, f" (allocation {number} was told to fail)")
        try:
            handle = self.allocator.allocate(size)
        except SimulatedOutOfMemory as error:
            # Its traceback would hold the storage by way of this frame.
            return error.with_traceback(None)
        charge = self._charges[key] = _Charge(storage, self._gone.append)
        charge.key, charge.handle, charge.size = key, handle, size
        self.live += size
        self.peak_live = max(self.peak_live, self.live)
        return None


class _ChargeMode(TorchDispatchMode):
    """Sees each operator of its thread and lets the ledger charge for what it made."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        role = _roles.get(func) or _role(func)
        kwargs = kwargs or {}
        if role == "composite":
            # In inference mode these arrive whole; their parts allocate what must be seen.
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
    """What an operator means for memory, by its registration and its schema."""
    role: Role = "makes"
    returned = [value.alias_info for value in func._schema.returns]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if func is _TAKES_OVER:
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
    """Whether some tensor among the arguments, in lists or not, has the storage ``key``."""
    for value in arguments:
        if isinstance(value, Tensor):
            if torch._C._has_storage(value) and value.untyped_storage()._cdata == key:
                return True
        elif isinstance(value, list | tuple) and _is_among(key, value):
            return True
    return False
