"""Plan one image from its header, the file formats, the costs and the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import BudgetError, ModelError
from lowtide.core.precision import is_eight_bits
from lowtide.core.signal import ImageInfo
from lowtide.core.units import format_seconds
from lowtide.jobs.cpu_half_precision import slowdown_note
from lowtide.jobs.prepared import PreparedModel
from lowtide.jobs.strategy_cache import StrategyCache
from lowtide.jobs.target_size import TargetSize, target_size
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.media import ImageFacts, output_cost
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest, accurate_enough, choose_plan, shortfall
from lowtide.memory.plan import Plan, Refusal
from lowtide.memory.plan_file import PlanFile, check_replay
from lowtide.streaming.planner.band_candidates import BandCandidates
from lowtide.streaming.planner.compile_candidates import with_compile
from lowtide.streaming.planner.graph_candidates import with_cuda_graph
from lowtide.streaming.planner.model_facts import ImageTask, Overrides
from lowtide.streaming.planner.multi_device import with_devices
from lowtide.streaming.planner.tile_candidates import tile_candidates
from lowtide.streaming.planner.tile_prefetch import with_prefetch


@dataclass
class ImageTaskPlan:
    """One image with everything that is decided about it before it runs."""

    sizes: TargetSize
    plans: list[Plan]
    plan: Plan
    notes: list[str]
    replayed: bool = False

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller plan can be made after an out-of-memory error."""
        return "smaller plan" in self.plan.recovery and (len(self.plans) > 1 or self.replayed)

    @property
    def result_bytes(self) -> int:
        """Bytes of the model's output in memory."""
        return self.upscaled.height * self.upscaled.row_bytes

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
        size = self.output.width, self.output.height
        return None if size == (self.upscaled.width, self.upscaled.height) else size


def plan_image(
    source: Path,
    target: Path,
    prepared: PreparedModel,
    settings: UpscaleSettings,
    budget: Budget,
    *,
    limit_bytes: int | None = None,
    plan_file: PlanFile | None = None,
    images: int = 1,
) -> ImageTaskPlan:
    """Plan how to run one of ``images`` images; reads only the header of ``source``.

    Args:
        limit_bytes: Leave out plans whose upper bound is not smaller, after one of that size
        failed. plan_file: Plan file to replay; not used when ``limit_bytes`` is set.

    Raises:
        ImageError: The input cannot be read.
        OutputError: The result exceeds a limit of the format.
        UsageError: The settings do not suit the image or the model.
        BudgetError: No plan fits.
    """
    sizes = target_size(source, target, settings, prepared.geometry.scale)
    facts, upscaled, output = sizes.facts, sizes.upscaled, sizes.output
    notes = list(facts.notes)
    if prepared.network.device == "cpu" and (note := slowdown_note(prepared.precision)):
        notes.append(note)
    resized = upscaled if upscaled != output else None
    if not target.suffix:
        notes.append(f"the name has no suffix: written as {sizes.format}")
    writing = output_cost(
        target, output, settings.encode_options, resized_from=resized, default_format=sizes.format
    )
    codecs = tuple((one.typical_bytes, one.resident_bytes) for one in (facts, writing))
    if resized is not None:
        notes.append(
            f"the model outputs {upscaled.width}×{upscaled.height}, which is resized to"
            f" {output.width}×{output.height}"
        )
    if plan_file is not None and limit_bytes is None:
        plan = _replay(plan_file, source, facts.info, prepared, budget)
        return ImageTaskPlan(sizes, [plan], plan, notes, replayed=True)
    image_task = prepared.image_task(facts.info, codecs, facts.scratch_bytes, budget)
    plans, chosen = _choose(prepared, settings, image_task, budget, limit_bytes, images)
    chosen = chosen.model_copy(update={"model_sha256": prepared.descriptor.sha256})
    if prepared.replicas and chosen.device_count == 1:
        notes.append(
            f"run on {chosen.device} only: no plan with tiles on several devices was chosen"
        )
    return ImageTaskPlan(sizes, plans, chosen, notes, replayed=plan_file is not None)


