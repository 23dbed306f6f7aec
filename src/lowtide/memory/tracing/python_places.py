"""Places where a module's Python code can keep values, read before a trace and put back after it.

A trace runs the module's own code on tensors without values. Whatever that code keeps of them would
stay in the user's process: in attributes, lists and dictionaries, globals, closures, classes,
default arguments and caches. Everything that the code reaches by the names that it uses is walked
through, except for the code of libraries that keep nothing of a model.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from lowtide.memory.tracing.python_place import (
    PLAIN_KINDS,
    AttributeKey,
    Content,
    LruCache,
    PlaceChange,
    StatePlace,
    array_bytes,
    attributes_place,
    items_place,
    names_place,
    own_value,
    state_place,
    table_place,
)

# Wrappers that a model is traced in are no modules of its own.
_WRAPPERS = "lowtide.streaming.", "lowtide.integrations."


def global_hooks() -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of hooks before and after the forward of all modules."""
    home: Any = nn.modules.module
    return [home._global_forward_pre_hooks, home._global_forward_hooks]


@contextmanager
def hooks_for_parts_only(module: nn.Module) -> Iterator[None]:
    """Call hooks of all modules for a module and its parts alone, in this thread."""
    thread = threading.get_ident()
    # By their attributes, which PyTorch's proxy of a module shares.
    parts = {
        id(vars(one)) for one in module.modules() if not type(one).__module__.startswith(_WRAPPERS)
    }

    def only(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(called: nn.Module, *given: Any) -> Any:
            here = threading.get_ident() == thread
            return None if here and id(vars(called)) not in parts else hook(called, *given)

        return call

    tables = global_hooks()
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({key: only(hook) for key, hook in table.items()})
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


# Attributes of every module: its tables of tensors, submodules and hooks.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Not those parts of the standard library that hold what others put there.
_LIBRARIES = (sys.stdlib_module_names | {"torch", "numpy", "lowtide"}) - {
    *("types", "weakref", "_thread"),
}
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
# By kind the attributes under which it holds code and values.
_HELD = {
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__self__",),
    (staticmethod, classmethod): ("__func__",),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    LruCache: ("__wrapped__",),
    types.CellType: ("cell_contents",),
}


class PythonStatePlaces:
    """All places that the code of a module, or of a function, can reach."""

    def __init__(self, code: object) -> None:
        walk = _Walk(code)
        self._places, self._facts = walk.places, walk.facts

    def read(self) -> list[Content]:
        """Return what the places keep now, for `changes`."""
        return [place.read() for place in self._places]

    def changes(self, before: list[Content]) -> list[PlaceChange]:
        """Return what differs from an earlier `read`."""
        pairs = zip(self._places, before, strict=True)
        return [change for place, content in pairs for change in place.changes(content)]

    @contextmanager
    def kept(self) -> Iterator[list[PlaceChange]]:
        """Put back on exit what was changed; yield a list that then has the changes.

        Plain values that were added outside of the module stay: hooks report what they observe.
        """
        before, found = self.read(), list[PlaceChange]()
        try:
            yield found
        finally:
            for place, content in zip(self._places, before, strict=True):
                changes = [*place.changes(content)]
                found += changes
                if not all(one.is_report for one in changes):
                    place.write(content)

    def digest(self, ignored: Set[AttributeKey] = frozenset()) -> str:
        """Return a hash of the code and of the plain values that it can reach.

        Attributes that are ``ignored`` do not count, and neither do hooks, which may only observe.
        It is the same in another process.
        """
        facts = (fact for key, fact in self._facts if key not in ignored)
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]


