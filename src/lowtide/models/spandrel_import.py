"""Import of spandrel without torchvision, which only two of its families use.

torchvision brings its models, and they all of `torch._dynamo`: two seconds in each run.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

_DEFERRED = "torchvision.transforms.functional"
# spandrel's modules that import it, for what they call when they run.
_USERS = ("spandrel.architectures.LaMa.__arch.LaMa", "spandrel.architectures.RestoreFormer")


def defer_torchvision() -> None:
    """Let spandrel, where it is imported from now on, import torchvision at its first use.

    Other modules import torchvision as ever, and nothing stands in for it in ``sys.modules``. May
    be called any number of times, from any thread.
    """
    if "spandrel" in sys.modules or any(isinstance(one, _SpandrelFinder) for one in sys.meta_path):
        return
    # It stays there: removed, it would make another thread's search skip the finder after it.
    sys.meta_path.insert(0, _SpandrelFinder())


class _SpandrelFinder:
    """Finds the two modules where they are, and has them loaded by `_SpandrelLoader`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the two modules, and None for any other."""
        if name not in _USERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _SpandrelLoader(spec.loader.name, spec.loader.path)
        return spec


class _SpandrelLoader(SourceFileLoader):
    """Runs a module with an ``import`` statement of its own, which defers torchvision."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    if name == _DEFERRED and fromlist and name not in sys.modules:
        return SimpleNamespace(**{one: _Deferred(one) for one in fromlist})
    return builtins.__import__(name, globals, locals, fromlist or (), level)


class _Deferred:
    """A function or class of torchvision, which is imported when it is called or looked into."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._real()(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what inspection and copying ask for is not torchvision's
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        return getattr(importlib.import_module(_DEFERRED), self._name)
