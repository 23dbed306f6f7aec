"""Forward, losses and backward of one batch, in micro-batches that fit the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowtide.core.errors import NotFiniteError, UsageError
from lowtide.memory.tracing.checkpointing import Checkpointing, checkpointed
from lowtide.training.distributed import ALONE, ProcessGroup
from lowtide.training.losses.gan import discriminator_loss, generator_loss, gradient_penalty
from lowtide.training.lr_schedule import loss_weight
from lowtide.training.train_config import LossEntry

# Steps by which each weight must have had a gradient: some have none until others leave 0.
_GRADIENTS_BY = 3
_SLOWER = "try a lower learning rate, train.grad_clip, or precision: fp32"


@dataclass
class TrainedNetwork:
    """Network with its optimizer and its forward function.

    ``call`` runs the network, plain or wrapped (autocast, `torch.compile`). ``scaled`` says that
    its gradients are scaled for fp16. ``silent`` names the weights without a gradient so far.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    call: Callable[[Tensor], Tensor]
    scaled: bool = False
    silent: set[str] | None = None

    def seek_gradients(self, step: int, what: str) -> None:
        """Check that every weight gets a finite, nonzero gradient in the first steps.

        Raises `UsageError` naming weights without one, and `NotFiniteError` naming a weight whose
        gradient is not finite.
        """
        if step >= _GRADIENTS_BY and self.silent is not None and not self.silent:
            return
        if self.silent is None:
            self.silent = {n for n, one in self.network.named_parameters() if one.requires_grad}
        for name, weight in self.network.named_parameters():
            if weight.grad is None or name not in self.silent:
                continue
            # The scaler skips the step of fp16 gradients that overflow and lowers its scale.
            if not self.scaled and not bool(weight.grad.isfinite().all()):
                raise NotFiniteError(
                    f"the gradient of {what}'s {name} is not finite in step {step}", hint=_SLOWER
                )
            if bool(weight.grad.any()):
                self.silent.discard(name)
        if step == _GRADIENTS_BY - 1 and self.silent:
            names = ", ".join(sorted(self.silent)[:3])
            raise UsageError(
                f"{len(self.silent)} weights of {what} had no gradient in {_GRADIENTS_BY} steps and"
                f" would never be trained: {names}"
            )


@dataclass(frozen=True)
class GanLoss:
    """Adversarial loss of a training: its entry, `GanKind` and R1/R2 penalty weight."""

    entry: LossEntry
    kind: str
    penalty: float


@dataclass
class TrainStep:
    """Forward and backward passes of one batch, with gradient accumulation.

    Gradients are left in the networks; the caller steps the optimizers.

    ``losses`` are (entry, module). ``backward`` computes the gradients of a loss. ``parts`` is the
    number of micro-batches. ``read`` False skips everything that reads tensor values, as fake
    tensors need. With several ``processes`` the batch is this one's share, and gradients are
    summed over the processes.
    """

    generator: TrainedNetwork
    losses: list[tuple[LossEntry, nn.Module]]
    backward: Callable[[Tensor], None]
    discriminator: TrainedNetwork | None = None
    gan: GanLoss | None = None
    checkpointing: Checkpointing = "none"
    parts: int = 1
    read: bool = True
    processes: ProcessGroup = ALONE

    def __call__(self, low: Tensor, high: Tensor, step: int) -> dict[str, float]:
        """Accumulate gradients of one batch; return the mean of each unweighted loss.

        ``low`` is (B, 3, H, W), ``high`` (B, 3, H * scale, W * scale), both in 0..1. Raises
        `NotFiniteError` naming a loss that is not finite, and as `TrainedNetwork.seek_gradients`.
        """
        told: dict[str, float] = {}
        pieces = zip(low.chunk(self.parts), high.chunk(self.parts), strict=True)
        for low_part, high_part in pieces:
            share = len(low_part) / len(low)
            for name, value in self._part(low_part, high_part, step, share).items():
                told[name] = told.get(name, 0.0) + value * share
        for side in (self.generator, self.discriminator):
            if side is not None:
                weights = side.network.parameters()
                self.processes.add_up(one.grad for one in weights if one.grad is not None)
        if self.read:
            self.generator.seek_gradients(step, "network_g")
            if self.discriminator is not None and self.gan is not None and "gan" in told:
                self.discriminator.seek_gradients(step - self.gan.entry.start_iter, "network_d")
        return told

    def _part(self, low: Tensor, high: Tensor, step: int, share: float) -> dict[str, float]:
        with checkpointed(self.generator.network, self.checkpointing):
            made = self.generator.call(low).float()
            losses = {entry.type: loss(made, high) for entry, loss in self.losses}
            weights = {entry.type: loss_weight(entry, step) for entry, _ in self.losses}
            adversarial = self._judged(made, high, step)
            if adversarial is not None:
                losses["gan"], weights["gan"] = adversarial
            told = self._numbers(losses, step)
            total = torch.stack([losses[name] * weights[name] for name in losses]).sum()
            self.backward(total * (share / self.processes.count))
        if adversarial is not None:
            told |= self._discriminate(made.detach(), high, step, share)
        return told

    def _judged(self, made: Tensor, high: Tensor, step: int) -> tuple[Tensor, float] | None:
        """Return the generator's adversarial loss and weight, or None before it starts."""
        if self.gan is None or self.discriminator is None:
            return None
        weight = loss_weight(self.gan.entry, step)
        if not weight:
            return None
        self.discriminator.network.requires_grad_(False)
        fake = self.discriminator.call(made)
        with torch.no_grad():
            real = self.discriminator.call(high)
        self.discriminator.network.requires_grad_(True)
        return generator_loss(self.gan.kind, fake.float(), real.float()), weight

    def _discriminate(
        self, made: Tensor, high: Tensor, step: int, share: float
    ) -> dict[str, float]:
        """Accumulate the discriminator's gradients on real and generated images."""
        assert self.gan is not None and self.discriminator is not None
        penalized = self.gan.penalty > 0
        pictures = [one.detach().requires_grad_(penalized) for one in (high, made)]
        real, fake = (self.discriminator.call(one).float() for one in pictures)
        losses = {"discriminator": discriminator_loss(self.gan.kind, real, fake)}
        total = losses["discriminator"]
        if penalized:
            pairs = zip(("penalty_real", "penalty_fake"), (real, fake), pictures, strict=True)
            for name, logits, picture in pairs:
                # Of the mean logit, so that the penalty does not grow with the image size.
                losses[name] = gradient_penalty(logits.mean((1, 2, 3)), picture)
                total = total + self.gan.penalty / 2 * losses[name]
        told = self._numbers(losses, step)
        self.backward(total * (share / self.processes.count))
        return told

    def _numbers(self, losses: dict[str, Tensor], step: int) -> dict[str, float]:
        if not self.read:
            return {}
        told = {name: loss.item() for name, loss in losses.items()}
        told = self.processes.mean(told, next(iter(losses.values())).device)
        for name, value in told.items():
            if not math.isfinite(value):
                raise NotFiniteError(f"the loss {name} is {value} in step {step}", hint=_SLOWER)
        return told
