"""Attributes that a module reads and sets while it runs.

Only while `TRACE_LOCK` is held, since both functions watch all modules of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide.memory.tracing.python_place import AttributeKey

_WATCHED = bool, int, float, str, tuple, list, type(None)


@contextmanager
def watch_writes(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Yield the plain attributes that a module and its parts set, those set as they were too.

    Many remember the size of their last input, which may be of this size already.
    """
    parts = {id(one) for one in module.modules()}
    written = set[AttributeKey]()
    own: Any = nn.Module.__setattr__

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, _WATCHED) and id(self) in parts:
            written.add((id(self), name))
        own(self, name, value)

    nn.Module.__setattr__ = set_attribute
    try:
        yield written
    finally:
        nn.Module.__setattr__ = own


@contextmanager
def watch_first_reads(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Yield the attributes that a module and its parts read before they set them."""
    parts = {id(one) for one in module.modules()}
    written, read = set[AttributeKey](), set[AttributeKey]()
    own: Any = nn.Module.__setattr__
    get: Any = nn.Module.__getattribute__
    inherited = "__getattribute__" not in vars(nn.Module)

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        written.add((id(self), name))
        own(self, name, value)

    def get_attribute(self: nn.Module, name: str) -> Any:
        key = id(self), name
        if key not in written and key[0] in parts:
            read.add(key)
        return get(self, name)

    nn.Module.__setattr__ = set_attribute
    nn.Module.__getattribute__ = get_attribute
    try:
        yield read
    finally:
        nn.Module.__setattr__, nn.Module.__getattribute__ = own, get
        if inherited:
            del nn.Module.__getattribute__
