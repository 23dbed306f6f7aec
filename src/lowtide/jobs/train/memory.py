"""Predict the memory of a training step, and split its batch to fit the budget."""

from __future__ import annotations

import bisect
import functools

from pydantic import BaseModel

from lowtide.core.errors import BudgetError
from lowtide.core.heap import HeapMode, current_heap_mode, heap_is_tuned
from lowtide.core.units import MIB, format_bytes
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.prediction.operator_costs import roofline_seconds
from lowtide.memory.profiles import DeviceProfile, find_profile
from lowtide.memory.training.options import AUTOCAST_DTYPES, divisors
from lowtide.training.run_config import RunConfig
from lowtide.training.task import TrainTask
from lowtide.training.traced_step import TRACED_MICRO_BATCHES, TaskModules, TracedTrainStep


class TrainStepPlan(BaseModel):
    """Split of a step's batch into ``micro_batches``, and its memory in bytes.

    ``seconds`` is a rough prior of the time of a step, by the arithmetic and the memory traffic of
    its operators at the device's rates.

    ``samples`` says what ``batch`` counts, and ``heap`` how the C heap treats freed blocks on the
    CPU: ``"trim"`` takes less memory and more time.
    """

    batch: int
    micro_batches: int
    samples: str
    predicted_bytes: int
    upper_bytes: int
    budget_bytes: int
    checkpointing: str
    precision: str
    heap: HeapMode | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        kept = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        return (
            f"{self.batch} {self.samples} a step{parts}, {self.precision}{kept}:"
            f" expects {format_bytes(self.predicted_bytes)}"
            f" (at most {format_bytes(self.upper_bytes)}) of {format_bytes(self.budget_bytes)}"
            f"{', returning freed memory' if self.heap == 'trim' else ''}"
        )


def plan_step(
    config: RunConfig,
    task: TrainTask,
    budget: int,
    device: str,
) -> TrainStepPlan:
    """Return the plan with the fewest parts whose upper bound fits ``budget`` bytes.

    Tries only the configured number of parts if there is one. Where no number fits and this
    process's heap keeps freed memory, all are tried again with one that returns it.

    Raises:
        BudgetError: No split fits; names the smallest budget that would.
    """
    _require_room_for_batch(config, task, budget)
    modules = TaskModules(config, task)
    profile = find_profile(device)
    heaps: list[HeapMode] = [current_heap_mode()]
    if profile.kind == "cpu" and heap_is_tuned():
        heaps.append("trim")
    smallest = list[TrainStepPlan]()
    for heap in heaps:
        make = functools.cache(
            functools.partial(_plan, config, task, modules, budget, profile, heap)
        )
        counts = _micro_batch_counts(config)
        if make(counts[0]).upper_bytes <= budget:
            return make(counts[0])
        # The smallest before those between: of a large batch there are a hundred.
        smallest.append(make(counts[-1]))
        if smallest[-1].upper_bytes <= budget:
            fits = bisect.bisect_left(counts, True, key=lambda n: make(n).upper_bytes <= budget)
            return make(counts[fits])
    least = min(smallest, key=lambda plan: plan.upper_bytes)
    need = -(-least.upper_bytes // MIB)
    full = config.train.checkpointing != "none"
    raise BudgetError(
        f"no step fits in {format_bytes(budget)}: {least.batch} {least.samples} in"
        f" {least.micro_batches} micro-batches take up to {format_bytes(least.upper_bytes)}",
        smallest=need * MIB,
        hint=f"--budget {need}MiB" + ("" if full else ", or train.checkpointing: full"),
    )


def _require_room_for_batch(config: RunConfig, task: TrainTask, budget: int) -> None:
    """Refuse a batch that alone takes more than the budget, by `BudgetError`, before any plan."""
    batch = config.datasets.train.batch_size_per_gpu
    taken = batch * sum(one.nbytes for one in task.data.example(1))
    if taken > budget:
        raise BudgetError(
            f"no step fits in {format_bytes(budget)}: {batch:,} {task.title} alone take"
            f" {format_bytes(taken)}",
            hint="a smaller datasets.train.batch_size_per_gpu",
        )


def _micro_batch_counts(config: RunConfig) -> list[int]:
    """Return numbers of parts to try: divisors of the batch, so that parts are equal."""
    data = config.datasets.train
    if data.accum_iter is not None:
        return [min(data.accum_iter, data.batch_size_per_gpu)]
    return divisors(data.batch_size_per_gpu)


def _plan(
    config: RunConfig,
    task: TrainTask,
    modules: TaskModules,
    budget: int,
    profile: DeviceProfile,
    heap: HeapMode,
    micro_batches: int,
) -> TrainStepPlan:
    batch = config.datasets.train.batch_size_per_gpu
    step = TracedTrainStep(
        task.data.example(batch),
        config,
        task.optims,
        micro_batches,
        foreach=profile.kind != "cpu",
        autocast=AUTOCAST_DTYPES.get(config.precision),
    )
    found = traced_estimate(modules, step, profile, heap=heap)
    assert found.trace is not None
    traced = min(micro_batches, TRACED_MICRO_BATCHES)
    seconds = roofline_seconds(found.trace, profile) * micro_batches / traced
    return TrainStepPlan(
        batch=batch,
        micro_batches=micro_batches,
        samples=task.title,
        predicted_bytes=found.predicted_bytes,
        upper_bytes=found.upper_bytes,
        budget_bytes=budget,
        checkpointing=config.train.checkpointing,
        precision=config.precision,
        heap=found.heap,
        seconds=seconds,
    )
