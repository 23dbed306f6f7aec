"""Outputs in a container: a tuple, a list, a dictionary or a dataclass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from lowtide.core.errors import ModelError

Repack = Callable[[Tensor], Any]


def unpack_output(result: Any) -> tuple[Tensor, Repack]:
    """Return the only tensor of an output, and a function that replaces it.

    The function takes another tensor and returns a copy of the container with that.

    Raises:
        ModelError: The output has several tensors, or none.
    """
    found = list(_tensors(result, ()))
    if len(found) != 1:
        kind = type(result).__name__
        what = f"{len(found)} tensors" if found else f"an output of type {kind} without a tensor"
        raise ModelError(
            f"a model that returns {what} cannot be streamed; one tensor is needed",
            hint="wrap it in a module that returns only the tensor you need",
        )
    ((place, tensor),) = found
    if not place:
        return tensor, _identity
    empty = _with_value(result, place, None)
    return tensor, lambda other: _with_value(empty, place, other)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


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
