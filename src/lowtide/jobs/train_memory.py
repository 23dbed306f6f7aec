"""Predict the memory of a training step, and split its batch to fit the budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import BaseModel
from torch import nn

from lowtide.core.errors import BudgetError
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.profiles import DeviceProfile, find_profile
from lowtide.memory.training.options import AUTOCAST_DTYPES
from lowtide.training.traced_step import TracedTrainStep, TrainedNetworks
from lowtide.training.train_config import TrainConfig


class StepPlan(BaseModel):
    """Split of a step's ``batch`` patches into ``micro_batches``, and its memory in bytes."""

    batch: int
    micro_batches: int
    patch_size: int
    predicted_bytes: int
    upper_bytes: int
    budget_bytes: int
    checkpointing: str
    precision: str

    def __str__(self) -> str:
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        kept = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        return (
            f"{self.batch} patches of {self.patch_size} px a step{parts}, {self.precision}{kept}:"
            f" expects {format_bytes(self.predicted_bytes)}"
            f" (at most {format_bytes(self.upper_bytes)}) of {format_bytes(self.budget_bytes)}"
        )


def plan_step(
    config: TrainConfig,
    generator: nn.Module,
    discriminator: nn.Module | None,
    budget: int,
    device: str,
) -> StepPlan:
    """Return the plan with the fewest parts whose upper bound fits ``budget`` bytes.

    Tries only the configured number of parts if there is one.

    Raises:
        BudgetError: No split fits; names the smallest budget that would.
    """
    least: StepPlan | None = None
    networks = TrainedNetworks(config, generator, discriminator)
    profile = find_profile(device)
    for micro_batches in _micro_batch_counts(config):
        plan = _plan(config, networks, micro_batches, budget, profile)
        if plan.upper_bytes <= budget:
            return plan
        least = plan if least is None or plan.upper_bytes < least.upper_bytes else least
    assert least is not None
    need = -(-least.upper_bytes // MIB)
    full = config.train.checkpointing != "none"
    raise BudgetError(
        f"no step fits in {format_bytes(budget)}: {least.batch} patches of {least.patch_size} px in"
        f" {least.micro_batches} micro-batches take up to {format_bytes(least.upper_bytes)}",
        smallest=need * MIB,
        hint=f"--budget {need}MiB" + ("" if full else ", or train.checkpointing: full"),
    )


def _micro_batch_counts(config: TrainConfig) -> Iterator[int]:
    """Yield numbers of parts to try: divisors of the batch, so that parts are equal."""
    data = config.datasets.train
    if data.accum_iter is not None:
        yield min(data.accum_iter, data.batch_size_per_gpu)
        return
    batch = data.batch_size_per_gpu
    yield from (parts for parts in range(1, batch + 1) if batch % parts == 0)


def _plan(
    config: TrainConfig,
    networks: TrainedNetworks,
    micro_batches: int,
    budget: int,
    profile: DeviceProfile,
) -> StepPlan:
    data = config.datasets.train
    batch, side = data.batch_size_per_gpu, data.lq_size
    low, high = (
        torch.empty(batch, 3, one, one, device="meta") for one in (side, side * config.scale)
    )
    step = TracedTrainStep(
        (low, high),
        config,
        micro_batches,
        foreach=profile.kind != "cpu",
        autocast=AUTOCAST_DTYPES.get(config.precision),
    )
    found = traced_estimate(networks, step, profile)
    return StepPlan(
        batch=batch,
        micro_batches=micro_batches,
        patch_size=side,
        predicted_bytes=found.predicted_bytes,
        upper_bytes=found.upper_bytes,
        budget_bytes=budget,
        checkpointing=config.train.checkpointing,
        precision=config.precision,
    )
