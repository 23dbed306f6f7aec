"""Attributes that a module sets while it is traced: found, and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide.streaming.module_fingerprint import AttributeKey

_NOTHING = object()
_PLAIN = bool, int, float, str, tuple, list, type(None)


@contextmanager
def restore_attributes(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Restore all attributes of a module and its parts on exit; yield those it changed.

    What is set in a trace has no values.
    """
    parts = list(module.modules())
    tables = [table for one in parts for table in (vars(one), one._buffers)]
    owners = [id(one) for one in parts for _ in range(2)]
    before = [dict(table) for table in tables]
    written = set[AttributeKey]()
    try:
        yield written
    finally:
        for owner, table, was in zip(owners, tables, before, strict=True):
            for name in [*was, *(name for name in table if name not in was)]:
                if name in was and table.get(name, _NOTHING) is was[name]:
                    continue
                written.add((owner, name))
                if name in was:
                    table[name] = was[name]
                else:
                    del table[name]


@contextmanager
def watch_attributes(module: nn.Module) -> Iterator[set[AttributeKey]]:
    """Yield the plain attributes that a module and its parts set, those set as they were too.

    Many remember the size of their last input, which may be of this size already. Only while
    `TRACE_LOCK` is held, since it watches all modules.
    """
    parts = {id(one) for one in module.modules()}
    written = set[AttributeKey]()
    own: Any = nn.Module.__setattr__

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN) and id(self) in parts:
            written.add((id(self), name))
        own(self, name, value)

    nn.Module.__setattr__ = set_attribute
    try:
        yield written
    finally:
        nn.Module.__setattr__ = own
