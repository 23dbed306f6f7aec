"""Models: descriptors, loading, and the bundled ones.

`load` returns a `Model`; its `ModelDescriptor` holds the facts that the planner needs. `names` and
`describe` list the bundled models without importing PyTorch, and so does importing this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.models.bundled import describe, names
    from lowtide.models.descriptor import ModelDescriptor, SizeRule
    from lowtide.models.loaded_model import Model
    from lowtide.models.loader import load

__all__ = ["Model", "ModelDescriptor", "SizeRule", "describe", "load", "names"]

_HOMES = {
    "Model": "loaded_model",
    "ModelDescriptor": "descriptor",
    "SizeRule": "descriptor",
    "describe": "bundled",
    "load": "loader",
    "names": "bundled",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
