"""VRAM estimate of training a model, by default of LDM4TS, with one attention backend."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
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
from lowtide.memory.tracing.steps import Optimizer, TrainingStep
from lowtide.memory.training.meta_build import Inputs, build_on_meta, make_inputs

GB = 10**9
# The default model, as those who ask without one have it.
_HORIZONS, _DIFFUSION_STEPS, _TOKENS = (15, 60, 240), 1000, 784

_FLASH, _EFFICIENT, _CUDNN, _MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
# The kernels enabled for each name. The forced one is tried first; the rest are its fallbacks.
_KERNELS: dict[str, list[SDPBackend]] = {
    "default": [_FLASH, _EFFICIENT, _CUDNN, _MATH],
    "sdpa": [_FLASH, _EFFICIENT, _CUDNN, _MATH],
    "flash": [_FLASH, _EFFICIENT, _MATH],
    "efficient": [_EFFICIENT, _MATH],
    # Alone: ranked after math, it would never be tried on consumer GPUs.
    "cudnn": [_CUDNN],
    "math": [_MATH],
}
BACKENDS = tuple(_KERNELS)


def estimate_vram_usage(
    batch_size: int = 4,
    backend: str = "default",
    gradient_checkpointing: bool = False,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    image_size: tuple[int, int] = (224, 224),
    device: str | DeviceProfile = "rtx3060-12gb",
    dtype: torch.dtype = torch.bfloat16,
    *,
    inputs: Inputs | None = None,
    optimizer: Optimizer = "adamw-foreach",
    loss: Callable[[Any], Tensor] | None = None,
) -> dict[str, Any]:
    """Estimate the GPU memory of training ``model`` with one attention backend.

    The step is that of `TrainingStep`: forward, ``loss``, backward and ``optimizer``.

    Args:
        backend: what scaled_dot_product_attention uses: ``"default"`` or ``"sdpa"`` is PyTorch's
            own choice for the device, others are ``"flash"``, ``"efficient"``, ``"cudnn"``, and
            ``"math"``, which holds whole score matrices.
        gradient_checkpointing: recompute every block in the backward pass.
        model: a module or a function that builds one; a function is called with the ``meta`` device
            as default, so that its weights take no memory, and again without where that fails. By
            default `LDM4TSModel` for horizons of 15, 60 and 240 steps and images of this size, with
            attention at all levels of up to 784 pixels. The number of its diffusion steps makes no
            difference.
        image_size: (height, width).
        device: name of a device profile, or the profile.
        dtype: precision of suitable operators by autocast, the weights staying unchanged;
            torch.float32 is no autocast.
        inputs: ``inputs(batch_size, image_size)`` returns what the model is called with; by default
            its own ``example_inputs(batch_size, image_size)`` if it has that, else images (B, C, H,
            W) with the channels of its first convolution.
        optimizer: AdamW as PyTorch runs it by default.
        loss: of the model's output; mean square by default.

    Returns:
        ``total_estimated_gb`` and ``total_upper_gb``, the expected peak and its upper bound for the
        whole process in decimal gigabytes (10^9 bytes); ``savings_vs_default_pct`` relative to the
        default backend without checkpointing, traced for the same model and sizes, 0 where the
        default is as good; ``ledger``, a list of the estimate's rows in bytes; and ``notes``.

    Raises:
        UsageError: for an unknown backend or device, for a backend that has no backward pass
            (``"sage"``), and for one that takes no attention of this model on this device.
        ModelError: for a model that cannot be traced.
    """
    _validate(backend, batch_size, image_size)
    profile = load_profile(device) if isinstance(device, str) else device
    if profile.kind == "cpu":
        raise UsageError(
            "the CPU has no dedicated memory", hint="use lowtide.estimate, also for the CPU"
        )
    module = build_on_meta(partial(_default_model, image_size) if model is None else model)
    step = TrainingStep(
        make_inputs(module, batch_size, image_size, inputs),
        optimizer=optimizer,
        loss=loss,
        autocast=None if dtype == torch.float32 else dtype,
    )
    default_calls, calls = _Watch(profile, "default"), _Watch(profile, backend)
    default = chosen = _trace(module, step, default_calls)
    if backend != "default" or gradient_checkpointing:
        how = "full" if gradient_checkpointing else "none"
        chosen = _trace(module, dataclasses.replace(step, checkpointing=how), calls)
    return {
        "total_estimated_gb": chosen.predicted_bytes / GB,
        "total_upper_gb": chosen.upper_bytes / GB,
        "savings_vs_default_pct": 100 * (1 - chosen.predicted_bytes / default.predicted_bytes),
        "ledger": [dataclasses.asdict(row) for row in chosen.ledger],
        "notes": ["a GB is 10^9 bytes", *_notes(calls, default_calls), *chosen.notes],
    }


def _default_model(image_size: tuple[int, int]) -> nn.Module:
    from lowtide.models.ldm4ts.model import LDM4TSModel

    return LDM4TSModel(image_size, _HORIZONS, _DIFFUSION_STEPS, attention_tokens=_TOKENS)


class _Watch(TorchFunctionMode):
    """Function mode that counts the attention kernels a trace takes, from outside it.

    ``reasons`` count why the backend asked for refused the calls that others took.
    """

    def __init__(self, profile: DeviceProfile, backend: str) -> None:
        super().__init__()
        self.profile, self.backend = profile, backend
        self.kernels: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        path = _PATHS.get(func)
        # Checkpointing runs them again in the backward pass; each counts once.
        if path is not None and torch._C._current_graph_task_id() == -1:
            self.kernels[path] += 1
            if self.backend not in ("default", path):
                asked: Any = self.backend
                call = _attention_call(path, args, kwargs)
                why = kernel_unsupported_reason(asked, self.profile, call)
                self.reasons[why or "it is not tried on this GPU"] += 1
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


def _notes(calls: _Watch, default: _Watch) -> list[str]:
    """Return notes on the kernels; raises `UsageError` if the backend takes no call."""
    backend, name = calls.backend, calls.profile.name
    if not default.kernels:
        return [
            "the model never calls scaled_dot_product_attention: the backend makes no difference"
        ]
    counts = ", ".join(f"{kernel} {count}" for kernel, count in sorted(default.kernels.items()))
    notes = [f"attention calls by PyTorch's own choice on {name}: {counts}"]
    total, taken = calls.kernels.total(), calls.kernels[backend]
    if backend == "default" or taken == total:
        return notes
    reason = calls.reasons.most_common(1)[0][0]
    if not taken:
        raise UsageError(
            f"{backend} attention supports none of this model's {total} attention calls on"
            f" {name}: {reason}",
            hint="backend='default' uses PyTorch's own choice",
        )
    others = ", ".join(sorted(kernel for kernel in calls.kernels if kernel != backend))
    return [
        *notes,
        f"{backend} does not support {total - taken} of {total} calls, which use {others}:"
        f" {reason}",
    ]


def _trace(model: nn.Module, step: TrainingStep, watch: _Watch) -> Estimate:
    try:
        with sdpa_kernel(_KERNELS[watch.backend]), watch:
            return traced_estimate(model, step, watch.profile)
    except UsageError:
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise ModelError(
            f"a training step of {type(model).__name__} cannot be traced: {first}",
            hint="check that inputs= returns what the model accepts",
        ) from error
