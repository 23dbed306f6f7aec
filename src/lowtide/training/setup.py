"""What a training configuration sets: accelerator, optimizers, numeric formats, and schedules.

Schedules are by step: learning rate, loss weights, and the decay of the average of the weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.core.install_hints import install_extra
from lowtide.training.run_config import LossEntry, Optim, RunConfig, Scheduler

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
        raise UsageError("training needs accelerate", hint=install_extra("train")) from error
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


class MovingAverage:
    """Exponential moving average of a network's parameters, kept as a module.

    ``module`` is a frozen deep copy in eval mode. Parameters are averaged, buffers are copied.
    """

    def __init__(self, network: nn.Module) -> None:
        self.module = copy.deepcopy(network).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, network: nn.Module, decay: float) -> None:
        """Update the average in place: ``decay * average + (1 - decay) * network``."""
        for mean, weight in zip(self.module.parameters(), network.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - decay)
        for mean, buffer in zip(self.module.buffers(), network.buffers(), strict=True):
            mean.copy_(buffer)


def lr_factor(scheduler: Scheduler, step: int, total: int, warmup: int) -> float:
    """Return the factor on the base learning rate in step ``step`` of ``total``.

    Steps count from 0. A linear warmup over ``warmup`` steps multiplies the scheduler's factor.
    """
    warmup_factor = min(1.0, (step + 1) / (warmup + 1))
    if scheduler.type == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        return warmup_factor * (scheduler.eta_min + (1 - scheduler.eta_min) * cosine)
    if scheduler.type == "multistep":
        passed = sum(step >= milestone for milestone in scheduler.milestones)
        return warmup_factor * scheduler.gamma**passed
    return warmup_factor


def loss_weight(entry: LossEntry, step: int) -> float:
    """Return a loss's weight in step ``step``: 0 before it starts, then a linear ramp."""
    since = step - entry.start_iter
    if since < 0:
        return 0.0
    return entry.loss_weight * min(1.0, (since + 1) / (entry.ramp_iter + 1))


def ema_decay(decay: float, warmup: int, step: int) -> float:
    """Return the EMA decay after step ``step``, counted from 0.

    It is smaller in the first steps, so that the average forgets the random initial weights.
    """
    return min(decay, (step + 1) / (step + 1 + warmup))
