"""Forward, losses and backward of one batch, in micro-batches that fit the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowtide.core.errors import NotFiniteError, UsageError
from lowtide.memory.tracing.checkpointing import Checkpointing, checkpointed
from lowtide.training.distributed import SINGLE_PROCESS, ProcessGroup
from lowtide.training.losses.gan import discriminator_loss, generator_loss, gradient_penalty
from lowtide.training.lr_schedule import loss_weight
from lowtide.training.train_config import LossEntry

# Steps by which each weight must have had a gradient: some have none until others leave 0.
_GRADIENT_CHECK_STEPS = 3
_NOT_FINITE_HINT = "try a lower learning rate, train.grad_clip, or precision: fp32"


@dataclass
class TrainedNetwork:
    """Network with its optimizer and its forward function.

    ``forward`` runs the network, plain or wrapped (autocast, `torch.compile`).
    ``has_scaled_gradients`` says that its gradients are scaled for fp16. ``without_gradient`` names
    the weights without a gradient so far.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]
    has_scaled_gradients: bool = False
    without_gradient: set[str] | None = None

    def check_gradients(self, step: int, network_name: str) -> None:
        """Check that every weight gets a finite, nonzero gradient in the first steps.

        Raises `UsageError` naming weights without one, and `NotFiniteError` naming a weight whose
        gradient is not finite.
        """
        if (
            step >= _GRADIENT_CHECK_STEPS
            and self.without_gradient is not None
            and not self.without_gradient
        ):
            return
        if self.without_gradient is None:
            self.without_gradient = {
                n for n, one in self.network.named_parameters() if one.requires_grad
            }
        for name, weight in self.network.named_parameters():
            if weight.grad is None or name not in self.without_gradient:
                continue
            # The scaler skips the step of fp16 gradients that overflow and lowers its scale.
            if not self.has_scaled_gradients and not bool(weight.grad.isfinite().all()):
                raise NotFiniteError(
                    f"the gradient of {network_name}'s {name} is not finite in step {step}",
                    hint=_NOT_FINITE_HINT,
                )
            if bool(weight.grad.any()):
                self.without_gradient.discard(name)
        if step == _GRADIENT_CHECK_STEPS - 1 and self.without_gradient:
            names = ", ".join(sorted(self.without_gradient)[:3])
            raise UsageError(
                f"{len(self.without_gradient)} weights of {network_name} had no gradient in"
                f" {_GRADIENT_CHECK_STEPS} steps and would never be trained: {names}"
            )


@dataclass(frozen=True)
class GanLoss:
    """Adversarial loss of a training: its entry, `GanKind` and R1/R2 penalty weight."""

    entry: LossEntry
    kind: str
    penalty_weight: float


@dataclass
class TrainStep:
    """Forward and backward passes of one batch, with gradient accumulation.

    Gradients are left in the networks; the caller steps the optimizers.

    ``losses`` are (entry, module). ``backward`` computes the gradients of a loss. ``micro_batches``
    is the number of micro-batches. ``read_values`` False skips everything that reads tensor values,
    as fake tensors need. With several ``process_group`` the batch is this one's share, and
    gradients are summed over the processes.
    """

    generator: TrainedNetwork
    losses: list[tuple[LossEntry, nn.Module]]
    backward: Callable[[Tensor], None]
    discriminator: TrainedNetwork | None = None
    gan: GanLoss | None = None
    checkpointing: Checkpointing = "none"
    micro_batches: int = 1
    read_values: bool = True
    process_group: ProcessGroup = SINGLE_PROCESS

    def __call__(self, low: Tensor, high: Tensor, step: int) -> dict[str, float]:
        """Accumulate gradients of one batch; return the mean of each unweighted loss.

        ``low`` is (B, 3, H, W), ``high`` (B, 3, H * scale, W * scale), both in 0..1. Raises
        `NotFiniteError` naming a loss that is not finite, and as `TrainedNetwork.seek_gradients`.
        """
        mean_losses: dict[str, float] = {}
        pieces = zip(low.chunk(self.micro_batches), high.chunk(self.micro_batches), strict=True)
        for low_part, high_part in pieces:
            share = len(low_part) / len(low)
            for name, value in self._run_micro_batch(low_part, high_part, step, share).items():
                mean_losses[name] = mean_losses.get(name, 0.0) + value * share
        for side in (self.generator, self.discriminator):
            if side is not None:
                weights = side.network.parameters()
                self.process_group.all_reduce(one.grad for one in weights if one.grad is not None)
        if self.read_values:
            self.generator.check_gradients(step, "network_g")
            if self.discriminator is not None and self.gan is not None and "gan" in mean_losses:
                self.discriminator.check_gradients(step - self.gan.entry.start_iter, "network_d")
        return mean_losses

    def _run_micro_batch(
        self, low: Tensor, high: Tensor, step: int, share: float
    ) -> dict[str, float]:
        with checkpointed(self.generator.network, self.checkpointing):
            prediction = self.generator.forward(low).float()
            losses = {entry.type: loss(prediction, high) for entry, loss in self.losses}
            weights = {entry.type: loss_weight(entry, step) for entry, _ in self.losses}
            adversarial = self._adversarial_loss(prediction, high, step)
            if adversarial is not None:
                losses["gan"], weights["gan"] = adversarial
            values = self._loss_values(losses, step)
            total = torch.stack([losses[name] * weights[name] for name in losses]).sum()
            self.backward(total * (share / self.process_group.world_size))
        if adversarial is not None:
            values |= self._discriminator_backward(prediction.detach(), high, step, share)
        return values

    def _adversarial_loss(
        self, prediction: Tensor, high: Tensor, step: int
    ) -> tuple[Tensor, float] | None:
        """Return the generator's adversarial loss and weight, or None before it starts."""
        if self.gan is None or self.discriminator is None:
            return None
        weight = loss_weight(self.gan.entry, step)
        if not weight:
            return None
        self.discriminator.network.requires_grad_(False)
        fake = self.discriminator.forward(prediction)
        with torch.no_grad():
            real = self.discriminator.forward(high)
        self.discriminator.network.requires_grad_(True)
        return generator_loss(self.gan.kind, fake.float(), real.float()), weight

    def _discriminator_backward(
        self, prediction: Tensor, high: Tensor, step: int, share: float
    ) -> dict[str, float]:
        """Accumulate the discriminator's gradients on real and generated images."""
        assert self.gan is not None and self.discriminator is not None
        penalized = self.gan.penalty_weight > 0
        images = [one.detach().requires_grad_(penalized) for one in (high, prediction)]
        real, fake = (self.discriminator.forward(one).float() for one in images)
        losses = {"discriminator": discriminator_loss(self.gan.kind, real, fake)}
        total = losses["discriminator"]
        if penalized:
            pairs = zip(("penalty_real", "penalty_fake"), (real, fake), images, strict=True)
            for name, logits, image in pairs:
                # Of the mean logit, so that the penalty does not grow with the image size.
                losses[name] = gradient_penalty(logits.mean((1, 2, 3)), image)
                total = total + self.gan.penalty_weight / 2 * losses[name]
        values = self._loss_values(losses, step)
        self.backward(total * (share / self.process_group.world_size))
        return values

    def _loss_values(self, losses: dict[str, Tensor], step: int) -> dict[str, float]:
        if not self.read_values:
            return {}
        values = {name: loss.item() for name, loss in losses.items()}
        values = self.process_group.mean(values, next(iter(losses.values())).device)
        for name, value in values.items():
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"the loss {name} is {value} in step {step}", hint=_NOT_FINITE_HINT
                )
        return values
