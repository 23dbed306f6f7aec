"""VRAM estimate of training a model, by attention backend; traced, no table."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lowtide.attention.sdpa_rules import AttentionPath, kernel_unsupported_reason
from lowtide.attention.spec import AttentionCall, AttentionSpec, describe_call
from lowtide.core.errors import ModelError, UsageError
from lowtide.memory.prediction.estimate import Estimate, traced_estimate
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.memory.tracing.checkpointing import Checkpointing
from lowtide.memory.tracing.steps import Optimizer, TrainingStep
from lowtide.memory.training.meta_build import Inputs, build_on_meta, make_inputs

GB = 10**9

_FLASH, _EFFICIENT, _CUDNN, _MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
# The kernels enabled for each name. The forced one is tried first; the rest are its fallbacks.
_KERNELS: dict[str, list[SDPBackend]] = {
    "default": [_FLASH, _EFFICIENT, _CUDNN, _MATH],
    "flash": [_FLASH, _EFFICIENT, _MATH],
    "efficient": [_EFFICIENT, _MATH],
    # Alone: ranked after math, it would never be tried on consumer GPUs.
    "cudnn": [_CUDNN],
    "math": [_MATH],
}
BACKENDS = tuple(_KERNELS)


def compare_with_default(
    model: nn.Module | Callable[[], nn.Module],
    batch_size: int,
    image_size: tuple[int, int],
    *,
    backend: str,
    gradient_checkpointing: bool,
    device: str | DeviceProfile,
    dtype: torch.dtype,
    inputs: Inputs | None,
    optimizer: Optimizer,
    loss: Callable[[Any], Tensor] | None,
) -> dict[str, Any]:
    """Return the figures of `lowtide.estimate_vram_usage`, whose arguments these are."""
    _validate(backend, batch_size, image_size)
    profile = load_profile(device) if isinstance(device, str) else device
    if profile.kind == "cpu":
        raise UsageError(
            "the CPU has no dedicated memory", hint="use lowtide.estimate, also for the CPU"
        )
    module = build_on_meta(model)
    step = TrainingStep(
        make_inputs(module, batch_size, image_size, inputs),
        optimizer=optimizer,
        loss=loss,
        autocast=None if dtype == torch.float32 else dtype,
    )
    baseline, baseline_calls = _trace(module, step, profile, "default", "none")
    chosen, calls = baseline, baseline_calls
    if backend != "default" or gradient_checkpointing:
        how = "full" if gradient_checkpointing else "none"
        chosen, calls = _trace(module, step, profile, backend, how)
    notes = [*_notes(backend, calls, baseline_calls, profile), *chosen.notes]
    saved = 1 - chosen.predicted_bytes / baseline.predicted_bytes
    return {
        "total_estimated_gb": chosen.predicted_bytes / GB,
        "total_upper_gb": chosen.upper_bytes / GB,
        "savings_vs_default_pct": 100 * saved,
        "ledger": [dataclasses.asdict(row) for row in chosen.ledger],
        "notes": notes,
    }


@dataclasses.dataclass
class _Seen:
    """Attention calls of a forward pass by kernel, and why ``requested`` refused some."""

    profile: DeviceProfile
    requested: AttentionPath | None
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)


class _Watch(TorchFunctionMode):
    """Function mode that counts the attention kernels a trace takes, from outside it."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        path = _PATHS.get(func)
        # Checkpointing runs them again in the backward pass; each counts once.
        if path is not None and torch._C._current_graph_task_id() == -1:
            seen = self._seen
            seen.kernels[path] += 1
            if seen.requested not in (None, path):
                why = kernel_unsupported_reason(
                    seen.requested, seen.profile, _attention_call(path, args, kwargs)
                )
                seen.reasons[why or "it is not tried on this GPU"] += 1
        return func(*args, **kwargs)


_aten = torch.ops.aten
_PATHS: dict[Any, AttentionPath] = {
    _aten._scaled_dot_product_flash_attention: "flash",
    _aten._scaled_dot_product_efficient_attention: "efficient",
    _aten._scaled_dot_product_cudnn_attention: "cudnn",
    _aten._scaled_dot_product_attention_math: "math",
}


# Argument positions of dropout; whether attention is causal follows it.
_DROPOUT: dict[AttentionPath, int] = {"flash": 3, "efficient": 5, "cudnn": 5, "math": 4}


def _attention_call(
    path: AttentionPath, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AttentionCall:
    """Return the attention call that the selection saw before it took ``path``."""
    query, key, value, mask = args[:4]
    dropout, causal = args[_DROPOUT[path] : _DROPOUT[path] + 2]
    spec = AttentionSpec(None, causal, dropout, kwargs.get("enable_gqa", False))
    return describe_call((query, key, value), mask if isinstance(mask, Tensor) else None, spec)


def _validate(backend: str, batch: int, size: tuple[int, int]) -> None:
    if backend == "sage":
        raise UsageError(
            "SageAttention has no backward pass, so it cannot be used for training",
            hint="backend='flash'; SageAttention is for inference",
        )
    if backend not in _KERNELS:
        raise UsageError(
            f"attention backend {backend!r} is not known", hint=f"one of {', '.join(BACKENDS)}"
        )
    if batch < 1 or len(size) != 2 or min(size) < 1:
        raise UsageError(f"{batch} images of size {size} are not a valid batch")


def _notes(backend: str, calls: _Seen, default: _Seen, profile: DeviceProfile) -> list[str]:
    """Return notes on the figures; raises `UsageError` if the backend takes no call."""
    total = sum(calls.kernels.values())
    units = "a GB is 10^9 bytes"
    if not total:
        return [
            units,
            "the model never calls scaled_dot_product_attention: the backend makes no difference",
        ]
    default_counts = ", ".join(f"{name} {count}" for name, count in sorted(default.kernels.items()))
    notes = [units, f"attention calls by PyTorch's own choice on {profile.name}: {default_counts}"]
    taken = calls.kernels[backend]
    if backend == "default" or taken == total:
        return notes
    reason = calls.reasons.most_common(1)[0][0]
    if not taken:
        raise UsageError(
            f"{backend} attention supports none of this model's {total} attention calls on"
            f" {profile.name}: {reason}",
            hint="backend='default' uses PyTorch's own choice",
        )
    others = ", ".join(sorted(name for name in calls.kernels if name != backend))
    return [
        *notes,
        f"{backend} does not support {total - taken} of {total} calls, which use {others}:"
        f" {reason}",
    ]


def _trace(
    model: nn.Module, step: TrainingStep, profile: DeviceProfile, backend: str, how: Checkpointing
) -> tuple[Estimate, _Seen]:
    requested: Any = None if backend == "default" else backend
    seen = _Seen(profile, requested)
    step = dataclasses.replace(step, checkpointing=how)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(_KERNELS[backend]))
        stack.enter_context(_Watch(seen))
        try:
            return traced_estimate(model, step, profile), seen
        except UsageError:
            raise
        except Exception as error:
            first = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            raise ModelError(
                f"a training step of {type(model).__name__} cannot be traced: {first}",
                hint="check that inputs= returns what the model accepts",
            ) from error
