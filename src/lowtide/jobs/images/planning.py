"""Plan one image from its header, the file formats, the costs and the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import ModelError
from lowtide.core.heap import trimming_heap
from lowtide.core.units import format_seconds
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.target_size import TargetSize
from lowtide.media import ImageFacts
from lowtide.media.image_info import ImageInfo
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest, accurate_enough, choose_plan, shortfall
from lowtide.memory.cpu_half_precision import slowdown_note
from lowtide.memory.library_memory import reason_not_to_plan
from lowtide.memory.oom import OutOfMemoryCatcher
from lowtide.memory.plan import Plan, RefusedCandidate
from lowtide.memory.plan_file import PlanFile, plan_for_replay
from lowtide.memory.process_memory import failing_beyond_container
from lowtide.streaming.planner.band_candidates import BandPlanner
from lowtide.streaming.planner.model_facts import ImageTask
from lowtide.streaming.planner.stream_planner import choose_exact
from lowtide.streaming.planner.tile_candidates import tile_candidates
from lowtide.streaming.planner.tile_variants import (
    with_compile,
    with_cuda_graph,
    with_devices,
    with_prefetch,
)


def choose_image_plan(
    prepared: PreparedModel,
    settings: ImageSettings,
    image_task: ImageTask,
    budget: Budget,
    limit_bytes: int | None,
    images: int = 1,
) -> tuple[list[Plan], Plan]:
    """Return all candidate plans and the one to run, which may be streamed.

    Raises as `choose_plan`.
    """
    overrides, accuracy = settings.overrides, settings.accuracy_request
    bands = BandPlanner(prepared.costs, prepared.geometry, image_task, prepared.programs)
    plans: list[Plan] = []
    if not overrides.only_bands:
        plans = tile_candidates(prepared.costs, prepared.geometry, image_task, overrides)
        if not prepared.replicas and prepared.network.device != "cpu":
            plans = [
                with_most_in_flight(plan, settings.streams, budget, limit_bytes) for plan in plans
            ]
        if settings.cuda_graphs:
            plans = [with_cuda_graph(plan, images) for plan in plans]
        elif settings.compile == "on":
            plans = [with_compile(plan, images) for plan in plans]
        elif prepared.replicas:
            plans = [with_devices(plan, 1 + len(prepared.replicas)) for plan in plans]
    reason = _reason_not_streamed(plans, prepared, settings, budget, bands, images)
    if reason is None:
        try:
            # A proof and dry runs left 20 MiB of free blocks to the run.
            with OutOfMemoryCatcher("cpu"), trimming_heap(), failing_beyond_container():
                return _choose_with_bands(plans, bands, budget, accuracy, limit_bytes)
            reason = "memory ran out while bands were planned"
        except ModelError as error:
            reason = error.message
    only_whole = prepared.costs.only_whole and not overrides.only_bands
    names = ("tiled", "streamed") if only_whole else ("streamed",)
    refused = [RefusedCandidate(title=name, reason=reason) for name in names] if reason else []
    plans = _plans_below(plans, limit_bytes)
    return plans, choose_plan(plans, budget, accuracy, refused)


def _choose_with_bands(
    plans: list[Plan],
    bands: BandPlanner,
    budget: Budget,
    accuracy: AccuracyRequest,
    limit_bytes: int | None,
) -> tuple[list[Plan], Plan]:
    """Return ``plans`` with streamed ones, and the best of all, whose bytes are exact.

    Raises:
        ModelError: The network cannot be streamed exactly.
        BudgetError: No plan fits; names the exact bytes of the smallest.
    """
    candidates: list[Plan] = []

    def best() -> Plan:
        nonlocal candidates
        candidates = _plans_below(plans + bands.candidates(), limit_bytes)
        return choose_plan(candidates, budget, accuracy)

    def last_resort() -> Plan:
        for plan in bands.untried():
            below = limit_bytes is None or plan.upper_bytes < limit_bytes
            if below and shortfall(plan, budget) is None:
                return plan
        return min(accurate_enough(candidates, accuracy), key=lambda plan: plan.upper_bytes)

    chosen = choose_exact(best, last_resort, bands.is_exact, bands.dry_run)
    if chosen.strategy.name == "streamed":
        bands.programs.certificate(*chosen.network_size)
    return candidates, chosen


def _plans_below(plans: list[Plan], limit_bytes: int | None) -> list[Plan]:
    """Return the plans below ``limit_bytes`` bytes, or else the smallest plan."""
    if limit_bytes is None or not plans:
        return plans
    smallest = min(plans, key=lambda plan: plan.upper_bytes)
    return [plan for plan in plans if plan.upper_bytes < limit_bytes] or [smallest]


def with_most_in_flight(plan: Plan, streams: int, budget: Budget, limit_bytes: int | None) -> Plan:
    """Return ``plan`` with as many batches in flight on a GPU as fit the budget."""
    for most in range(streams, 1, -1):
        more = with_prefetch(plan, most)
        if shortfall(more, budget) is None and (
            limit_bytes is None or more.upper_bytes < limit_bytes
        ):
            return more
    return plan


def _reason_not_streamed(
    plans: list[Plan],
    prepared: PreparedModel,
    settings: ImageSettings,
    budget: Budget,
    bands: BandPlanner,
    images: int,
) -> str | None:
    """Return why bands are not planned, or None if they are; "" where tiles are requested."""
    overrides, accuracy = settings.overrides, settings.accuracy_request
    if prepared.costs.only_whole and not overrides.only_bands:
        return "not measured: the whole image fits in half of the budget"
    if settings.cuda_graphs or settings.compile == "on":
        how = "captured in CUDA graphs" if settings.cuda_graphs else "compiled"
        return f"streamed networks are not {how}"
    if prepared.network.free_memory is not None:
        return "ONNX Runtime runs the whole graph of a file"
    if overrides.strategy not in ("auto", "streamed") or overrides.requires_tiles:
        return ""
    if overrides.strategy == "auto":
        able = [
            plan.seconds
            for plan in plans
            if shortfall(plan, budget) is None and (plan.accuracy == "exact" or accuracy == "fast")
        ]
        saved = images * (min(able, default=math.inf) - bands.least_seconds)
        takes = prepared.programs.planning_seconds * prepared.costs.time_scale
        if saved <= takes:
            return (
                f"not considered: planning it takes about {format_seconds(takes)}, and it would"
                f" save at most {format_seconds(max(saved, 0))}"
            )
    if no_room := reason_not_to_plan():
        return f"not considered: {no_room}"
    return None


@dataclass
class PlannedImage:
    """One image with everything that is decided about it before it runs.

    ``only_whole`` is whether tiles were not considered, since nothing is known about them.
    """

    sizes: TargetSize
    plans: list[Plan]
    plan: Plan
    notes: list[str]
    replayed: bool = False
    only_whole: bool = False

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller plan can be made after an out-of-memory error."""
        return "smaller plan" in self.plan.strategy.recovery and (
            len(self.plans) > 1 or self.replayed or self.only_whole
        )

    @property
    def result_bytes(self) -> int:
        """Bytes of the model's output in memory."""
        return self.upscaled.height * self.upscaled.row_bytes

    @property
    def writing_bytes(self) -> tuple[int, int]:
        """The usual and the largest bytes of writing the result's file."""
        return self.sizes.writing.typical_bytes, self.sizes.writing.resident_bytes

    @property
    def facts(self) -> ImageFacts:
        """The header facts of the input."""
        return self.sizes.facts

    @property
    def upscaled(self) -> ImageInfo:
        """The image that the model produces."""
        return self.sizes.upscaled

    @property
    def output(self) -> ImageInfo:
        """The image that the output file will hold."""
        return self.sizes.output

    @property
    def resize_to(self) -> tuple[int, int] | None:
        """(W, H) to resize to after the model, or None."""
        return self.sizes.resize_to