def _choose(
    prepared: PreparedModel,
    settings: UpscaleSettings,
    image_task: ImageTask,
    budget: Budget,
    limit_bytes: int | None,
    images: int = 1,
) -> tuple[list[Plan], Plan]:
    """Return all candidate plans and the one to run, which may be streamed.

    Streamed plans run only if they give the same result as the whole image on a small input.
    """
    overrides, accuracy = settings.overrides, settings.accuracy_request
    band_candidates = BandCandidates(
        prepared.costs, prepared.geometry, image_task, prepared.programs
    )
    plans: list[Plan] = []
    refused: list[Refusal] = []
    if overrides.strategy != "streamed":
        plans = tile_candidates(prepared.costs, prepared.geometry, image_task, overrides)
        if not prepared.replicas:
            plans = [
                _with_most_in_flight(plan, settings.streams, budget, limit_bytes) for plan in plans
            ]
        plans = _specialized_plans(plans, prepared, settings, images)
    if settings.compile == "on" or settings.cuda_graphs:
        how = "captured in CUDA graphs" if settings.cuda_graphs else "compiled"
        refused.append(Refusal(title="streamed", reason=f"streamed networks are not {how}"))
    elif prepared.network.free_memory is not None:
        refused.append(
            Refusal(title="streamed", reason="ONNX Runtime runs the whole graph of a file")
        )
    elif is_eight_bits(prepared.precision):
        refused.append(Refusal(title="streamed", reason="8-bit layers do not run in bands"))
    elif why := _reason_not_streamed(plans, overrides, budget, accuracy, band_candidates, images):
        refused.append(Refusal(title="streamed", reason=why))
    elif overrides.strategy in ("auto", "streamed") and not overrides.requires_tiles:
        cache = StrategyCache(prepared, image_task, budget, accuracy)
        cached_title = cache.get(plans) if limit_bytes is None else None
        if cached_title is None:
            found = _choose_with_bands(
                plans, prepared, band_candidates, budget, accuracy, refused, limit_bytes
            )
            if limit_bytes is None:
                cache.put(found[1])
            return found
        reason = f"considered before, when {cached_title} was the better choice"
        refused.append(Refusal(title="streamed", reason=reason))
    return _choose_verified(
        _plans_below(plans, limit_bytes), prepared, band_candidates, budget, accuracy, refused
    )


def _choose_with_bands(
    plans: list[Plan],
    prepared: PreparedModel,
    band_candidates: BandCandidates,
    budget: Budget,
    accuracy: AccuracyRequest,
    refused: list[Refusal],
    limit_bytes: int | None,
) -> tuple[list[Plan], Plan]:
    """As `_choose_verified`, with streamed candidates; narrow bands only where no others fit."""
    try:
        usual = _plans_below(plans + band_candidates.candidates(), limit_bytes)
    except ModelError as error:
        refused.append(Refusal(title="streamed", reason=error.message))
        return _choose_verified(
            _plans_below(plans, limit_bytes), prepared, band_candidates, budget, accuracy, refused
        )
    if any(shortfall(plan, budget) is None for plan in usual):
        try:
            return _choose_verified(
                usual, prepared, band_candidates, budget, accuracy, list(refused)
            )
        except BudgetError:
            pass  # the exact peaks exceed the drafts that seemed to fit
    narrow = _plans_below(plans + band_candidates.candidates(low_memory=True), limit_bytes)
    return _choose_verified(narrow, prepared, band_candidates, budget, accuracy, refused)


def _plans_below(plans: list[Plan], limit_bytes: int | None) -> list[Plan]:
    """Return the plans below ``limit_bytes`` bytes, or else the smallest plan."""
    if limit_bytes is None:
        return plans
    smallest = min(plans, key=lambda plan: plan.upper_bytes)
    return [plan for plan in plans if plan.upper_bytes < limit_bytes] or [smallest]


