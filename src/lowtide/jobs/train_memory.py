"""What a step of training will take, and into how many parts its batch has to be cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from lowtide.core.errors import BudgetError
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.estimating.estimate import estimate
from lowtide.memory.tracing.steps import TrainingStep
from lowtide.memory.training.rungs import DTYPES
from lowtide.training.config import TrainConfig


class StepPlan(BaseModel):
    """A step's batch of ``batch`` patches in ``parts``, and the memory that it takes, in bytes."""

    batch: int
    parts: int
    patch: int
    predicted_bytes: int
    upper_bytes: int
    budget_bytes: int
    checkpointing: str
    precision: str

    def __str__(self) -> str:
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        kept = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        return (
            f"{self.batch} patches of {self.patch} px a step{parts}, {self.precision}{kept}:"
            f" expects {format_bytes(self.predicted_bytes)}"
            f" (at most {format_bytes(self.upper_bytes)}) of {format_bytes(self.budget_bytes)}"
        )


class _Both(nn.Module):
    """Generator and discriminator as they are run for the generator's step, which takes most."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, low: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(low)
        return made, self.discriminator(made)


def plan_step(
    config: TrainConfig, generator: nn.Module, discriminator: nn.Module | None, budget: int,
    device: str,
) -> StepPlan:  # fmt: skip
    """The fewest parts whose upper bound fits ``budget`` bytes, or those that are asked for.

    Raises `BudgetError` with the least that would do.
    """
    least: StepPlan | None = None
    for parts in _parts(config):
        plan = _plan(config, generator, discriminator, parts, budget, device)
        if plan.upper_bytes <= budget:
            return plan
        least = plan if least is None or plan.upper_bytes < least.upper_bytes else least
    assert least is not None
    need = -(-least.upper_bytes // MIB)
    full = config.train.checkpointing != "none"
    raise BudgetError(
        f"no step fits in {format_bytes(budget)}: {least.batch} patches of {least.patch} px in"
        f" {least.parts} parts take up to {format_bytes(least.upper_bytes)}",
        smallest=need * MIB,
        hint=f"--budget {need}MiB" + ("" if full else ", or train.checkpointing: full"),
    )


def _parts(config: TrainConfig) -> Iterator[int]:
    """Into how many parts the batch may be cut: each a divisor, so that parts are equal."""
    data = config.datasets.train
    if data.accum_iter is not None:
        yield min(data.accum_iter, data.batch_size_per_gpu)
        return
    batch = data.batch_size_per_gpu
    yield from (parts for parts in range(1, batch + 1) if batch % parts == 0)


def _plan(
    config: TrainConfig, generator: nn.Module, discriminator: nn.Module | None, parts: int,
    budget: int, device: str,
) -> StepPlan:  # fmt: skip
    data = config.datasets.train
    network = generator if discriminator is None else _Both(generator, discriminator)
    count = -(-data.batch_size_per_gpu // parts)
    step = TrainingStep(
        (torch.empty(count, 3, data.lq_size, data.lq_size, device="meta"),),
        checkpointing=config.train.checkpointing, autocast=DTYPES.get(config.precision), ema=True,
    )  # fmt: skip
    found = estimate(network, step, device=device)
    return StepPlan(
        batch=data.batch_size_per_gpu, parts=parts, patch=data.lq_size,
        predicted_bytes=found.predicted_bytes, upper_bytes=found.upper_bytes,
        budget_bytes=budget, checkpointing=config.train.checkpointing,
        precision=config.precision,
    )  # fmt: skip