class _Walk:
    """Walk from a module or a function through all that its code can reach."""

    def __init__(self, start: object) -> None:
        self.places: list[StatePlace] = []
        self.facts: list[tuple[AttributeKey | None, str]] = []
        self._seen: dict[object, Any] = {}  # holds them, so that no others take their addresses
        # All names that code uses; of classes and Python modules, only these are followed.
        self._names = {"forward"}
        self._spaces: list[tuple[str, Mapping[str, Any], set[str]]] = []
        self._waiting = deque[tuple[str, AttributeKey | None, Any]]([("", None, start)])
        self._hooks = [("a hook of all modules", one) for one in global_hooks() if one]
        self._go_on()
        facts = [*self.facts]
        self._waiting += [(name, None, hooks) for name, hooks in self._hooks]
        self._go_on()
        self.facts = facts

    def _go_on(self) -> None:
        while self._waiting:
            while self._waiting:
                self._visit(*self._waiting.popleft())
            for prefix, table, done in self._spaces:
                used = {one for one in table if one in self._names or _is_called(table, one)}
                self._waiting += [
                    (f"{prefix}{one}", None, table[one]) for one in sorted(used - done)
                ]
                done |= used

    def _visit(self, name: str, key: AttributeKey | None, value: Any) -> None:
        kind = type(value)  # `isinstance` believes proxies that give another `__class__`
        if kind in PLAIN_KINDS:
            self.facts.append((key, f"{name}={value!r}"))
            return
        if id(value) in self._seen or issubclass(kind, Tensor):
            return
        self._seen[id(value)] = value
        if issubclass(kind, nn.Module):
            self._module(name, value)
        elif issubclass(kind, (dict, list, tuple, set, frozenset, deque)):
            self._container(name, key, value)
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, types.ModuleType):
            self._python_module(value)
        elif issubclass(kind, types.FunctionType):
            self._function(key, value)
        elif (place := state_place(name, key, value)) is not None:
            self.places.append(place)
            if issubclass(kind, np.ndarray):
                digest = hashlib.sha256(array_bytes(value)).hexdigest()
                self.facts.append((key, f"{name}={value.dtype} {value.shape} {digest}"))
        elif not is_library(kind.__module__):
            self._object(name, key, value)
        for holder, attributes in _HELD.items():
            if issubclass(kind, holder):
                for attribute in attributes:
                    with contextlib.suppress(ValueError):  # a variable that has no value yet
                        self._waiting.append((name, key, getattr(value, attribute)))

    def _module(self, name: str, module: nn.Module) -> None:
        kind, own, prefix = type(module), vars(module), f"{name}." if name else ""
        for table in (own, module._buffers, module._parameters, module._modules):
            self.places.append(table_place(prefix, None, table, id(module)))
        self.facts.append((None, f"{name}: {kind.__qualname__} {module.training}"))
        ignored = getattr(kind, "_ignored_attributes", frozenset[str]())
        for attribute, value in own.items():
            key = id(module), attribute
            if attribute not in MODULE_ATTRIBUTES | ignored:
                self._waiting.append((f"{prefix}{attribute}", key, value))
            elif attribute.endswith("hooks") and value:
                self._hooks.append((f"{prefix}{attribute}", value))
        self._waiting += [(f"{prefix}{one}", None, part) for one, part in module._modules.items()]
        self._class(kind)

    def _container(self, name: str, key: AttributeKey | None, value: Any) -> None:
        unordered = isinstance(value, (set, frozenset))
        items = sorted(value, key=repr) if unordered else [*value]
        if isinstance(value, dict):
            items += dict.values(value)
            self.places.append(table_place(name, key, value))
        elif not isinstance(value, (tuple, frozenset)):
            self.places.append(items_place(name, key, value))
        if PLAIN_KINDS.issuperset(map(type, items)):
            if isinstance(value, list) and all(type(one) is str for one in items):
                items = sorted(items)  # libraries list names of sets, in no order
            self.facts.append((key, f"{name}={items!r}"))
        else:
            self._waiting += [(name, key, item) for item in items]

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if is_library(base.__module__) or ("class", id(base)) in self._seen:
                continue
            self._seen["class", id(base)] = base
            prefix = f"{base.__qualname__}."
            self._spaces.append((prefix, vars(base), set()))
            self.places.append(attributes_place(prefix, None, base))

    def _python_module(self, module: types.ModuleType) -> None:
        if module is random:
            self._visit("Python's random", None, random._inst)  # pyright: ignore
        elif module is np.random or (module is np and "random" in self._names):
            self._visit("NumPy's random", None, np.random.mtrand._rand)  # pyright: ignore
        elif not is_library(module.__name__):
            self._spaces.append(("the global ", vars(module), set()))
            self._globals(vars(module))

    def _globals(self, table: dict[str, Any]) -> None:
        if ("globals", id(table)) not in self._seen:
            self._seen["globals", id(table)] = table
            self.places.append(names_place("the global ", table, self._names))

    def _function(self, key: AttributeKey | None, function: types.FunctionType) -> None:
        home = function.__globals__.get("__name__", "")
        if home.startswith("lowtide."):
            return  # what it keeps is of use after the trace
        defaults = function.__defaults__, function.__kwdefaults__, function.__dict__
        title = f"the defaults of {function.__qualname__}"
        self._waiting += [(title, key, one) for one in defaults if one is not None]
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._waiting.append((f"{variable} in {function.__qualname__}", key, cell))
        if is_library(home):
            return
        table = function.__globals__
        self._globals(table)
        for one in dict.fromkeys(self._read_code(code)):
            if one in table:
                self._waiting.append((f"the global {one}", None, table[one]))
            elif one in sys.modules:  # imported by the function itself
                self._waiting.append((one, None, sys.modules[one]))

    def _read_code(self, code: types.CodeType) -> Iterator[str]:
        """Yield the global names that a function uses, with the functions inside of it."""
        self._names.update(code.co_names)
        plain = [
            sorted(map(repr, one)) if isinstance(one, frozenset) else one
            for one in code.co_consts
            if not isinstance(one, types.CodeType)
        ]
        facts = code.co_code, code.co_names, code.co_varnames, plain
        self.facts.append((None, hashlib.sha256(repr(facts).encode()).hexdigest()))
        yield from _global_names(code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from self._read_code(inner)

    def _object(self, name: str, key: AttributeKey | None, value: Any) -> None:
        kind = type(value)
        own = own_value(value, "__dict__")
        if issubclass(type(own), dict):
            self._container(name, key, own)
        if slots := slots_of(kind):
            place = attributes_place(name, key, value, slots)
            self.places.append(place)
            self._waiting += [(name, key, one) for one in place.read().values()]
        self.facts.append((key, f"{name}: {kind.__qualname__}"))
        self._class(kind)


@functools.lru_cache(1 << 14)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and imports in a function, in order."""
    used = (one for one in dis.get_instructions(code) if one.opname.endswith(("GLOBAL", "NAME")))
    return tuple(dict.fromkeys(one.argval for one in used))


def is_library(module: str | None) -> bool:
    """Whether code of this Python module keeps nothing of a model."""
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_called(table: Mapping[str, Any], name: str) -> bool:
    """Whether this may be a method that is called without its name.

    Python calls special ones; of a class that is not installed with a library, others count too.
    """
    if not isinstance(table, types.MappingProxyType) or not isinstance(
        table[name], types.FunctionType
    ):
        return False
    file = getattr(sys.modules.get(str(table.get("__module__"))), "__file__", None) or ""
    return name.startswith("__") or not file.startswith(_INSTALLED)


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots of objects of a class."""
    found = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [one for slots in found for one in ((slots,) if isinstance(slots, str) else slots)]
    return [one for one in names if not one.startswith("__")]
