"""Checks that a fitted part can run in bands, at `fit` and at each call.

Refused are hooks that move or cast weights, compiled modules, weights on the meta device, and calls
that trace or train.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lowtide.core.errors import ModelError, UsageError

GROUP_OFFLOAD_HINT = (
    "load it again, without them: group offloading of the other modules, such as"
    " pipe.transformer.enable_group_offload(), works with lowtide.fit"
)


def check_state(title: str, part: nn.Module) -> None:
    """Raise `UsageError` for module state that bands cannot run with.

    Checked at `fit` and at each call; ``title`` names the part in the message.
    """
    for path, inner in part.named_modules():
        if path and (hooks := ", ".join(hooks_of(inner))):
            raise UsageError(
                f"{title} has hooks of {hooks} on {path}, which move or cast its weights while it"
                " runs; bands read weights at rest",
                hint=_without(hooks),
            )
        if path and is_compiled(inner):
            raise UsageError(
                f"{path} of {title} is compiled, and its graph cannot be captured to run in bands",
                hint="load it again and compile it as a whole, after lowtide.fit",
            )
    for name, tensor in _tensors(part):
        if tensor.is_meta:
            raise UsageError(
                f"{name} of {title} is on the meta device: it has no data",
                hint="load its weights first",
            )


def check_not_traced(title: str, image: Tensor) -> None:
    """Raise `ModelError` if the call is being traced or exported.

    ``image`` is the first tensor of the call, of any shape: a fake one means tracing.
    """
    # Both are of this call: `torch.compiler.is_exporting` is of the process, in which another
    # thread may be capturing a part at the same time.
    if is_fake(image) or torch._C._get_tracing_state() is not None:
        raise ModelError(
            f"{title} is fitted: it runs in bands and cannot be traced or exported",
            hint="lowtide.unfit(module) first",
        )


def check_eval_mode(title: str, part: nn.Module) -> None:
    """Raise `UsageError` in training mode: bands have no backward pass."""
    for path, inner in part.named_modules():
        if inner.training:
            raise UsageError(
                f"{title} is fitted for inference only, but {path or 'it'} is in training mode",
                hint="module.eval() for inference; lowtide.unfit(module) to train it",
            )


def hooks_of(module: nn.Module) -> Iterator[str]:
    """Yield the owners of hooks around a module's forward: accelerate, diffusers.

    With the names of the hooks.
    """
    own = vars(module)
    if "_hf_hook" in own:
        yield f"accelerate ({type(own['_hf_hook']).__name__})"
    # A registry stays when its hooks are removed.
    if hooks := getattr(own.get("_diffusers_hook"), "hooks", None):
        yield f"diffusers ({', '.join(hooks)})"


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` or ``module.compile()`` was applied."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _without(hooks: str) -> str:
    if "layerwise_casting" in hooks:
        return "load it again, without enable_layerwise_casting(): casting cannot be undone"
    if "accelerate" in hooks:
        return (
            "accelerate.hooks.remove_hook_from_module(vae, recurse=True); model offload"
            " (pipe.enable_model_cpu_offload()) moves it as a whole and works with lowtide.fit"
        )
    return GROUP_OFFLOAD_HINT if "group_offloading" in hooks else "load it again, without them"


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()
