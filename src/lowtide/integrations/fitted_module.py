"""Fitted modules: their class is replaced by a streamed subclass.

An image autoencoder's parts run by their ``forward``, in bands or as they are if that fits, a video
autoencoder in bands by its ``_encode`` and ``_decode``. Calls in fp16 whose values exceed its range
are made again in fp32.

`torch.nn.utils.parametrize` and FSDP replace the class too. A function assigned to a part's
``forward`` would be bound to that part: copies and replicas, which copy its attributes, would
compute with the weights of the original. A method of the class gets the right instance.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.core.errors import BudgetError, UsageError
from lowtide.integrations.part_calls import (
    BudgetedPartCaller,
    require_eval_mode,
    require_not_traced,
    require_runnable_state,
)
from lowtide.integrations.video_autoencoders.clip_part import ClipPartStream
from lowtide.integrations.video_autoencoders.families import VideoAutoencoderFamily, family_of
from lowtide.memory.budget import Budget
from lowtide.streaming.api import Streamed
from lowtide.streaming.engine.placement import PagePlacement

# Attribute of a part: its settings.
_SETTINGS_ATTRIBUTE = "_lowtide_fitting"

# Runs the module, or a copy of it, on its input.
Run = Callable[[Any, Tensor], Any]


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fitted part: see `lowtide.stream`.

    ``parts`` names those of a video autoencoder that are fitted.
    """

    budget: str | int | Budget
    pages: PagePlacement
    scratch: Path | None
    parts: tuple[str, ...] = ()


class _UnfittedModule(nn.Module):
    """A module with its class's own forward, bypassing any replaced or hooked forward.

    Submodules keep their names.
    """

    _module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[shared] = vars(module)[shared]
        vars(self)["_module"] = module
        self.training = False

    def forward(self, image: Tensor) -> Any:
        """Map (B, C, H, W) to (B, C', H', W')."""
        return type(self._module).forward(self._module, image)


