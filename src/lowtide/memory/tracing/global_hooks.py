"""Hooks that PyTorch calls for all modules: in a trace of a model for its modules only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Wrappers that a model is traced in are no modules of its own.
_WRAPPERS = "lowtide.streaming.", "lowtide.integrations."


def global_hooks() -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of hooks before and after the forward of all modules."""
    home: Any = nn.modules.module
    return [home._global_forward_pre_hooks, home._global_forward_hooks]


@contextmanager
def hooks_for_parts_only(module: nn.Module) -> Iterator[None]:
    """Call hooks of all modules for a module and its parts alone, in this thread."""
    thread = threading.get_ident()
    # By their attributes, which PyTorch's proxy of a module shares.
    parts = {
        id(vars(one)) for one in module.modules() if not type(one).__module__.startswith(_WRAPPERS)
    }

    def only(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(called: nn.Module, *given: Any) -> Any:
            here = threading.get_ident() == thread
            return None if here and id(vars(called)) not in parts else hook(called, *given)

        return call

    tables = global_hooks()
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({key: only(hook) for key, hook in table.items()})
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)
