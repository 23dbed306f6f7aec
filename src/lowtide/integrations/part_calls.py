"""Calls of a fitted image part: as they are where they fit the budget, else in bands.

`fit` refuses hooks that move or cast weights, compiled modules and weights on the meta device, and
each call refuses to trace or train.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lowtide.core.errors import ModelError, UsageError
from lowtide.core.trace_cache import TRACE_LOCK
from lowtide.memory.plan_store import JsonCacheTable, machine_facts
from lowtide.memory.prediction.calibration import shipped_calibration
from lowtide.memory.prediction.cpu import CpuWorkspaceMeter, peak_within
from lowtide.memory.prediction.estimate import trace_step, traced_estimate
from lowtide.memory.profiles import local_profile
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.streaming.api import Streamed, reject_gradients
from lowtide.streaming.capture.autocast_state import AutocastState
from lowtide.streaming.module_fingerprint import ModuleFingerprint
from lowtide.streaming.prepared_stream import available_bytes

# Rows of an estimate that are no part of what a call adds: the budget is for the others.
_NOT_ADDED = ("weights", "inputs", "context")

GROUP_OFFLOAD_HINT = (
    "load it again, without them: group offloading of the other modules, such as"
    " pipe.transformer.enable_group_offload(), works with lowtide.fit"
)


class BudgetedPartCaller:
    """Calls of an image autoencoder's part: as they are where they fit the budget, else in bands.

    As it is, a call equals the module's own bit for bit, and needs no planning.

    Args:
        module: The part, of its own class.
        stream: The part in bands.
        always_bands: Whether every call runs in bands.
    """

    def __init__(self, module: nn.Module, stream: Streamed, *, always_bands: bool = False) -> None:
        self._module, self._stream, self._always_bands = module, stream, always_bands
        # By size: upper bound of the bytes that a call adds to weights and input, infinite if
        # unknown, and the module's fingerprint when it was traced.
        self._traced: dict[object, tuple[float, ModuleFingerprint]] = {}

    def __call__(self, image: Tensor) -> Any:
        """Return what the part returns for ``image`` (B, C, H, W)."""
        if self._runs_as_it_is(image):
            return type(self._module).forward(self._module, image)
        return self._stream(image)

    def _runs_as_it_is(self, image: Tensor) -> bool:
        """Return whether the call for ``image`` runs as it is."""
        autocast = AutocastState.current(image.device.type).enabled
        if self._always_bands or autocast or image.dim() != 4:
            return False
        reject_gradients(self._module, [image])
        room = available_bytes(self._stream.budget, image.device)
        with TRACE_LOCK:
            return self._added_bytes(image, room) <= room

    def _added_bytes(self, image: Tensor, room: int) -> float:
        key = image.shape, image.dtype, image.device, image.stride()
        found, fingerprint = self._traced.get(key), ModuleFingerprint(self._module)
        if found is None or not found[1].matches(fingerprint, frozenset()):
            found = _added_bytes(self._module, image, room), fingerprint
            self._traced[key] = found
        return found[0]


def _added_bytes(module: nn.Module, image: Tensor, room: int) -> float:
    """Return an upper bound of the bytes that a call adds.

    A bound above ``room`` bytes says no more than that the call does not fit.
    """
    try:
        with torch.no_grad():
            if image.device.type == "cpu":
                return _on_cpu(module, image, room)
            estimate = traced_estimate(
                module, InferenceStep((image,)), local_profile(str(image.device))
            )
    except Exception:  # noqa: BLE001 - whatever stops a trace, bands may know how to run it
        return math.inf
    return sum(row.upper for row in estimate.ledger if row.name not in _NOT_ADDED)


def _on_cpu(module: nn.Module, image: Tensor, room: int) -> float:
    trace = trace_step(module, InferenceStep((image,)))
    workspace = CpuWorkspaceMeter(JsonCacheTable("operators", *machine_facts()), limit_bytes=room)
    upper = shipped_calibration("cpu").upper
    # Its margin added, a call of so many bytes is within the room.
    enough = 2 * room - upper(room)
    peak = upper(peak_within(trace, enough, workspace.operator_peak))
    workspace.store.save()
    return peak


def require_runnable_state(title: str, part: nn.Module) -> None:
    """Raise `UsageError` for module state that bands cannot run with.

    Checked at `fit` and at each call; ``title`` names the part in the message.
    """
    for path, inner in part.named_modules():
        if path and (hooks := ", ".join(hook_owners(inner))):
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


def require_not_traced(title: str, image: Tensor) -> None:
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


def require_eval_mode(title: str, part: nn.Module) -> None:
    """Raise `UsageError` in training mode: bands have no backward pass."""
    for path, inner in part.named_modules():
        if inner.training:
            raise UsageError(
                f"{title} is fitted for inference only, but {path or 'it'} is in training mode",
                hint="module.eval() for inference; lowtide.unfit(module) to train it",
            )


def hook_owners(module: nn.Module) -> Iterator[str]:
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
