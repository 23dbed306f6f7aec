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
from lowtide.memory.tracing.python_places import PythonPlaces, is_library

# What holds values only while it runs.
_RUNNING = FrameType, GeneratorType, CellType
_MOST_HOLDERS = 10_000


class TracedCode:
    """The code of a module while it is traced.

    Attributes:
        places: Where it can keep values.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places = PythonPlaces(module)
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
        names = [name for one in left if (name := _let_go(one, left))]
    if names:
        raise ModelError(
            f"{type(module).__name__} keeps a tensor of each call in {names[0]}, and tracing it"
            " makes tensors without values",
            hint="keep it in an attribute of the module, or call the module itself",
        )


def _forget_variables(error: BaseException | None) -> None:
    """Clear the variables of all calls that an error ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _let_go(value: Any, others: list[Any]) -> str | None:
    """Remove a tensor from the Python module, or the cache of a function, that holds it.

    Return the name of that, or None where only PyTorch holds the tensor.
    """
    # Holders, and the place in the same list of what each holds.
    found, held = [value], [0]
    seen = {id(value), id(found), id(others)}
    for place, item in enumerate(found):  # which grows meanwhile
        for holder in gc.get_referrers(item):
            kind = type(holder)
            if id(holder) in seen or kind in _RUNNING or kind.__module__.startswith("torch."):
                continue
            seen.add(id(holder))
            found.append(holder)
            held.append(place)
            if (name := _name_of(holder)) is None or is_library(name):
                continue
            chain = [len(found) - 1]
            while chain[-1]:
                chain.append(held[chain[-1]])
            # what is nearest to the tensor
            for inner, outer in pairwise(reversed(chain)):
                if _remove(found[outer], found[inner]):
                    return name
        if len(found) > _MOST_HOLDERS:
            break
    return None


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
            if _name_of(container) is None:
                del container[key]
            else:
                container[key] = None  # as most are before they are made
    elif isinstance(container, list):
        container[:] = [one for one in container if one is not item]
    else:
        return False
    return True
