"""Accelerator, losses and optimizers of a training configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lowtide.attention.spatial import LocalWindowAttention
from lowtide.core.errors import UsageError
from lowtide.training.losses import make_loss
from lowtide.training.losses.gan import discriminator_loss
from lowtide.training.train_config import LossEntry, Optim, TrainConfig
from lowtide.training.train_step import GanLoss

GAN = "ganloss"
# Supported `DistributedType` values of accelerate.
_SUPPORTED_DISTRIBUTED_TYPES = "NO", "MULTI_CPU", "MULTI_GPU"
# Timeout of collectives: the other processes wait in one while rank 0 validates.
_COLLECTIVE_TIMEOUT = timedelta(hours=12)


def make_accelerator(config: TrainConfig, device: str) -> Any:
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
            hint="torchrun --nproc-per-node 2 -m lowtide train sr CONFIG",
        )
    return accelerator


def make_gan_loss(config: TrainConfig) -> GanLoss | None:
    """Build the adversarial loss of a configuration, or return None if it has none.

    Raises UsageError if only one of ``network_d`` and ``ganloss`` is there, and for unknown or
    invalid options.
    """
    entries = [entry for entry in config.train.losses if entry.type.lower() == GAN]
    if bool(entries) != (config.network_d is not None):
        raise UsageError("network_d and a loss of type ganloss require each other")
    if not entries:
        return None
    options = dict(entries[0].options)
    kind, penalty = options.pop("gan_type", "vanilla"), options.pop("r1_weight", 0.0)
    if len(entries) > 1 or options:
        raise UsageError(
            f"ganloss: {', '.join(options) or 'a second entry'} is not known",
            hint="gan_type: vanilla, lsgan, hinge or r3gan; r1_weight",
        )
    if not isinstance(penalty, int | float) or not 0 <= penalty < math.inf:
        raise UsageError(
            f"ganloss: r1_weight must be a finite number of at least 0, not {penalty!r}"
        )
    discriminator_loss(kind, torch.zeros(1), torch.zeros(1))  # raises for an unknown kind
    return GanLoss(entries[0], kind, float(penalty))


def make_losses(config: TrainConfig) -> list[tuple[LossEntry, nn.Module]]:
    """Build all losses except the adversarial one, each with its configuration entry."""
    return [
        (entry, make_loss(entry.type, **entry.options))
        for entry in config.train.losses
        if entry.type.lower() != GAN
    ]


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


def prepare_networks(
    config: TrainConfig, generator: nn.Module, discriminator: nn.Module | None
) -> None:
    """Set memory format and train mode of the networks, in place.

    A discriminator with a gradient penalty gets attention that can be differentiated twice.
    """
    order = torch.channels_last if config.channels_last else torch.contiguous_format
    for network in (generator, discriminator):
        if network is not None:
            network.to(memory_format=order).train()
    gan = make_gan_loss(config)
    if discriminator is not None and gan is not None and gan.penalty_weight:
        _make_twice_differentiable(discriminator)


def _make_twice_differentiable(network: nn.Module) -> None:
    """Switch attention to the math backend: fused kernels have no second derivative."""
    for module in network.modules():
        if isinstance(module, LocalWindowAttention):
            module.backend = "sdpa-math"
