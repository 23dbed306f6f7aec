"""Limits on memory and work while a network is built from an untrusted file, or from options.

A name or a side in a hostile file can ask for a network of any width and depth; the limits are
proportional to the file's tensors. Those of options are the memory that there is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# All families that spandrel builds allocate at most 2.6 times the bytes that they load (half as
# much again from half-precision weights), masks and index tables of windows included.
_BYTES_FACTOR, _BASE_BYTES = 10, 256 << 20
_CALLS_PER_TENSOR, _BASE_CALLS = 1000, 100_000
_RANGES = ("arange", "linspace", "eye", "tril_indices", "triu_indices")
_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "normal", "repeat")
_VIEWS = ("expand", "view", "as_strided", "broadcast_to", "unfold")


_LARGEST_ITEM = 4  # bytes of a weight: what a function is going to make is counted in elements


class NetworkTooLargeError(RuntimeError):
    """A network needs far more memory or calls than the tensors that it loads."""


class BuildLimitsMode(TorchFunctionMode):
    """Context manager that raises `NetworkTooLargeError` when a network gets too large.

    It raises before a tensor is made that brings the total to far more bytes than ``tensors``, and
    after far more calls of PyTorch than those need.

    A TorchFunctionMode, not a TorchDispatchMode: the latter loads PyTorch's compiler, which takes
    more memory than most models.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        sizes = [tensor.nbytes for tensor in tensors]
        self._bytes = _BYTES_FACTOR * sum(sizes) + _BASE_BYTES
        self._calls = _CALLS_PER_TENSOR * len(sizes) + _BASE_CALLS
        self._storages: set[int] = set()

    @classmethod
    def of_memory(cls, room: int) -> Self:
        """Return limits for a network that may take ``room`` bytes, whatever it is built from."""
        limits = cls(())
        limits._bytes = room // _LARGEST_ITEM
        return limits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name.lstrip("_").startswith("set_") and name != "set_":
            # As `torch.no_grad` does where it ends: refused there, gradients would stay off.
            return func(*args, **kwargs)
        self._calls -= 1
        if self._calls < 0 or _elements(name, [*args, *kwargs.values()]) > self._bytes:
            raise NetworkTooLargeError("they describe a network that is far larger than they are")
        made = func(*args, **kwargs)
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor):
                self._count(one)
        return made

    def _count(self, made: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            storage = made.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                self._bytes -= storage.nbytes()


def _elements(name: str, given: list[Any]) -> float:
    """Return a lower bound of the elements a function will make, from its arguments."""
    numbers: list[float] = []
    shapes: list[tuple[int, ...]] = []
    sizes: list[float] = []
    for one in given:
        if type(one) in (int, float):
            numbers.append(abs(one))
        elif isinstance(one, Tensor):
            shapes.append(tuple(one.shape))
        elif isinstance(one, (tuple, list)):
            if name not in _VIEWS and set(map(type, one)) <= {int}:
                sizes.append(math.prod(one))
            shapes += [tuple(part.shape) for part in one if isinstance(part, Tensor)]
    if name in _RANGES:
        return max(numbers, default=0) ** (2 if name == "eye" else 1)
    if name in _FACTORIES and not sizes:
        sizes = [math.prod(numbers)]
    if name == "repeat":
        return math.prod(shapes[0]) * sizes[0]
    # Shapes that do not broadcast make nothing larger.
    with contextlib.suppress(ValueError):
        sizes.append(math.prod(np.broadcast_shapes(*shapes)))
    return max(sizes, default=0)