class _Fitted:
    """Mixin that precedes the original class among the bases of a fitted part's class."""

    unfitted: ClassVar[type[nn.Module]]
    bare: ClassVar[type[_UnfittedModule]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by re-creating the class, which has no importable name."""
        state = self.__getstate__()  # pyright: ignore[reportCallIssue]
        return _blank, (self.unfitted,), state


# The streams of each part by what they run: "forward", or part of a video autoencoder. Kept outside
# of the parts, so that copies get their own, and without a reference back to the part, so that it
# is freed with its last user.
_streams: WeakKeyDictionary[nn.Module, dict[str, BudgetedPartCaller | ClipPartStream]] = (
    WeakKeyDictionary()
)
# The autoencoder of each part whose tiling `fit` has switched off.
_owners: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()
# Calls of a part run one at a time: while one is traced, its weights are replaced.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def is_fitted(module: nn.Module) -> bool:
    """Return whether `fit_part` was applied to the module or to its original."""
    return isinstance(module, _Fitted)


def fit_part(part: nn.Module, settings: FitSettings, untiled: nn.Module | None = None) -> None:
    """Make ``part`` run in bands from now on; calls warn if ``untiled`` is tiled after all."""
    streams = _streamed(part, settings)
    part.__class__ = _fitted_class(type(part))
    # When accelerate removes a hook, it leaves the class's method on the instance.
    vars(part).pop("forward", None)
    vars(part)[_SETTINGS_ATTRIBUTE] = settings
    _streams[part] = streams
    if untiled is not None:
        _owners[part] = ref(untiled)


def unfit_part(part: nn.Module) -> None:
    """Restore the original class of ``part``, which undoes `fit_part`."""
    assert isinstance(part, _Fitted)
    if type(part) is not _fitted_class(part.unfitted):
        raise UsageError(
            f"the class of this {part.unfitted.__name__} was replaced again after it was fitted,"
            f" by {type(part).__module__}.{type(part).__qualname__}",
            hint="undo that first",
        )
    part.__class__ = part.unfitted  # pyright: ignore[reportAttributeAccessIssue]
    del vars(part)[_SETTINGS_ATTRIBUTE]
    _streams.pop(part, None)
    _owners.pop(part, None)


def is_own_forward(part: nn.Module, forward: object) -> bool:
    """Return whether ``forward`` is the class's own method, bound to the part."""
    own = (type(part).forward, _fitted_class(type(part)).forward)
    return isinstance(forward, MethodType) and forward.__self__ is part and forward.__func__ in own


def _blank(unfitted: type[nn.Module]) -> nn.Module:
    made = _fitted_class(unfitted)
    return made.__new__(made)


@functools.cache
def _fitted_class(unfitted: type[nn.Module]) -> Any:
    """Return the streamed subclass of ``unfitted``, under the same name."""
    run: Any = torch.compiler.disable(
        _run, reason="it is fitted by lowtide, which captures its graph itself"
    )

    @functools.wraps(unfitted.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_fitted(self):
            # A hook added after `fit` and still there after `unfit` calls the forward that it
            # stored.
            return type(self).forward(self, *args, **kwargs)
        return run(self, args, kwargs)

    body: dict[str, Any] = {"forward": forward}
    if family_of(unfitted):
        body = {"_encode": _encode_clip, "_decode": _decode_clip}
    body["unfitted"] = unfitted
    body["bare"] = type(unfitted.__name__, (_UnfittedModule,), {})
    for name in ("__doc__", "__module__", "__qualname__"):
        body[name] = getattr(unfitted, name)
    return type(unfitted.__name__, (_Fitted, unfitted), body)


def _run(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    title = f"this {part.unfitted.__name__}"
    image = _only_tensor(title, part, args, kwargs)
    require_not_traced(title, image)
    _warn_of_tiles(part)
    with _lock_of(part):
        require_eval_mode(title, part)
        require_runnable_state(title, part)
        return run_without_overflow(
            title, part, image, lambda one, given: _streams_of(one)["forward"](given)
        )


def _warn_of_tiles(part: nn.Module) -> None:
    owner = _owners[part]() if part in _owners else None
    if getattr(owner, "use_tiling", False):
        warnings.warn(
            f"this {type(owner).__name__} runs large images in tiles, which change the result:"
            " enable_tiling() was called after lowtide.fit; disable_tiling() gives the result of"
            " the whole image, within the budget too",
            stacklevel=2,
        )


@torch.compiler.disable(reason="it is fitted by lowtide, which captures its graph itself")
def _encode_clip(autoencoder: Any, x: Tensor) -> Tensor:
    """Return the parameters of the posterior of frames (B, C, T, H, W), in bands."""
    if "encoder" not in _streams_of(autoencoder):
        return autoencoder.unfitted._encode(autoencoder, x)
    return _run_clip(autoencoder, "encoder", x)


@torch.compiler.disable(reason="it is fitted by lowtide, which captures its graph itself")
def _decode_clip(autoencoder: Any, z: Tensor, return_dict: bool = True) -> Any:
    """Decode latents (B, C, T, H, W) in bands."""
    if "decoder" not in _streams_of(autoencoder):
        return autoencoder.unfitted._decode(autoencoder, z, return_dict=return_dict)
    frames = _run_clip(autoencoder, "decoder", z)
    if not return_dict:
        return (frames,)
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=frames)


def _run_clip(autoencoder: Any, part: str, clip: Tensor) -> Tensor:
    """Run a part of a video autoencoder; its caches stay empty."""
    family, kind = _family(autoencoder), autoencoder.unfitted.__name__
    title = f"the {part} of this {kind}"
    require_not_traced(title, clip)
    with _lock_of(autoencoder):
        for name, network in family.networks(autoencoder, part).items():
            require_eval_mode(f"the {name} of this {kind}", network)
            require_runnable_state(f"the {name} of this {kind}", network)
        family.clear_caches(autoencoder)  # a call that raised leaves some
        return run_without_overflow(
            title, autoencoder, clip, lambda one, given: _streams_of(one)[part](given)
        )


def _family(autoencoder: Any) -> VideoAutoencoderFamily:
    family = family_of(autoencoder.unfitted)
    assert family is not None
    return family


def _streams_of(module: Any) -> dict[str, BudgetedPartCaller | ClipPartStream]:
    """Return the streams of a fitted module, made anew for a copy."""
    if (found := _streams.get(module)) is None:
        found = _streams.setdefault(module, _streamed(module, vars(module)[_SETTINGS_ATTRIBUTE]))
    return found


def _lock_of(module: nn.Module) -> threading.RLock:
    return _locks.setdefault(module, threading.RLock())


def _only_tensor(title: str, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the image of a call; all other arguments must have their defaults."""
    signature = inspect.signature(part.unfitted.forward)
    (_, image, *more) = signature.bind(part, *args, **kwargs).arguments.items()
    for name, value in more:
        if value is not None and value is not signature.parameters[name].default:
            raise UsageError(
                f"{title} is fitted and takes a single tensor, not {name}",
                hint="lowtide.unfit(module) for such calls",
            )
    return image[1]


def _streamed(
    part: nn.Module, settings: FitSettings
) -> dict[str, BudgetedPartCaller | ClipPartStream]:
    """Stream a twin of the original class that shares all attributes of the part.

    Of a video autoencoder, stream its parts.
    """
    unfitted = getattr(type(part), "unfitted", type(part))
    keywords = {
        "budget": settings.budget,
        "pages": settings.pages,
        "scratch": settings.scratch,
    }
    if family := family_of(unfitted):
        make = {"encoder": family.encoder, "decoder": family.decoder}
        return {name: make[name](part).stream(**keywords) for name in settings.parts}
    twin = object.__new__(unfitted)
    object.__setattr__(twin, "__dict__", vars(part))
    stream = Streamed(_fitted_class(unfitted).bare(twin), **keywords)
    return {"forward": BudgetedPartCaller(twin, stream, always_bands=settings.pages != "auto")}


def run_without_overflow(title: str, module: nn.Module, given: Tensor, run: Run) -> Any:
    """Return the result of a module; where fp16 overflows, that of a copy in fp32.

    Where fp32 does not fit the budget, the copy is in bf16. The result has the dtype of the first
    one, and a warning says what was done. The copy is freed again.

    Args:
        title: Name of the module in the warning.
        module: The fitted module.
        given: Its input (B, C, ...).
        run: Called with the module and its input.

    Raises:
        BudgetError: The copy does not fit in bf16 either.
    """
    made = run(module, given)
    if not _exceeds_fp16(given, _tensors(made)):
        return made
    dtypes = {one.dtype for one in _tensors(made)}
    del made
    wide = copy.deepcopy(module).float()
    with torch.autocast(given.device.type, enabled=False):
        try:
            made, name = run(wide, given.float()), "float32"
        except BudgetError:
            made, name = run(wide.bfloat16(), given.bfloat16()), "bfloat16"
    warnings.warn(
        f"values of {title} exceed the range of float16: the call was made again in {name}, which"
        " takes its weights once more; module.to(torch.float32) or bfloat16 saves the first one",
        stacklevel=2,
    )
    (dtype,) = dtypes
    return tree_map_only(Tensor, lambda one: one.to(dtype), made)


def _exceeds_fp16(given: Tensor, made: Iterable[Tensor]) -> bool:
    """Return whether results in fp16 have NaN or infinity, and the input is finite."""
    return any(one.dtype == torch.float16 and not _is_finite(one) for one in made) and _is_finite(
        given
    )


def _is_finite(tensor: Tensor) -> bool:
    # image by image and frame by frame, since the mask is half as large as what it is of
    return all(
        bool(frame.isfinite().all())
        for one in tensor.unbind(0)
        for frame in (one.unbind(1) if one.dim() > 3 else (one,))
    )


def _tensors(result: Any) -> list[Tensor]:
    return [one for one in tree_leaves(result) if isinstance(one, Tensor)]
