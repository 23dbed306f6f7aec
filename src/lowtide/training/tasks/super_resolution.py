"""Task of an image network trained on pairs, with a discriminator or without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lowtide.attention.spatial import LocalWindowAttention
from lowtide.core.errors import UsageError
from lowtide.training.losses import make_loss
from lowtide.training.losses.gan import discriminator_loss, generator_loss, gradient_penalty
from lowtide.training.run_config import LossEntry
from lowtide.training.setup import loss_weight, save_weights
from lowtide.training.state import FileFacts
from lowtide.training.task import (
    Batch,
    BatchSource,
    LossTerm,
    Objective,
    ObjectiveLosses,
    TrainableNetwork,
    TrainTask,
    Validator,
)
from lowtide.training.tasks.sr_config import SrConfig

_GAN = "ganloss"


@dataclass(frozen=True)
class GanLoss:
    """Adversarial loss of a training: its entry, `GanKind` and R1/R2 penalty weight."""

    entry: LossEntry
    kind: str
    penalty_weight: float


class GeneratorObjective(Objective):
    """Losses of a generator's image against its original, and the adversarial one.

    The batch is (low, high): (B, 3, H, W) and (B, 3, H * scale, W * scale), both in 0..1. The
    result is the generated image.
    """

    trains = ("generator",)

    def __init__(self, entries: list[LossEntry], gan: GanLoss | None = None) -> None:
        super().__init__()
        self.entries, self.gan = entries, gan
        self.losses = nn.ModuleList(make_loss(entry.type, **entry.options) for entry in entries)

    def forward(
        self, networks: Mapping[str, TrainableNetwork], batch: Batch, step: int
    ) -> ObjectiveLosses:
        """Return each loss, and ``gan`` from the step on in which it starts."""
        low, high = batch
        prediction = networks["generator"](low).float()
        terms = {
            entry.type: LossTerm(loss(prediction, high), loss_weight(entry, step))
            for entry, loss in zip(self.entries, self.losses, strict=True)
        }
        if self.gan is not None and (weight := loss_weight(self.gan.entry, step)):
            discriminator = networks["discriminator"]
            with discriminator.frozen():
                fake = discriminator(prediction)
                with torch.no_grad():
                    real = discriminator(high)
            terms["gan"] = LossTerm(
                generator_loss(self.gan.kind, fake.float(), real.float()), weight
            )
        return ObjectiveLosses(terms, (prediction,))


class DiscriminatorObjective(Objective):
    """Losses of a discriminator on original and generated images.

    The batch is (low, high, prediction): (B, 3, H, W), then twice (B, 3, H * scale, W * scale), all
    in 0..1. Logits are (B, 1, H * scale, W * scale).
    """

    trains = ("discriminator",)

    def __init__(self, gan: GanLoss) -> None:
        super().__init__()
        self.gan, self.start_iter = gan, gan.entry.start_iter

    def forward(
        self, networks: Mapping[str, TrainableNetwork], batch: Batch, step: int
    ) -> ObjectiveLosses:
        """Return the scalar ``discriminator``, and the gradient penalties if there are any."""
        _, high, prediction = batch
        penalized = self.gan.penalty_weight > 0
        images = [one.detach().requires_grad_(penalized) for one in (high, prediction)]
        real, fake = (networks["discriminator"](one).float() for one in images)
        terms = {"discriminator": LossTerm(discriminator_loss(self.gan.kind, real, fake))}
        if penalized:
            pairs = zip(("penalty_real", "penalty_fake"), (real, fake), images, strict=True)
            for name, logits, image in pairs:
                # Of the mean logit, so that the penalty does not grow with the image size.
                penalty = gradient_penalty(logits.mean((1, 2, 3)), image)
                terms[name] = LossTerm(penalty, self.gan.penalty_weight / 2)
        return ObjectiveLosses(terms)


def make_pairs_task(
    config: SrConfig,
    generator: nn.Module,
    data: BatchSource,
    discriminator: nn.Module | None = None,
    *,
    make_validator: Callable[[Path, str], Validator | None] | None = None,
    files: Mapping[str, FileFacts] | None = None,
) -> TrainTask:
    """Build the task of a super-resolution training.

    A discriminator with a gradient penalty gets attention that can be differentiated twice.

    Raises:
        UsageError: If only one of ``network_d`` and ``ganloss`` is there, and for unknown or
            invalid options of a loss.
    """
    train, gan = config.train, _gan_loss(config)
    others = [entry for entry in train.losses if entry.type.lower() != _GAN]
    networks, optims = {"generator": generator}, {"generator": train.optim_g}
    objectives: list[Objective] = [GeneratorObjective(others, gan)]
    if discriminator is not None and gan is not None:
        networks["discriminator"], optims["discriminator"] = discriminator, train.optim_d
        objectives.append(DiscriminatorObjective(gan))
        if gan.penalty_weight:
            _make_twice_differentiable(discriminator)
    return TrainTask(
        networks,
        optims,
        objectives,
        data,
        save=partial(save_weights, config=config),
        make_validator=make_validator,
        files=files or {},
        title=f"patches of {config.datasets.train.lq_size} px",
        smaller="a smaller datasets.train.lq_size or network_g",
    )


def _gan_loss(config: SrConfig) -> GanLoss | None:
    entries = [entry for entry in config.train.losses if entry.type.lower() == _GAN]
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


def _make_twice_differentiable(network: nn.Module) -> None:
    """Switch attention to the math backend: fused kernels have no second derivative."""
    for module in network.modules():
        if isinstance(module, LocalWindowAttention):
            module.backend = "sdpa-math"
