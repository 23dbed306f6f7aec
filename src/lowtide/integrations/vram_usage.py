"""VRAM estimate of training a model, by default of LDM4TS, with one attention backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.steps import Optimizer
from lowtide.memory.training.meta_build import Inputs
from lowtide.memory.training.vram import compare_with_default

# The default model, as those who ask without one have it.
_HORIZONS, _DIFFUSION_STEPS = (15, 60, 240), 1000


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
        backend: what scaled_dot_product_attention uses: ``"default"`` is PyTorch's own choice for
            the device, others are ``"flash"``, ``"efficient"``, ``"cudnn"``, and ``"math"``, which
            holds whole score matrices.
        gradient_checkpointing: recompute every block in the backward pass.
        model: a module or a function that builds one; a function is called with the ``meta`` device
            as default, so that its weights take no memory, and again without where that fails. By
            default `LDM4TSModel` for horizons of 15, 60 and 240 steps and images of this size. The
            number of its diffusion steps makes no difference.
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
    return compare_with_default(
        partial(_default_model, image_size) if model is None else model,
        batch_size,
        image_size,
        backend=backend,
        gradient_checkpointing=gradient_checkpointing,
        device=device,
        dtype=dtype,
        inputs=inputs,
        optimizer=optimizer,
        loss=loss,
    )


def _default_model(image_size: tuple[int, int]) -> nn.Module:
    from lowtide.models.ldm4ts.model import LDM4TSModel

    return LDM4TSModel(image_size, _HORIZONS, _DIFFUSION_STEPS)