def plan_image(
    source: Path,
    target: Path,
    sizes: TargetSize,
    prepared: PreparedModel,
    settings: ImageSettings,
    budget: Budget,
    *,
    inputs: int | None = None,
    limit_bytes: int | None = None,
    plan_file: PlanFile | None = None,
    images: int = 1,
) -> PlannedImage:
    """Plan how to run one of ``images`` images; reads nothing of ``source``.

    Args:
        sizes: What the header of ``source`` says, and of the result.
        inputs: Network inputs made of each pixel, by default those of the model's adapter.
        limit_bytes: Leave out plans whose upper bound is not smaller, after one of that size
            failed.
        plan_file: Plan file to replay; not used when ``limit_bytes`` is set.

    Raises:
        UsageError: The plan file does not suit the image or the model.
        BudgetError: No plan fits.
    """
    facts, upscaled, output = sizes.facts, sizes.upscaled, sizes.output
    notes = [*facts.notes, *filter(None, [budget.note])]
    if prepared.network.device == "cpu" and prepared.precision != "fp32":
        notes += filter(None, [slowdown_note(prepared.precision)])
    if not target.suffix:
        notes.append(f"the name has no suffix: written as {sizes.format}")
    if sizes.resize_to is not None:
        notes.append(
            f"the model outputs {upscaled.width}×{upscaled.height}, which is resized to"
            f" {output.width}×{output.height}"
        )
    image_task = prepared.image_task(sizes, budget, inputs)
    if plan_file is not None and limit_bytes is None:
        plan = _replay(plan_file, source, image_task, prepared, budget)
        return PlannedImage(sizes, [plan], plan, notes, replayed=True)
    plans, chosen = choose_image_plan(prepared, settings, image_task, budget, limit_bytes, images)
    chosen = chosen.model_copy(update={"model_sha256": prepared.descriptor.sha256})
    if prepared.replicas and chosen.strategy.device_count == 1:
        notes.append(
            f"run on {chosen.device} only: no plan with tiles on several devices was chosen"
        )
    return PlannedImage(
        sizes,
        plans,
        chosen,
        notes,
        replayed=plan_file is not None,
        only_whole=prepared.costs.only_whole and not settings.overrides.only_bands,
    )


def _replay(
    plan_file: PlanFile,
    source: Path,
    image_task: ImageTask,
    prepared: PreparedModel,
    budget: Budget,
) -> Plan:
    height, width, _ = image_task.shape
    plan = plan_file.find(source.name, width, height)
    expected = {
        "model_sha256": prepared.descriptor.sha256,
        "device": prepared.network.device,
        "precision": prepared.precision,
        **dict(prepared.geometry.of_image(image_task)),
    }
    if plan.strategy.device_count > 1:
        here = 1 + len(prepared.replicas)
        plan = plan.with_strategy(device_count=min(plan.strategy.device_count, here))
    return plan_for_replay(plan, expected, budget)
