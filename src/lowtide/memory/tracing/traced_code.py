"""A trace of a module's code that leaves nothing behind, whether it ends or fails."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CellType, FrameType, GeneratorType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowtide.core.errors import ModelError
from lowtide.memory.tracing.python_place import LruCache
from lowtide.memory.tracing.python_places import PythonStatePlaces, is_library

# What holds values only while it runs.
_RUNNING = FrameType, GeneratorType, CellType
# Containers within containers that a tensor may be in.
_DEPTH = 12


class TracedCode:
    """The code of a module while it is traced.

    Attributes:
        places: Where it can keep values.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = PythonStatePlaces(module)
        self._modes: list[weakref.ref[FakeTensorMode]] = []

    def watch(self, mode: FakeTensorMode) -> None:
        """Look for tensors of this mode when the trace has ended."""
        self._modes.append(weakref.ref(mode))

    def left(self) -> list[Any]:
        """Return the tensors of the watched modes that something still holds."""
        gc.collect()  # graphs are full of cycles
        modes = {id(mode) for one in self._modes if (mode := one()) is not None}
        if not modes:
            return []
        return [
            one
            for one in gc.get_objects()
            if issubclass(type(one), FakeTensor) and id(one.fake_mode) in modes
        ]


@contextmanager
def traced_code(module: nn.Module) -> Iterator[TracedCode]:
    """Put back, after a trace of ``module`` inside, all that its code keeps of it.

    What the trace makes has to be out of use by the end.

    Raises:
        ModelError: Something that cannot be put back holds a tensor of the trace.
    """
    code = TracedCode(module)
    frozen = gc.get_freeze_count() == 0
    if frozen:
        gc.freeze()  # so that only what the trace makes is looked through
    try:
        with code.places.kept():
            yield code
    except Exception as error:
        _forget_variables(error)
        raise
    finally:
        left = code.left()
        if frozen:
            gc.unfreeze()
        names = _let_go(left)
    if names:
        raise ModelError(
            f"{type(module).__name__} keeps a tensor of each call in {names[0]}, and tracing it"
            " makes tensors without values",
            hint="keep it in an attribute of the module, or call the module itself",
        )


def _forget_variables(error: BaseException) -> None:
    """Clear the variables of all calls that an error ended."""
    waiting: list[BaseException | None] = [error]
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _let_go(left: list[Any]) -> list[str]:
    """Remove tensors from the Python modules, and the caches of functions, that hold them.

    Return the names of these; what only PyTorch holds stays.
    """
    names, levels = list[str](), [left]
    seen = {id(one) for one in [*left, left, levels]}
    while levels[-1] and len(levels) < _DEPTH:
        holders = list[Any]()
        seen.add(id(holders))
        for holder in gc.get_referrers(*levels[-1]):
            kind = type(holder)
            if id(holder) in seen or kind in _RUNNING or kind.__module__.startswith("torch."):
                continue
            seen.add(id(holder))
            name = _name_of(holder)
            if name is None:
                holders.append(holder)
            elif len(levels) == 1 or not is_library(name):
                _cut(holder, levels)
                names.append(name)
        levels.append(holders)
    return names


def _cut(holder: Any, levels: list[list[Any]]) -> None:
    """Remove what a namespace or cache holds, as near to the tensor as possible."""
    chain = [holder]
    for level in reversed(levels):
        inside = {id(one) for one in level}
        chain.append(next(one for one in gc.get_referents(chain[-1]) if id(one) in inside))
    for inner, outer in pairwise(reversed(chain)):
        if _remove(outer, inner):
            return


def _name_of(holder: Any) -> str | None:
    """Return the name of a Python module, of which this is the namespace, or a cached function."""
    if isinstance(holder, LruCache):
        return f"{holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder:
        return str(holder["__name__"])
    return None


def _remove(container: Any, item: Any) -> bool:
    """Remove an item from what holds it, and return whether that is possible."""
    if isinstance(container, LruCache):
        container.cache_clear()
    elif isinstance(container, dict):
        for key in [key for key, one in container.items() if one is item]:
            if (name := _name_of(container)) is None or is_library(name):
                del container[key]
            else:
                container[key] = None  # as most are before they are made
    elif isinstance(container, list):
        container[:] = [one for one in container if one is not item]
    else:
        return False
    return True
