"""Networks built from a file may need as much memory and work as the file's tensors call for.

A name or a side in a hostile file can ask for a network of any width and depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# All families that spandrel builds make at most 2.6 times the bytes that they are filled with
# (weights in half precision half as much again), masks and tables of windows included, by at most
# 9 operators for each tensor.
_TIMES, _ANYHOW = 10, 256 << 20
_OPERATORS_EACH, _OPERATORS = 100, 5000
_RANGES = ("arange", "linspace", "eye", "tril_indices", "triu_indices")


class TooLargeError(RuntimeError):
    """A network wants far more than the tensors that it is to be filled with."""


class Bounded(TorchDispatchMode):
    """While it is entered, raises `TooLargeError` before a tensor is made that comes, with those
    made so far, to far more bytes than ``tensors``, and after far more operators than those need.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        sizes = [tensor.nbytes for tensor in tensors]
        self._bytes = _TIMES * sum(sizes) + _ANYHOW
        self._operators = _OPERATORS_EACH * len(sizes) + _OPERATORS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._operators -= 1
        makes = not func.is_view and not func._schema.is_mutable
        if self._operators < 0 or (makes and _elements(func, args) > self._bytes):
            raise TooLargeError("they ask for a network that is far larger than they are")
        made = func(*args, **(kwargs or {}))
        if makes:
            results = made if isinstance(made, (tuple, list)) else (made,)
            self._bytes -= sum(one.nbytes for one in results if isinstance(one, Tensor))
        return made


def _elements(func: Any, args: tuple[Any, ...]) -> float:
    """What an operator will make at least, by the sizes, numbers and tensors that it is given."""
    name = func.overloadpacket.__name__
    numbers = [abs(one) for one in args if isinstance(one, (int, float))]
    if name in _RANGES:
        return max(numbers, default=0)
    sizes = [math.prod(one) for one in args if _is_size(one)]
    tensors = [one for one in args if isinstance(one, Tensor)]
    if name == "repeat":
        return tensors[0].numel() * sizes[0]
    try:
        sizes.append(math.prod(torch.broadcast_shapes(*(one.shape for one in tensors))))
    except RuntimeError:
        sizes.append(0)  # not one element for another, so that nothing grows by broadcasting
    return max(sizes)


def _is_size(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(type(side) is int for side in given)
