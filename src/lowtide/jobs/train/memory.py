"""Predict the memory of a training step, and split its batch to fit the budget."""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from lowtide.core.errors import BudgetError
from lowtide.core.heap import HeapMode, current_heap_mode, heap_is_tuned
from lowtide.core.units import MIB, format_bytes, format_seconds
from lowtide.memory.prediction.estimate import traced_estimate
from lowtide.memory.prediction.operator_costs import roofline_seconds
from lowtide.memory.profiles import DeviceProfile, find_profile
from lowtide.memory.training.fit_search import TracesBySettings
from lowtide.memory.training.options import (
    AUTOCAST_DTYPES,
    OptionChange,
    StepMemorySettings,
    divisors,
    option_changes,
)
from lowtide.training.run_config import RunConfig
from lowtide.training.task import TrainTask
from lowtide.training.traced_step import TRACED_MICRO_BATCHES, TaskModules, TracedTrainStep

if TYPE_CHECKING:
    from torch import nn

# Options of modules that a training's configuration does not have: it steps its own optimizers,
# keeps the average on its device, and has inputs of one size.
_OF_MODULES = (
    "fused optimizer",
    "validation one by one",
    "EMA on the host",
    "smaller images",
    "fewer diffusion steps",
)


class TrainStepPlan(BaseModel):
    """Split of a step's batch into ``micro_batches``, and its memory in bytes.

    ``seconds`` is a rough prior of the time of a step, by the arithmetic and the memory traffic of
    its operators at the device's rates, ``measured_seconds`` that of a step that was run.

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
    measured_seconds: float | None = None

    def __str__(self) -> str:
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        kept = "" if self.checkpointing == "none" else f", {self.checkpointing} checkpointing"
        return (
            f"{self.batch} {self.samples} a step{parts}, {self.precision}{kept}:"
            f" expects {format_bytes(self.predicted_bytes)}"
            f" (at most {format_bytes(self.upper_bytes)}) of {format_bytes(self.budget_bytes)}"
            f"{', returning freed memory' if self.heap == 'trim' else ''}"
        )

    def time_text(self, steps: int) -> str:
        """Return the expected time of so many steps, and whether a step was measured."""
        measured = self.measured_seconds is not None
        once = self.measured_seconds if self.measured_seconds is not None else self.seconds
        how = "measured here" if measured else "estimated, not measured"
        return f"roughly {format_seconds(once * steps)}, {once:.2g} s a step: {how}"


@dataclass(frozen=True)
class TrainTaskVariants:
    """Steps of a training's task with other settings: `StepVariants` of a configuration.

    ``modules`` are those of the task, ``foreach`` as in `TracedTrainStep`. The step as requested is
    run in ``micro_batches``, by a process with ``heap``.
    """

    config: RunConfig
    task: TrainTask
    modules: TaskModules
    foreach: bool
    micro_batches: int = 1
    heap: HeapMode | None = None

    @property
    def requested(self) -> StepMemorySettings:
        """Settings of the step; its batch is a micro-batch."""
        config = self.config
        return StepMemorySettings(
            batch=-(-config.datasets.train.batch_size_per_gpu // self.micro_batches),
            size=None,
            accumulate=self.micro_batches,
            optimizer="adamw-foreach" if self.foreach else "adamw",
            autocast=None if config.precision == "fp32" else config.precision,
            checkpointing=config.train.checkpointing,
            ema="device",
            validation=None,
        )

    def changes(self, profile: DeviceProfile) -> Iterator[OptionChange]:
        """Iterate over the options that the configuration has, in the order of trial."""
        _, step, _ = self.build(self.requested)
        for one in option_changes(
            self.requested, step, self.modules, profile, resizable=True, multiple=1
        ):
            if one.name not in _OF_MODULES:
                yield one

    def build(self, settings: StepMemorySettings) -> tuple[nn.Module, TracedTrainStep, int]:
        """Return the modules, the step and how many of its micro-batches it traces."""
        train = self.config.train.model_copy(update={"checkpointing": settings.checkpointing})
        precision = settings.autocast or "fp32"
        config = self.config.model_copy(update={"train": train, "precision": precision})
        step = TracedTrainStep(
            self.task.data.example(config.datasets.train.batch_size_per_gpu),
            config,
            self.task.optims,
            settings.accumulate,
            foreach=self.foreach,
            autocast=AUTOCAST_DTYPES.get(precision),
        )
        return self.modules, step, min(settings.accumulate, TRACED_MICRO_BATCHES)


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
    plan = smallest_plan(config, task, budget, find_profile(device))
    if plan.upper_bytes <= budget:
        return plan
    need = -(-plan.upper_bytes // MIB)
    full = config.train.checkpointing != "none"
    raise BudgetError(
        f"no step fits in {format_bytes(budget)}: {plan.batch} {plan.samples} in"
        f" {plan.micro_batches} micro-batches take up to {format_bytes(plan.upper_bytes)}",
        smallest=need * MIB,
        hint=f"--budget {need}MiB" + ("" if full else ", or train.checkpointing: full"),
    )


def smallest_plan(
    config: RunConfig,
    task: TrainTask,
    budget: int,
    profile: DeviceProfile,
    traces: TracesBySettings | None = None,
) -> TrainStepPlan:
    """Return the plan of `plan_step`, or where none fits the one that takes least.

    ``traces`` are as in `find_fit`.

    Raises:
        BudgetError: The batch alone takes more than the budget.
    """
    _require_room_for_batch(config, task, budget)
    modules = TaskModules(config, task)
    shared: TracesBySettings = defaultdict(list) if traces is None else traces
    heaps: list[HeapMode] = [current_heap_mode()]
    if profile.kind == "cpu" and heap_is_tuned():
        heaps.append("trim")
    smallest = list[TrainStepPlan]()
    for heap in heaps:
        make = functools.cache(
            functools.partial(_plan, config, task, modules, budget, profile, shared, heap)
        )
        counts = _micro_batch_counts(config)
        if make(counts[0]).upper_bytes <= budget:
            return make(counts[0])
        # The smallest before those between: of a large batch there are a hundred.
        smallest.append(make(counts[-1]))
        if smallest[-1].upper_bytes <= budget:
            fits = bisect.bisect_left(counts, True, key=lambda n: make(n).upper_bytes <= budget)
            return make(counts[fits])
    return min(smallest, key=lambda plan: plan.upper_bytes)


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
    traces: TracesBySettings,
    heap: HeapMode,
    micro_batches: int,
) -> TrainStepPlan:
    foreach = profile.kind != "cpu"
    variants = TrainTaskVariants(config, task, modules, foreach, micro_batches, heap)
    settings = variants.requested
    _, step, traced = variants.build(settings)
    found = traced_estimate(modules, step, profile, heap=heap, traced=traces[settings])
    assert found.trace is not None
    return TrainStepPlan(
        batch=config.datasets.train.batch_size_per_gpu,
        micro_batches=micro_batches,
        samples=task.title,
        predicted_bytes=found.predicted_bytes,
        upper_bytes=found.upper_bytes,
        budget_bytes=budget,
        checkpointing=config.train.checkpointing,
        precision=config.precision,
        heap=found.heap,
        seconds=roofline_seconds(found.trace, profile) * micro_batches / traced,
    )
