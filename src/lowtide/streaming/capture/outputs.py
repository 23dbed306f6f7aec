"""Outputs of a model: tensors in a container, and their error against those of another run.

A container is a tuple, a list, a dictionary or a dataclass. Errors, and the tolerance for rounding,
are relative to the largest absolute value of a result.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
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


_BY_TYPE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def dtype_tolerance(types: Iterable[torch.dtype]) -> float:
    """Return the tolerance of the coarsest dtype; whole numbers have none."""
    return max((_BY_TYPE[dtype] for dtype in set(types) if dtype in _BY_TYPE), default=0.0)


def relative_error(result: Tensor, whole: Tensor) -> float:
    """Return the largest difference, relative to the largest value of ``whole``.

    Infinite where it is NaN, or if the tensors do not have the same shape.
    """
    if result.shape != whole.shape:
        return float("inf")
    apart = (result.double() - whole.double()).abs().max().item()
    # Written so that a NaN difference counts as infinite.
    return apart / max(whole.double().abs().max().item(), 1e-30) if apart >= 0 else float("inf")


def largest_error(results: Iterable[Tensor], wholes: Iterable[Tensor]) -> float:
    """Return the largest `relative_error` of several results."""
    return max(relative_error(*pair) for pair in zip(results, wholes, strict=True))


def error_words(error: float) -> str:
    """Return a `relative_error` for a message, after "differs"."""
    return f"by {error:.1e} of its range" if error < 1 else "altogether"
