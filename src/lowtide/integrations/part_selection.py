"""Selection and checks of an autoencoder's parts that can run in bands.

A part must map one image to one image.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextvars import copy_context

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lowtide.core.errors import UsageError
from lowtide.integrations.fitted_module import is_fitted, is_own_forward
from lowtide.integrations.part_calls import (
    GROUP_OFFLOAD_HINT,
    hook_owners,
    is_compiled,
    require_runnable_state,
)
from lowtide.integrations.video_autoencoders.families import VideoAutoencoderFamily
from lowtide.memory.tracing.traced_code import traced_code

PARTS = ("encoder", "decoder")
# Sides of the trial image: enough for autoencoders that downsample by 128. An image with real
# storage takes memory, and is smaller.
_FAKE_SIDE, _REAL_SIDE = 128, 32


def parts_to_fit(autoencoder: nn.Module, requested: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the parts to fit, by name: those ``requested``, or all.

    Raises `UsageError` where there is none, where a requested one is missing, and where the
    autoencoder computes with more than its parts although none were named.
    """
    kind = type(autoencoder).__name__
    if unknown := set(requested or ()) - set(PARTS):
        raise UsageError(f"unknown parts {sorted(unknown)}", hint=" or ".join(PARTS))
    found = {
        name: part
        for name in requested or PARTS
        if isinstance(part := getattr(autoencoder, name, None), nn.Module)
    }
    if not found or len(found) < len(set(requested or ())):
        missing = " or ".join(name for name in requested or PARTS if name not in found)
        inside = [
            name for name, child in autoencoder.named_children() if looks_like_autoencoder(child)
        ]
        raise UsageError(
            f"{kind} has no {missing} to stream",
            hint=" or ".join(f"pass its .{name}" for name in inside) or None,
        )
    if not requested and (others := list(_other_networks(autoencoder))):
        raise UsageError(
            f"{kind} computes with {', '.join(others)} too, which is no encoder or decoder that"
            " could be streamed",
            hint=f"lowtide.fit(module, parts={tuple(found)!r}) leaves the rest as it is",
        )
    return found


def looks_like_autoencoder(module: object) -> bool:
    """Return whether an object looks like an autoencoder."""
    return all(hasattr(module, name) for name in PARTS)


def require_fittable_part(title: str, part: nn.Module) -> None:
    """Raise `UsageError` with the reason if ``part`` cannot be fitted.

    ``title`` names the part in the message.
    """
    _check_unmodified(title, part)
    require_runnable_state(title, part)
    _check_signature(title, part)
    for path, inner in part.named_modules():
        if isinstance(inner, (nn.Conv3d, nn.ConvTranspose3d)):
            raise UsageError(
                f"{title} is of frames: its {path} is {type(inner).__name__}, and only parts that"
                " take (B, C, H, W) can be fitted"
            )
    _try(title, part)


def require_fittable_video_autoencoder(
    autoencoder: nn.Module, family: VideoAutoencoderFamily, parts: Sequence[str]
) -> None:
    """Raise `UsageError` with the reason if a video autoencoder cannot be fitted."""
    kind = type(autoencoder).__name__
    if is_fitted(autoencoder):
        raise UsageError(f"this {kind} is fitted already", hint="lowtide.unfit(module) first")
    for name in ("_encode", "_decode"):
        if name in vars(autoencoder):
            raise UsageError(
                f"the {name} of this {kind} is replaced, which bands would bypass",
                hint=f"del its {name}, or set it after lowtide.fit",
            )
    family.check(autoencoder)
    for part in parts:
        for name, network in family.networks(autoencoder, part).items():
            title = f"the {name} of this {kind}"
            _check_unmodified(title, network)
            require_runnable_state(title, network)


def _other_networks(autoencoder: nn.Module) -> Iterator[str]:
    """Yield other submodules that are networks with spatial kernels.

    More than a single layer.
    """
    for name, child in autoencoder.named_children():
        if name not in PARTS and any(
            isinstance(inner, nn.Conv2d) and inner is not child and max(inner.kernel_size) > 1
            for inner in child.modules()
        ):
            yield name


