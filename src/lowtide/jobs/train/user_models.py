"""Load a user's model: a function in a Python file or package, a name, or a model file."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import LowtideError, ModelError, UsageError
from lowtide.core.input_file import expand_home, require_input
from lowtide.memory.training.meta_build import build_on_meta
from lowtide.models import ModelDescriptor, load
from lowtide.models.denoiser.denoiser import set_nominal_level
from lowtide.models.families import network_builders
from lowtide.models.onnx_model import OnnxModel
from lowtide.training.setup import make_generator

if TYPE_CHECKING:
    from torch import nn

# Of generators that are named alone: their inner layers have the same sizes at any scale.
_SCALE = 2


@dataclass(frozen=True)
class UserModel:
    """A module to plan for, its name, and the descriptor of a Lowtide model."""

    module: nn.Module
    name: str
    descriptor: ModelDescriptor | None = None

    def size_multiple(self, default: int) -> int:
        """Return what image sides should be multiples of: ``default`` and the model's own."""
        if self.descriptor is None:
            return default
        return math.lcm(default, self.descriptor.size.multiple_of)


def load_user_model(what: Any) -> UserModel:
    """Return the module that ``what`` is, builds, or names.

    ``what`` is a module, a function that returns one, ``"package.module:function"``,
    ``"path/to/file.py:function"``, what ``network_g.type`` of a training may be (for twice the
    size), a bundled model, or a model file. Denoisers are told a usual level. Python files and
    packages are run, with their folder (for packages the working folder) first in ``sys.path``.
    Functions are called without arguments, on the ``meta`` device if possible.

    Raises:
        UsageError: The place does not exist or needs arguments.
        ModelError: It returns no module or fails.
    """
    from torch import nn

    if isinstance(what, nn.Module):
        return UserModel(what, type(what).__name__)
    if not isinstance(what, str | Path):
        return UserModel(build_on_meta(what), getattr(what, "__name__", repr(what)))
    if str(what) in network_builders("generators"):
        return UserModel(
            build_on_meta(lambda: make_generator({"type": str(what)}, _SCALE, seed=0)), str(what)
        )
    place, colon, name = str(what).rpartition(":")
    if colon and name.isidentifier():
        return _build(str(what), place, name)
    if str(what).endswith(".py"):
        raise UsageError(
            f"{what} names no function", hint=f"add the name of a function: {what}:build_model"
        )
    model = load(what)
    if isinstance(model, OnnxModel):
        raise ModelError(
            f"{what} is an ONNX file, whose weights cannot be trained",
            hint="give the PyTorch weights that it was exported from",
        )
    if model.descriptor.noise is not None:
        set_nominal_level(model.module)
    return UserModel(model.module.requires_grad_(True), str(what), model.descriptor)


def _build(what: str, place: str, name: str) -> UserModel:
    from torch import nn

    path = expand_home(Path(place), UsageError)
    is_file = path.suffix == ".py"
    if is_file:
        require_input(path, UsageError)
    with _first_on_sys_path(path.absolute().parent if is_file else Path.cwd()):
        module = _call_user_code(
            place, _run_file if is_file else _import, path if is_file else place
        )
        factory = getattr(module, name, None)
        if factory is None:
            found = ", ".join(_factories(module)) or "none"
            raise UsageError(f"{place} has no {name!r}", hint=f"functions there: {found}")
        if not isinstance(factory, nn.Module):
            _check_callable(what, factory)
        return UserModel(_call_user_code(what, build_on_meta, factory), what)


def _call_user_code(what: str, run: Any, argument: Any) -> Any:
    """Return ``run(argument)``; errors of the user's code name its place."""
    try:
        return run(argument)
    except LowtideError:
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelError(f"{what} failed: {first}", hint="--debug shows where") from error


def _run_file(path: Path) -> ModuleType:
    name = f"lowtide_given_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up their module by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"there is no Python module {name!r}",
                hint="a file is given as path/to/file.py:function",
            ) from error
        raise


def _check_callable(what: str, factory: Any) -> None:
    if not callable(factory):
        raise ModelError(
            f"{what} is neither a function nor a module, but of type {type(factory).__name__}"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"{what} needs arguments: {error}", hint="name a function that takes none"
        ) from error
    except ValueError:
        return  # written in C, has no signature: the call will show


def _factories(module: ModuleType) -> list[str]:
    """Return the names of functions and classes that the file defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


@contextlib.contextmanager
def _first_on_sys_path(folder: Path) -> Iterator[None]:
    """Put ``folder`` first in ``sys.path``, as Python does for a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
