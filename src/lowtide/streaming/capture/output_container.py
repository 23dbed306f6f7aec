"""Outputs in a container: a tuple, a list, a dictionary or a dataclass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from lowtide.core.errors import ModelError

Repack = Callable[[Sequence[Tensor]], Any]


def unpack_output(result: Any) -> tuple[list[Tensor], Repack]:
    """Return an output's tensors, of any shape, and a function that replaces them.

    The function takes other tensors and returns a copy of the container with these.

    Raises:
        ModelError: The output has no tensor.
    """
    found = list(_tensors(result, ()))
    if not found:
        raise ModelError(
            f"a model that returns an output of type {type(result).__name__} without a tensor"
            " cannot be streamed",
            hint="wrap it in a module that returns the tensors you need",
        )
    places = [place for place, _ in found]

    def pack(tensors: Sequence[Tensor]) -> Any:
        packed = empty
        for place, tensor in zip(places, tensors, strict=True):
            packed = _with_value(packed, place, tensor)
        return packed

    # Without the tensors, which are those of a trace.
    empty = result
    empty = pack(cast(Any, [None] * len(found)))
    return [tensor for _, tensor in found], pack


def _tensors(tree: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(tree, Tensor):
        yield place, tree
        return
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, (tuple, list)):
        items = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [(one.name, getattr(tree, one.name)) for one in dataclasses.fields(tree)]
    else:
        return
    for key, value in items:
        yield from _tensors(value, (*place, key))


def _with_value(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of ``tree`` with another value at ``place``."""
    if not place:
        return value
    key, rest = place[0], place[1:]
    if isinstance(tree, tuple):
        items = [_with_value(one, rest, value) if at == key else one for at, one in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    made = copy.copy(tree)
    if isinstance(tree, (list, Mapping)):
        made[key] = _with_value(tree[key], rest, value)  # pyright: ignore[reportIndexIssue]
    else:
        object.__setattr__(made, key, _with_value(getattr(tree, key), rest, value))
    return made
