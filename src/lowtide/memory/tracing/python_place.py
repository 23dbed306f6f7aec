"""Something in which Python code keeps values: how it is read, compared and put back."""

from __future__ import annotations

import functools
import operator
import pickle
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PLAIN_KINDS = frozenset(
    {
        *(int, float, complex, bool, str, bytes, type(None)),
        *(torch.dtype, torch.device, torch.memory_format, torch.Size),
    }
)
# Where there is no value.
NOTHING = object()
_CODE = types.ModuleType, types.FunctionType, type
LruCache: Any = type(functools.lru_cache(lambda: None))

# An attribute of a module: id of its owner, and its name.
AttributeKey = tuple[int, str]
Content = dict[Any, Any]


@dataclass(frozen=True)
class PlaceChange:
    """What a place kept before and after, under one of its keys.

    Attributes:
        name: Where it is, for messages, such as the path of an attribute.
        attribute: That attribute, if a module holds it.
        owned: Whether it is the attribute itself, rather than something inside of it.
        before: What was there.
        after: What is there.
        draws: Whether it is the state of a generator of random numbers.
    """

    name: str
    attribute: AttributeKey | None
    owned: bool
    before: Any
    after: Any
    draws: bool

    @property
    def is_report(self) -> bool:
        """Whether it only adds plain values, outside of the module, as hooks do that observe."""
        plain = PLAIN_KINDS.issuperset(map(type, tree_leaves(self.after)))
        return self.before is NOTHING and plain and self.attribute is None


@dataclass(frozen=True)
class StatePlace:
    """Something that keeps values by key; with an ``owner``, the attributes of that module.

    Keys are part of its name for messages where ``prefix`` is set.
    """

    name: str
    attribute: AttributeKey | None
    read: Callable[[], Content]
    write: Callable[[Content], object]
    prefix: bool = False
    owner: int | None = None
    draws: bool = False

    def changes(self, before: Content) -> Iterator[PlaceChange]:
        """Yield the differences from an earlier content."""
        now = self.read()
        if _are_same(before, now):
            return
        for key in {**before, **now}:
            old, new = before.get(key, NOTHING), now.get(key, NOTHING)
            if not are_alike(old, new, lambda one, other: one is other):
                name = f"{self.name}{key}" if self.prefix else self.name
                owned = self.owner is not None
                attribute = (self.owner, key) if self.owner is not None else self.attribute
                yield PlaceChange(name, attribute, owned, old, new, self.draws)


def _are_same(one: Content, other: Content) -> bool:
    return (
        len(one) == len(other)
        and all(map(operator.is_, one, other))
        and all(map(operator.is_, one.values(), other.values()))
    )


def are_alike(one: Any, other: Any, tensors: Callable[[Tensor, Tensor], bool]) -> bool:
    """Return whether two values are equal, with their ``tensors`` compared in this way."""
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if issubclass(kind, Tensor):
        return tensors(one, other)
    if kind in PLAIN_KINDS:
        return one == other or one != one
    if kind is np.ndarray:
        return one.dtype == other.dtype and np.array_equal(one, other)
    if kind is dict:
        return are_alike([*one, *one.values()], [*other, *other.values()], tensors)
    if kind not in (tuple, list) or len(one) != len(other):
        return False
    return all(are_alike(*pair, tensors) for pair in zip(one, other, strict=True))


def table_place(
    name: str, attribute: AttributeKey | None, table: dict[Any, Any], owner: int | None = None
) -> StatePlace:
    """Return the place of a dictionary; one with an ``owner`` holds attributes of that module."""
    kind: Any = OrderedDict if isinstance(table, OrderedDict) else dict

    def read() -> Content:
        return dict(kind.items(table))

    def write(content: Content) -> None:
        # Item by item, since other threads may read what did not change.
        for key in read().keys() - content.keys():
            kind.__delitem__(table, key)
        for key, value in content.items():
            if table.get(key, NOTHING) is not value:
                kind.__setitem__(table, key, value)
        if not _are_same(content, read()):  # another order
            kind.clear(table)
            kind.update(table, content)

    return StatePlace(name, attribute, read, write, prefix=owner is not None, owner=owner)


