"""Training step for a dry run on fake tensors, which predicts its peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.memory.tracing.steps import Observer, init_optimizer_state, optimizer_state
from lowtide.training.ema import MovingAverage
from lowtide.training.losses.perceptual import PerceptualLoss
from lowtide.training.network_factory import keep_in_fp32
from lowtide.training.setup import make_gan_loss, make_losses, make_optimizer, prepare_networks
from lowtide.training.train_config import Optim, TrainConfig
from lowtide.training.train_step import TrainedNetwork, TrainStep

# Micro-batches that are traced: from the second on, the gradients of the first exist already.
_TRACED_MICRO_BATCHES = 2


class TrainedNetworks(nn.Module):
    """Module with all networks of a training, including those of its losses."""

    def __init__(
        self, config: TrainConfig, generator: nn.Module, discriminator: nn.Module | None
    ) -> None:
        super().__init__()
        prepare_networks(config, generator, discriminator)
        self.generator, self.discriminator = generator, discriminator
        pairs = make_losses(config)
        self.entries = [entry for entry, _ in pairs]
        self.losses = nn.ModuleList(loss for _, loss in pairs)
        # `PerceptualLoss` hides its network from `parameters()`; here it must be counted.
        self.frozen = nn.ModuleList(
            one.network for one in self.losses if isinstance(one, PerceptualLoss)
        )


@dataclass(frozen=True)
class TracedTrainStep:
    """One steady-state step of `Trainer` for tracing, with optimizers and EMA.

    Traced with `TrainedNetworks`. No tensor value is read, so that fake tensors suffice.

    ``inputs`` are (low, high) of a whole batch, (B, 3, H, W) and (B, 3, H * scale, W * scale),
    run in ``micro_batches`` micro-batches. ``foreach`` selects optimizers that update all weights
    at once, as on a GPU. ``autocast`` is the dtype of the networks' forward passes, None for no
    autocast.
    """

    inputs: tuple[Tensor, Tensor]
    config: TrainConfig
    micro_batches: int = 1
    foreach: bool = False
    autocast: torch.dtype | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, model: TrainedNetworks) -> Callable[[Observer], None]:
        """Return a function that runs one step; the optimizer state is allocated already."""
        gan, train = make_gan_loss(self.config), self.config.train
        average = MovingAverage(model.generator)
        networks = [self._trained_network(model.generator, train.optim_g)]
        if model.discriminator is not None:
            networks.append(self._trained_network(model.discriminator, train.optim_d))
        losses = list(zip(model.entries, model.losses, strict=True))
        state = [tensor for side in networks for tensor in optimizer_state(side.optimizer)]
        persistent = [*state, *average.module.parameters(), *average.module.buffers()]

        def run(observer: Observer) -> None:
            observer.label(persistent, "optimizer")
            observer.mark("forward")
            stepper = TrainStep(
                networks[0],
                losses,
                _marked_backward(observer),
                networks[1] if len(networks) > 1 else None,
                gan,
                train.checkpointing,
                min(self.micro_batches, _TRACED_MICRO_BATCHES),
                read_values=False,
            )
            low, high = self.inputs
            followed = _TRACED_MICRO_BATCHES * -(-len(low) // self.micro_batches)
            # The last step: by then every loss has started.
            stepper(low[:followed], high[:followed], train.total_iter - 1)
            observer.mark("optimizer")
            for side in networks:
                observer.label(_gradients(side.network), "gradients")
                side.optimizer.step()
                side.optimizer.zero_grad()
            average.update(model.generator, train.ema_decay)

        return run

    def _trained_network(self, network: nn.Module, optim: Optim) -> TrainedNetwork:
        keep_in_fp32(network)
        weights = list(network.parameters())
        optimizer = make_optimizer(optim, weights, foreach=self.foreach)
        init_optimizer_state(optimizer, weights)

        def call(image: Tensor) -> Tensor:
            cast = self.autocast
            with nullcontext() if cast is None else torch.autocast("cpu", cast):
                result = network(image)
            return result.float()

        return TrainedNetwork(network, optimizer, call)


def _marked_backward(observer: Observer) -> Callable[[Tensor], None]:
    """Return a backward function that marks its phase; a forward phase follows it."""

    def backward(loss: Tensor) -> None:
        observer.mark("backward")
        loss.backward()
        observer.mark("forward")

    return backward


def _gradients(network: nn.Module) -> list[Tensor]:
    return [one.grad for one in network.parameters() if one.grad is not None]