def _check_unmodified(title: str, part: nn.Module) -> None:
    if is_fitted(part):
        raise UsageError(f"{title} is fitted already", hint="lowtide.unfit(module) first")
    if is_compiled(part):
        raise UsageError(
            f"{title} is compiled, and its graph cannot be captured to run in bands",
            hint="compile the autoencoder or its parts after lowtide.fit, which works",
        )
    if hooks := ", ".join(hook_owners(part)):
        raise UsageError(
            f"{title} has hooks of {hooks} around its forward, which bands would bypass",
            hint=(
                GROUP_OFFLOAD_HINT
                if "group_offloading" in hooks
                else "remove them, or add them after lowtide.fit"
            ),
        )
    forward = vars(part).get("forward")
    if forward is not None and not is_own_forward(part, forward):
        raise UsageError(
            f"the forward of {title} is replaced by {getattr(forward, '__name__', forward)}, which"
            " bands would bypass",
            hint="del its forward, or set it after lowtide.fit",
        )


def _check_signature(title: str, part: nn.Module) -> None:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = list(inspect.signature(type(part).forward).parameters.values())[1:]
    required = [
        one.name
        for one in taken
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(required) != 1 or taken[0].name != required[0] or taken[0].kind not in positional:
        names = ", ".join(required or [one.name for one in taken])
        raise UsageError(
            f"{title} takes {names or 'no arguments'}, but running in bands needs exactly one image"
        )


def _try(title: str, part: nn.Module) -> None:
    """Run ``part`` on a fake image, and check its result and the submodules called."""
    channels = _channels(part)
    if not channels:
        raise UsageError(f"{title} has no two-dimensional convolution: it does not process images")
    refusals: list[Exception] = []
    for count in channels:
        try:
            shapes, entered = _run_watched(part, count)
        except Exception as error:  # noqa: BLE001  (any error that third-party code raises)
            refusals.append(error)
        else:
            _check_result(title, shapes)
            _check_called(title, part, entered)
            return
    reason = str(refusals[0]).strip().splitlines() or [type(refusals[0]).__name__]
    raise UsageError(f"{title} could not be run on a single image: {reason[0]}")


def _channels(part: nn.Module) -> list[int]:
    """Return candidate input channels, from the convolutions in order."""
    found = (inner.in_channels for inner in part.modules() if isinstance(inner, nn.Conv2d))
    return list(dict.fromkeys(found))


def _run_watched(part: nn.Module, channels: int) -> tuple[list[torch.Size], set[nn.Module]]:
    """Return the shapes of the results for a trial image, and the submodules called."""
    called: set[nn.Module] = set()
    hooks = [
        inner.register_forward_pre_hook(lambda module, _: called.add(module))
        for inner in part.modules()
    ]
    try:
        return _result_shapes(part, channels), called
    finally:
        for hook in hooks:
            hook.remove()


def _result_shapes(part: nn.Module, channels: int) -> list[torch.Size]:
    weight = next(part.parameters())
    like = {"device": weight.device, "dtype": weight.dtype}
    with torch.no_grad():
        try:
            with traced_code(part) as code, FakeTensorMode(allow_non_fake_inputs=True) as mode:
                code.watch(mode)
                shape = 1, channels, _FAKE_SIDE, _FAKE_SIDE
                return _forward_shapes(part, torch.empty(shape, **like))
        except Exception:  # noqa: BLE001  (it may read values, which a real image has)
            with traced_code(part):
                shape = 1, channels, _REAL_SIDE, _REAL_SIDE
                return _forward_shapes(part, torch.zeros(shape, **like))


def _forward_shapes(part: nn.Module, image: Tensor) -> list[torch.Size]:
    # in a copy of the context variables, which are put back so
    result = copy_context().run(type(part).forward, part, image)
    return [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _check_result(title: str, shapes: list[torch.Size]) -> None:
    if len(shapes) != 1 or len(shapes[0]) != 4:
        found = ", ".join("×".join(map(str, one)) for one in shapes)
        raise UsageError(
            f"{title} does not map one image to one image: it returns {found or 'no tensor'}"
        )


def _check_called(title: str, part: nn.Module, called: set[nn.Module]) -> None:
    for name, child in part.named_children():
        has_parameters = next(child.parameters(), None) is not None
        if has_parameters and not any(inner in called for inner in child.modules()):
            more = list(inspect.signature(type(part).forward).parameters)[2:]
            raise UsageError(
                f"{title} has a {name}, which it uses with inputs other than one image"
                f" ({', '.join(more) or 'of its own'})"
            )
