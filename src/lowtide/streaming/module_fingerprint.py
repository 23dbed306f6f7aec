"""Fingerprint of a module's structure and attributes, to detect changes.

A captured program fixes what Python decided during capture. Each call compares what that can depend
on and is kept in the module: which parameters, buffers, submodules and hooks there are, and every
attribute that is a number, a string or a container of these. Weight values are not compared:
programs read them in place.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Set
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lowtide.memory.tracing.python_place import PLAIN_KINDS, AttributeKey, array_bytes, own_value
from lowtide.memory.tracing.python_places import MODULE_ATTRIBUTES, global_hooks, slots_of

_PLAIN = tuple(PLAIN_KINDS)
# Objects within objects that are compared.
_DEPTH = 2
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ModuleFingerprint:
    """Comparable facts about a module and its submodules, without weight values.

    Holds references to the objects it describes, so that no new object can take their addresses. A
    class may list its own attributes to ignore in ``_ignored_attributes``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held: list[object] = []
        self._facts: dict[int, dict[str, Any]] = {}
        hooks = [one for table in global_hooks() for one in table.items()]
        self._held.append(hooks)
        self._facts[0] = {"": [(key, id(hook)) for key, hook in hooks]}
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
        """Return the class's functions and values, which may be monkey-patched."""
        found: dict[str, Any] = {}
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for name, value in vars(base).items():
                if not name.startswith("__") or name == "__call__":
                    found.setdefault(name, self._fact(value))
        return found

    def _fact(self, value: Any, inside: int = 0) -> Any:
        """Return a form of ``value`` that ``==`` compares fast."""
        kind = type(value)  # proxies that give another `__class__` deceive `isinstance`
        if kind in PLAIN_KINDS or issubclass(kind, _PLAIN):
            return kind, value if value == value else "nan"
        if issubclass(kind, (tuple, list)) and PLAIN_KINDS.issuperset(map(type, value)):
            return kind, *value, *map(type, value)
        if issubclass(kind, Tensor):
            return *self._tensor(value), _written(value)
        self._held.append(value)
        if issubclass(kind, nn.Module):  # in a list, where it is not registered as a submodule
            self._waiting.append(value)
        elif issubclass(kind, np.ndarray):
            return value.shape, str(value.dtype), hashlib.sha256(array_bytes(value)).digest()
        elif issubclass(kind, Mapping):
            return id(kind), self._fact([*value], inside), self._fact([*value.values()], inside)
        elif issubclass(kind, (tuple, list, Set, deque)):
            found = [self._fact(item, inside) for item in value]
            return id(kind), sorted(found, key=repr) if issubclass(kind, Set) else found
        elif issubclass(kind, FunctionType):  # an editor that reloads it replaces its code
            self._held.append(value.__code__)
            return id(value), id(value.__code__)
        elif issubclass(kind, (staticmethod, classmethod, MethodType)):
            return id(kind), self._fact(value.__func__)
        elif inside < _DEPTH and not issubclass(kind, (type, ModuleType)):
            # For example a configuration: the same object may still have changed inside.
            own = {one: own_value(value, one) for one in slots_of(kind)}
            kept = own_value(value, "__dict__")
            own |= kept if issubclass(type(kept), dict) else {}
            return id(value), self._fact(own, inside + 1) if own else None
        return id(value)

    def _tensor(self, value: Tensor) -> tuple[Any, ...]:
        self._held.append(value)
        return id(value), value.dtype, value.device, value.shape


def _written(tensor: Tensor) -> object:
    """Return what tells whether the values of a tensor changed that is no parameter or buffer.

    Python reads them in the trace, as it reads those of a number.
    """
    if type(tensor) is not Tensor or tensor.is_inference():
        return None
    one = tensor.numel() == 1 and tensor.device.type == "cpu"
    return repr(tensor.item()) if one else tensor._version


def _without(where: int, facts: dict[str, Any], ignored: Set[AttributeKey]) -> dict[str, Any]:
    return {name: fact for name, fact in facts.items() if (where, name) not in ignored}
