"""Accelerator, optimizers and numeric formats of a training configuration."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.training.run_config import Optim, RunConfig

# Supported `DistributedType` values of accelerate.
_SUPPORTED_DISTRIBUTED_TYPES = "NO", "MULTI_CPU", "MULTI_GPU"
# Timeout of collectives: the other processes wait in one while rank 0 validates.
_COLLECTIVE_TIMEOUT = timedelta(hours=12)


def make_accelerator(config: RunConfig, device: str) -> Any:
    """Build the `accelerate.Accelerator` of a training.

    It does device placement, autocast and fp16 gradient scaling. Raises UsageError if accelerate is
    missing, for fp16 on the CPU, and for a launch that shards the network.
    """
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise UsageError(
            "training needs accelerate", hint="pip install 'lowtide[train]'"
        ) from error
    if config.precision == "fp16" and device == "cpu":
        raise UsageError("precision: fp16 needs a GPU", hint="precision: bf16, or fp32")
    mixed = "no" if config.precision == "fp32" else config.precision
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed:
        AcceleratorState._reset_state()  # of a training before this one, in the same process
    group = InitProcessGroupKwargs(timeout=_COLLECTIVE_TIMEOUT)
    accelerator = Accelerator(mixed_precision=mixed, cpu=device == "cpu", kwargs_handlers=[group])
    kind = accelerator.distributed_type.value
    if kind not in _SUPPORTED_DISTRIBUTED_TYPES:
        raise UsageError(
            f"this training was launched for {kind}, which shards the networks; each process"
            " needs a whole copy of them",
            hint="torchrun --nproc-per-node 2 -m lowtide train KIND CONFIG",
        )
    return accelerator


def make_optimizer(
    optim: Optim, parameters: Iterable[nn.Parameter], *, foreach: bool | None = None
) -> torch.optim.Optimizer:
    """Build Adam or AdamW.

    ``foreach`` None leaves the choice of implementation to PyTorch, which depends on the device.
    """
    kind = torch.optim.AdamW if optim.type == "adamw" else torch.optim.Adam
    return kind(
        parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, foreach=foreach
    )


def prepare_network(network: nn.Module, *, channels_last: bool) -> None:
    """Set memory format and train mode of a network, in place."""
    order = torch.channels_last if channels_last else torch.contiguous_format
    network.to(memory_format=order).train()


def keep_in_fp32(network: nn.Module) -> None:
    """Exclude modules with ``keeps_fp32`` from autocast, in place.

    In half precision the trained layers would learn the rounding errors of fixed ones.
    """
    for module in network.modules():
        if getattr(module, "keeps_fp32", False):
            module.forward = partial(_forward_in_fp32, type(module), module)


def _forward_in_fp32(kind: type[nn.Module], module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return kind.forward(module, x.float())
