"""Models: descriptors, loading, and the bundled ones.

`load` returns a `Model`; its `ModelDescriptor` holds the facts that the planner needs.
`bundled_names` and `describe_bundled` list the bundled models without importing PyTorch, and so
does importing this package. `register_family` adds a family of models of your own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.models.bundled import bundled_names, describe_bundled
    from lowtide.models.descriptor import ModelDescriptor, SizeRule
    from lowtide.models.families import Architecture, FileConfig, ModelFamily, register_family
    from lowtide.models.loaded_model import Model
    from lowtide.models.loader import load

__all__ = [
    "Architecture",
    "FileConfig",
    "Model",
    "ModelDescriptor",
    "ModelFamily",
    "SizeRule",
    "bundled_names",
    "describe_bundled",
    "load",
    "register_family",
]

_HOMES = {
    "Architecture": "families",
    "FileConfig": "families",
    "Model": "loaded_model",
    "ModelDescriptor": "descriptor",
    "ModelFamily": "families",
    "SizeRule": "descriptor",
    "describe_bundled": "bundled",
    "load": "loader",
    "bundled_names": "bundled",
    "register_family": "families",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
