"""Fingerprint of a module's structure and attributes, to detect changes.

A captured program fixes what Python decided during capture. Each call compares what that can depend
on and is kept in the module: which parameters, buffers, submodules and hooks there are, and every
attribute that is a number, a string or a container of these. Weight values are not compared:
programs read them in place. What a module sets while it is traced is found, and restored after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Attributes of every module: its tables of tensors, submodules and hooks.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
)
_PLAIN_KINDS = frozenset(_PLAIN)
# Of longer containers only the length and the identity are compared.
_LONG = 1000
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

# An attribute of a module: id of its owner, and its name.
AttributeKey = tuple[int, str]
_NOTHING = object()
_WATCHED = bool, int, float, str, tuple, list, type(None)


class ModuleFingerprint:
    """Comparable facts about a module and its submodules, without weight values.

    Holds references to the objects it describes, so that no new object can take their addresses. A
    class may list its own attributes to ignore in ``_ignored_attributes``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held: list[object] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._waiting = [module]
        while self._waiting:
            one = self._waiting.pop()
            if id(one) not in self._facts:
                self._facts[id(one)] = self._of(one)

    def matches(self, other: ModuleFingerprint, ignored: Set[AttributeKey] = frozenset()) -> bool:
        """Return whether both describe the same state, ignoring the attributes in ``ignored``."""
        if self._facts == other._facts:
            return True
        if not ignored or self._facts.keys() != other._facts.keys():
            return False
        return all(
            own == theirs or _without(where, own, ignored) == _without(where, theirs, ignored)
            for (where, own), theirs in zip(self._facts.items(), other._facts.values(), strict=True)
        )

    def _of(self, module: nn.Module) -> dict[str, Any]:
        self._held.append(module)
        kind = type(module)
        if id(kind) not in self._facts:
            self._held.append(kind)
            self._facts[id(kind)] = self._class(kind)
        hooks = (tuple(getattr(module, name)) for name in _HOOKS)
        facts: dict[str, Any] = {"": (id(kind), module.training, *hooks)}
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                facts[name] = None if value is None else self._tensor(value)
        for name, part in module._modules.items():
            facts[name] = id(part)
            if part is not None:
                self._waiting.append(part)
        own = vars(module)
        for name in (
            own.keys() - MODULE_ATTRIBUTES - getattr(kind, "_ignored_attributes", frozenset())
        ):
            facts[name] = self._fact(own[name])
        return facts

    def _class(self, kind: type) -> dict[str, Any]:
        """Return the class's functions and numbers, which may be monkey-patched."""
        found: dict[str, Any] = {}
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for name, value in vars(base).items():
                if name.startswith("__") and name != "__call__":
                    continue
                if isinstance(value, (FunctionType, tuple, *_PLAIN)):
                    found.setdefault(name, self._fact(value))
        return found

    def _fact(self, value: Any, inside: int = 0) -> Any:
        """Return a form of ``value`` that ``==`` compares fast."""
        kind = type(value)
        if kind in _PLAIN_KINDS or isinstance(value, _PLAIN):
            return kind, value if value == value else "nan"
        if kind is tuple and len(value) <= _LONG and _PLAIN_KINDS.issuperset(map(type, value)):
            return value, *map(type, value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        self._held.append(value)
        if isinstance(value, nn.Module):  # in a list, where it is not registered as a submodule
            self._waiting.append(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LONG:
                return value.shape, str(value.dtype), value.tobytes()
        elif isinstance(value, (tuple, list, set, frozenset, Mapping)):
            if len(value) > _LONG:
                return id(value), len(value)
            items = value.items() if isinstance(value, Mapping) else value
            found = [self._fact(item, inside) for item in items]
            return id(kind), sorted(found, key=repr) if isinstance(value, Set) else found
        elif not (inside or isinstance(value, (type, FunctionType))) and hasattr(value, "__dict__"):
            # For example a configuration: the same object may still have changed inside.
            return id(value), self._fact(vars(value), inside + 1)
        return id(value)

    def _tensor(self, value: Tensor) -> Any:
        self._held.append(value)
        return id(value), value.dtype, value.device, value.shape


def _without(where: int, facts: dict[str, Any], ignored: Set[AttributeKey]) -> dict[str, Any]:
    return {name: fact for name, fact in facts.items() if (where, name) not in ignored}


@contextmanager
def restore_attributes(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Restore all attributes of a module and its parts on exit; yield those it changed.

    What is set in a trace has no values.
    """
    parts = list(module.modules())
    tables = [table for one in parts for table in (vars(one), one._buffers)]
    owners = [id(one) for one in parts for _ in range(2)]
    before = [dict(table) for table in tables]
    written = set[AttributeKey]()
    try:
        yield written
    finally:
        for owner, table, was in zip(owners, tables, before, strict=True):
            for name in [*was, *(name for name in table if name not in was)]:
                if name in was and table.get(name, _NOTHING) is was[name]:
                    continue
                written.add((owner, name))
                if name in was:
                    table[name] = was[name]
                else:
                    del table[name]


@contextmanager
def watch_attributes(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Yield the plain attributes that a module and its parts set, those set as they were too.

    Many remember the size of their last input, which may be of this size already. Only while
    `TRACE_LOCK` is held, since it watches all modules.
    """
    parts = {id(one) for one in module.modules()}
    written = set[AttributeKey]()
    own: Any = nn.Module.__setattr__

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, _WATCHED) and id(self) in parts:
            written.add((id(self), name))
        own(self, name, value)

    nn.Module.__setattr__ = set_attribute
    try:
        yield written
    finally:
        nn.Module.__setattr__ = own