def items_place(name: str, attribute: AttributeKey | None, items: Any) -> StatePlace:
    """Return the place of a list, deque or set."""
    if isinstance(items, set):

        def refill(content: Content) -> None:
            items.clear()
            items.update(content)

        return StatePlace(name, attribute, lambda: dict.fromkeys(items), refill)

    def write(content: Content) -> None:
        items.clear()
        items.extend(content.values())

    return StatePlace(name, attribute, lambda: dict(enumerate(items)), write)


def names_place(title: str, table: dict[str, Any], names: Set[str]) -> StatePlace:
    """Return the place of the ``names`` in a Python module, without the code that it imports."""

    def read() -> Content:
        found = {name: table[name] for name in names & table.keys()}
        return {name: one for name, one in found.items() if not isinstance(one, _CODE)}

    def write(content: Content) -> None:
        for name in read().keys() - content.keys():
            del table[name]
        table.update(content)

    return StatePlace(title, None, read, write, prefix=True)


def attributes_place(
    name: str, attribute: AttributeKey | None, value: Any, slots: Sequence[str] = ()
) -> StatePlace:
    """Return the place of attributes that are in no dictionary: of a class, or in ``slots``."""
    own = type if issubclass(type(value), type) else object

    def read() -> Content:
        if own is type:
            return dict(vars(value))
        found = {one: own_value(value, one) for one in slots}
        return {one: kept for one, kept in found.items() if kept is not NOTHING}

    def write(content: Content) -> None:
        now = read()
        for one in now.keys() - content.keys():
            own.__delattr__(value, one)
        for one, was in content.items():
            if now.get(one, NOTHING) is not was:
                own.__setattr__(value, one, was)

    return StatePlace(name, attribute, read, write, prefix=own is type)


def array_bytes(array: np.ndarray) -> bytes:
    """Return the bytes of an array, without code that its class may have of its own."""
    return np.asarray(array).tobytes()


def own_value(value: Any, name: str) -> Any:
    """Return what an object keeps under a name, or `NOTHING`, also where its own code fails."""
    try:
        return getattr(value, name)
    except Exception:  # noqa: BLE001  (any error of other packages' __getattr__)
        return NOTHING


def state_place(name: str, attribute: AttributeKey | None, value: Any) -> StatePlace | None:
    """Return the place of an object that has one state rather than attributes, or None.

    Cells of closures, caches of `functools.lru_cache`, NumPy's arrays, and generators of random
    numbers.
    """
    kind = type(value)
    if issubclass(kind, types.CellType):
        return StatePlace(name, attribute, lambda: _in_cell(value), lambda was: _fill(value, was))
    if issubclass(kind, LruCache):
        # What it held can be computed again; it cannot be put back.
        return StatePlace(
            name,
            attribute,
            lambda: {value.cache_info().misses: value},
            lambda _: value.cache_clear(),
        )
    if issubclass(kind, np.ndarray) and not value.dtype.hasobject:
        return StatePlace(
            name,
            attribute,
            lambda: {"": array_bytes(value)},
            lambda was: np.copyto(value, np.frombuffer(was[""], value.dtype).reshape(value.shape)),
        )
    found = next((one for one in _GENERATORS if issubclass(kind, one[0])), None)
    if found is None:
        return None
    _, get, put = found
    return StatePlace(
        name,
        attribute,
        lambda: {"": pickle.dumps(get(value))},
        lambda was: put(value, pickle.loads(was[""])),
        draws=True,
    )


def _in_cell(cell: Any) -> Content:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # nothing was assigned yet
        return {}


def _fill(cell: Any, content: Content) -> None:
    if content:
        cell.cell_contents = content[""]
    else:
        del cell.cell_contents


def _set_numpy_state(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


# Kinds of generators of random numbers, how their state is read, and how it is set.
_GENERATORS: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (np.random.Generator, lambda one: one.bit_generator.state, _set_numpy_state),
)
