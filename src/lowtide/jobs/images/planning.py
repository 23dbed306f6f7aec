"""Plan one image from its header, the file formats, the costs and the budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.target_size import TargetSize
from lowtide.media import ImageFacts
from lowtide.media.image_info import ImageInfo
from lowtide.memory.budget import Budget
from lowtide.memory.choice import choose_plan, plans_below, shortfall
from lowtide.memory.plan import Plan, RefusedCandidate
from lowtide.memory.plan_file import PlanFile, plan_for_replay
from lowtide.streaming.planner.model_facts import ImageTask
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
    if prepared.network.runtime != "torch":
        reason = f"{prepared.network.runtime} runs networks whole or in tiles"
    else:
        from lowtide.jobs.images.band_planning import plan_with_bands

        found = plan_with_bands(plans, prepared, settings, image_task, budget, limit_bytes, images)
        if not isinstance(found, str):
            return found
        reason = found
    only_whole = prepared.costs.only_whole and not overrides.only_bands
    names = ("tiled", "streamed") if only_whole else ("streamed",)
    refused = [RefusedCandidate(title=name, reason=reason) for name in names] if reason else []
    plans = plans_below(plans, limit_bytes)
    return plans, choose_plan(plans, budget, accuracy, refused)


def with_most_in_flight(plan: Plan, streams: int, budget: Budget, limit_bytes: int | None) -> Plan:
    """Return ``plan`` with as many batches in flight on a GPU as fit the budget."""
    for most in range(streams, 1, -1):
        more = with_prefetch(plan, most)
        if shortfall(more, budget) is None and (
            limit_bytes is None or more.upper_bytes < limit_bytes
        ):
            return more
    return plan


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
        from lowtide.memory.cpu_half_precision import slowdown_note

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
