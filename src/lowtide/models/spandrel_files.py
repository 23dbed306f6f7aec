"""Loader of models by the names of their tensors: of Lowtide's families, or through spandrel.

spandrel recognizes about forty families by the names of their tensors and infers their sizes. Every
use of it, its private names included, is in this file. It is imported
without torchvision, which only two of its families use: that brings its models, and they all of
`torch._dynamo`, two seconds in each run.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.errors import ModelError
from lowtide.models import checkpoints, lowtide_files
from lowtide.models.build_limits import BuildLimitsMode
from lowtide.models.descriptor import ModelDescriptor, Tiling
from lowtide.models.families import ModelFamily, all_families, family_with_tensors
from lowtide.models.model_files import size_rule
from lowtide.models.optimized.replace import replace_modules

if TYPE_CHECKING:
    import spandrel


# What spandrel was seen to raise for tensors that do not fit together. MemoryError is among them
# because a side may be of any size.
_MISFITS = (
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    NameError,
)
_PURPOSES = ("SR", "Restoration")
_KEYS_SHOWN = 6

_Value = TypeVar("_Value")
# Of torch.compile, DataParallel, the generator of a GAN, and Lightning modules.
_PREFIXES = ("_orig_mod.", "module.", "netG.", "net_g.", "generator.", "model.", "net.")
_DEEPEST = 3

# Negative slope of the leaky ReLU in spandrel's SPAN.
_SLOPE = 0.05
_DEFERRED = "torchvision.transforms.functional"
# spandrel's modules that import it, for what they call when they run.
_USERS = ("spandrel.architectures.LaMa.__arch.LaMa", "spandrel.architectures.RestoreFormer")


class SpandrelNetwork(nn.Module):
    """Network with spandrel's call function: extra inputs, a value range, an index."""

    def __init__(self, network: nn.Module, call: Any) -> None:
        super().__init__()
        self.network = network
        self._call = call

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) in 0..1 to (B, C', H * scale, W * scale), unclamped."""
        # Some call functions make their extra input for a batch of one.
        results = [self._call(self.network, single) for single in image.split(1)]
        return results[0] if len(results) == 1 else torch.cat(results)


def load_spandrel(path: Path, name: str, digest: str) -> tuple[nn.Module, ModelDescriptor]:
    """Recognize and build the model in a .pth, .ckpt or .safetensors file, on the CPU.

    Pickles are read as tables of tensors, and nothing in them runs. Prefixes that training programs
    add to names are removed. Raises ModelError for damage, for a file that asks for more, for an
    unknown family, and for a model that does not map one gray or RGB image to another.
    """
    state = _state_dict(path)
    if (family := family_with_tensors(state)) is not None:
        return _load_own(family, path, name, digest, state)
    found = _recognize(path, state)
    _require_image_model(path, found)
    try:
        module = _module(found)
    except (RuntimeError, LookupError) as error:  # such as index tensors out of range
        raise _misfit(path, error) from error
    return module, _describe(path, name, digest, found)


def family_names() -> tuple[str, ...]:
    """Return the names of the recognized families, in alphabetical order."""
    defer_torchvision()
    from spandrel import MAIN_REGISTRY

    known = [entry.architecture.name for entry in MAIN_REGISTRY.architectures()]
    own = [one.name for one in all_families() if one.load is not None]
    return tuple(sorted((*known, *own), key=str.lower))


def _load_own(
    family: ModelFamily, path: Path, name: str, digest: str, state: dict[str, Tensor]
) -> tuple[nn.Module, ModelDescriptor]:
    assert family.load is not None
    try:
        with BuildLimitsMode(state.values()):
            return family.load(path, name, digest, state)
    except _MISFITS as error:
        raise _misfit(path, error, family.name) from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    """Read a file's state_dict, with prefixes removed if a family then matches."""
    defer_torchvision()
    from spandrel import MAIN_REGISTRY

    stored = path.suffix.lower() == ".safetensors"
    state = lowtide_files.read_tensors(path) if stored else checkpoints.read_state_dict(path)

    registered = MAIN_REGISTRY.architectures("detection")

    def known(names: dict[str, Tensor]) -> bool:
        return family_with_tensors(names) is not None or any(
            one.detect(names) for one in registered
        )

    try:
        return strip_prefixes(state, known) or state
    except _MISFITS as error:
        raise _misfit(path, error) from error


def _recognize(path: Path, state: dict[str, Tensor]) -> spandrel.ModelDescriptor:
    from spandrel import ModelLoader, UnsupportedModelError

    keys = sorted(state)
    try:
        # The CPU first: a model that does not fit the job should not reach the device.
        with BuildLimitsMode(value for value in state.values() if isinstance(value, Tensor)):
            return ModelLoader(device="cpu").load_from_state_dict(state)
    except UnsupportedModelError as error:
        shown = ", ".join(keys[:_KEYS_SHOWN])
        raise ModelError(
            f"{path} has a model of no known family; its {len(keys)} tensors start with {shown}",
            hint=f"known families are {', '.join(family_names())}",
        ) from error
    except _MISFITS as error:
        raise _misfit(path, error) from error


def _misfit(path: Path, error: Exception, family: str = "a known family") -> ModelError:
    return ModelError(
        f"{path} looks like {family}, but its tensors do not fit together: {_first_line(error)}"
    )


def _require_image_model(path: Path, found: spandrel.ModelDescriptor) -> None:
    family = found.architecture.name
    if found.purpose not in _PURPOSES:
        raise ModelError(
            f"{path} ({family}) is a model for {found.purpose}, not for whole images",
            hint="use a super-resolution or restoration model",
        )
    channels = (found.input_channels, found.output_channels)
    if not set(channels) <= {1, 3}:
        raise ModelError(
            f"{path} ({family}) takes {channels[0]} channels and returns {channels[1]}; "
            f"Lowtide runs grayscale (1) and RGB (3)"
        )


def _module(found: spandrel.ModelDescriptor) -> nn.Module:
    # spandrel's default call function is in the module of its base class, and adds nothing.
    call = found._call_fn
    plain = call.__module__ == type(found).__module__
    model = fold_convs(found.model.eval())
    replace_modules(model)
    return model if plain else SpandrelNetwork(model, call)


def _describe(
    path: Path, name: str, digest: str, found: spandrel.ModelDescriptor
) -> ModelDescriptor:
    asks = found.size_requirements
    sides = {"minimum": asks.minimum, "multiple_of": asks.multiple_of, "square": asks.square}
    tiling: dict[str, Tiling] = {
        "SUPPORTED": "supported",
        "DISCOURAGED": "discouraged",
        "INTERNAL": "internal",
    }
    return ModelDescriptor(
        name=name,
        architecture=str(found.architecture.id),
        purpose=found.purpose,
        scale=found.scale,
        in_channels=found.input_channels,
        out_channels=found.output_channels,
        size=size_rule(f"{path} ({found.architecture.name})", sides),
        supports_half=found.supports_half,
        supports_bfloat16=found.supports_bfloat16,
        tiling=tiling[found.tiling.name],
        tags=tuple(found.tags),
        sha256=digest,
        path=str(path),
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def strip_prefixes(
    state: Mapping[str, _Value], accepts: Callable[[dict[str, _Value]], bool]
) -> dict[str, _Value] | None:
    """Remove as few prefixes as possible so that ``accepts`` accepts the state_dict.

    Tensors without the prefix (a loss's, a discriminator's) are left out. Returns None where
    ``accepts`` accepts it under no prefix.
    """
    # A compiled submodule has its prefix inside the key.
    waiting = [({key.replace("._orig_mod.", "."): value for key, value in state.items()}, 0)]
    for one, depth in waiting:
        if accepts(one):
            return one
        for prefix in _PREFIXES if depth < _DEEPEST else ():
            part = {
                key.removeprefix(prefix): value
                for key, value in one.items()
                if key.startswith(prefix)
            }
            if part:
                waiting.append((part, depth + 1))
    return None


class FoldedConv(nn.Module):
    """Folded convolution with an optional leaky ReLU."""

    def __init__(self, conv: nn.Conv2d, slope: float | None) -> None:
        super().__init__()
        self.conv = conv
        self._slope = slope

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        result = self.conv(image)
        return result if self._slope is None else F.leaky_relu(result, self._slope)


@torch.no_grad()
def fold_convs(module: nn.Module) -> nn.Module:
    """Replace reparameterized layers (SPAN's Conv3XC) by their folded convolution.

    In eval mode such a layer folds its convolutions in every call, and writes the result to itself.
    Results in fp32 are bit-identical; in lower precision they are those of weights that were folded
    in fp32. Returns ``module``, changed in place.
    """
    for name, child in module.named_children():
        one = getattr(child, "eval_conv", None)
        update = getattr(child, "update_params", None)
        if isinstance(one, nn.Conv2d) and callable(update):
            update()
            slope = _SLOPE if getattr(child, "has_relu", False) else None
            setattr(module, name, FoldedConv(one, slope))
        else:
            fold_convs(child)
    return module


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