def _choose_verified(
    plans: list[Plan],
    prepared: PreparedModel,
    band_candidates: BandCandidates,
    budget: Budget,
    accuracy: AccuracyRequest,
    refused: list[Refusal],
) -> tuple[list[Plan], Plan]:
    """Choose the plan to run; a streamed one is predicted exactly and verified.

    Raises as `choose_plan`.
    """
    dry_run_keys: set[object] = set()
    while True:
        try:
            chosen = choose_plan(plans, budget, accuracy, refused)
        except BudgetError:
            # The message has to name the exact bytes of the smallest plan.
            chosen = min(accurate_enough(plans, accuracy), key=lambda plan: plan.upper_bytes)
            if chosen.strategy != "streamed" or _draft_key(chosen) in dry_run_keys:
                raise
        else:
            if chosen.strategy != "streamed":
                return plans, chosen
            try:
                prepared.programs.certificate(*chosen.network_size)
            except ModelError as error:
                refused.append(Refusal(title="streamed", reason=error.message))
                plans = [plan for plan in plans if plan.strategy != "streamed"]
                continue
            if _draft_key(chosen) in dry_run_keys:
                return plans, chosen
        # Candidates are drafts: with the exact bytes of the best, another may be better.
        exact = band_candidates.with_dry_run(chosen)
        dry_run_keys.add(_draft_key(exact))
        plans = [exact if _draft_key(plan) == _draft_key(exact) else plan for plan in plans]


def _specialized_plans(
    plans: list[Plan], prepared: PreparedModel, settings: UpscaleSettings, images: int
) -> list[Plan]:
    """Return ``plans`` for several devices, CUDA graphs or ``torch.compile``.

    Several devices where there are, graphs and compiling where requested; compiled plans are added
    to the others where an earlier run found that compiling may pay.
    """
    facts, compiling = prepared.specialized.gain, settings.compile
    if settings.cuda_graphs:
        return [with_cuda_graph(plan, images) for plan in plans]
    # Assume that all images share a shape until one needs another compilation.
    sharing = 1 if prepared.specialized.compiled else images
    if compiling == "on":
        return [with_compile(plan, facts, sharing) for plan in plans]
    if prepared.replicas:
        return [with_devices(plan, 1 + len(prepared.replicas)) for plan in plans]
    if compiling == "off" or facts is None or facts.ratio >= 1:
        return plans
    return plans + [with_compile(plan, facts, sharing) for plan in plans]


def _with_most_in_flight(plan: Plan, streams: int, budget: Budget, limit_bytes: int | None) -> Plan:
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
    overrides: Overrides,
    budget: Budget,
    accuracy: AccuracyRequest,
    band_candidates: BandCandidates,
    images: int,
) -> str | None:
    """Return why bands are not worth planning, or None if they may save time."""
    if overrides.strategy != "auto" or overrides.requires_tiles:
        return None
    able = [
        plan.seconds
        for plan in plans
        if shortfall(plan, budget) is None and (plan.accuracy == "exact" or accuracy == "fast")
    ]
    saved = images * (min(able, default=math.inf) - band_candidates.least_seconds)
    takes = band_candidates.programs.planning_seconds * band_candidates.costs.time_scale
    if saved > takes:
        return None
    return (
        f"not considered: planning it takes about {format_seconds(takes)}, and it would save at"
        f" most {format_seconds(max(saved, 0))}"
    )


def _draft_key(plan: Plan) -> tuple[object, ...]:
    return plan.band_plan, plan.heap, plan.tile_width


def _replay(
    plan_file: PlanFile, source: Path, info: ImageInfo, prepared: PreparedModel, budget: Budget
) -> Plan:
    plan = plan_file.find(source.name, info.width, info.height)
    shape, padded = prepared.geometry, prepared.padded_size(info)
    expected = {
        "model_sha256": prepared.descriptor.sha256,
        "device": prepared.network.device,
        "precision": prepared.precision,
        "scale": shape.scale,
        "padded_height": padded[0],
        "padded_width": padded[1],
        "images_per_tile": shape.images(info),
    }
    plan = plan.model_copy(
        update={"device_count": min(plan.device_count, 1 + len(prepared.replicas))}
    )
    return check_replay(plan, expected, budget)
