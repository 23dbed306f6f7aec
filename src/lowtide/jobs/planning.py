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
from lowtide.jobs.prepare import PreparedModel
from lowtide.jobs.settings import UpscaleSettings
from lowtide.jobs.strategy_cache import StrategyCache
from lowtide.jobs.target_size import TargetSize, target_size
from lowtide.media import ImageFacts, output_cost
from lowtide.memory.budget import Budget
from lowtide.memory.choice import AccuracyRequest, accurate_enough, choose_plan, shortfall
from lowtide.memory.plan import Plan, Refusal
from lowtide.memory.plan_file import PlanFile, check_replay
from lowtide.streaming.planner.band_candidates import BandCandidates
from lowtide.streaming.planner.compile_candidates import with_compile
from lowtide.streaming.planner.graph_candidates import with_cuda_graph
from lowtide.streaming.planner.model_facts import ImageTask, Overrides
from lowtide.streaming.planner.multi_device import on_several_devices
from lowtide.streaming.planner.tile_candidates import tile_candidates
from lowtide.streaming.planner.tile_prefetch import with_prefetch


@dataclass
class ImageTaskPlan:
    """One image with everything that is decided about it before it runs."""

    sizes: TargetSize
    plans: list[Plan]
    plan: Plan
    notes: list[str]

    @property
    def facts(self) -> ImageFacts:
        """The header facts of the input."""
        return self.sizes.facts

    @property
    def made(self) -> ImageInfo:
        """The image that the model produces."""
        return self.sizes.made

    @property
    def written(self) -> ImageInfo:
        """The image that the output file will hold."""
        return self.sizes.written

    @property
    def resize_to(self) -> tuple[int, int] | None:
        """(W, H) to resize to after the model, or None."""
        size = self.written.width, self.written.height
        return None if size == (self.made.width, self.made.height) else size


def plan_image(
    source: Path,
    target: Path,
    prepared: PreparedModel,
    settings: UpscaleSettings,
    budget: Budget,
    *,
    below: int | None = None,
    book: PlanFile | None = None,
    images: int = 1,
) -> ImageTaskPlan:
    """Plan how to run one of ``images`` images; reads only the header of ``source``.

    Args:
        below: Leave out plans whose upper bound is not smaller, after one of that size failed.
        book: Plan file to replay; not used when ``below`` is set.

    Raises:
        ImageError: The input cannot be read.
        OutputError: The result exceeds a limit of the format.
        UsageError: The settings do not suit the image or the model.
        BudgetError: No plan fits.
    """
    sizes = target_size(source, target, settings, prepared.shape.scale)
    facts, made, written = sizes.facts, sizes.made, sizes.written
    notes = list(facts.notes)
    if prepared.network.device == "cpu" and (note := slowdown_note(prepared.precision)):
        notes.append(note)
    resized = made if made != written else None
    if not target.suffix:
        notes.append(f"the name has no suffix: written as {sizes.format}")
    writing = output_cost(
        target, written, settings.encode, resized_from=resized, otherwise=sizes.format
    )
    codecs = tuple((one.usual_bytes, one.resident_bytes) for one in (facts, writing))
    if resized is not None:
        notes.append(
            f"the model outputs {made.width}×{made.height}, which is resized to"
            f" {written.width}×{written.height}"
        )
    if book is not None and below is None:
        plan = _replayed(book, source, facts.info, prepared, budget)
        return ImageTaskPlan(sizes, [plan], plan, notes)
    picture = prepared.picture(facts.info, codecs, facts.scratch_bytes, budget)
    plans, chosen = _chosen(prepared, settings, picture, budget, below, images)
    chosen = chosen.model_copy(update={"model_sha256": prepared.descriptor.sha256})
    if prepared.others and chosen.lanes == 1:
        notes.append(
            f"run on {chosen.device} only: no plan with tiles on several devices was chosen"
        )
    return ImageTaskPlan(sizes, plans, chosen, notes)


def _chosen(
    prepared: PreparedModel,
    settings: UpscaleSettings,
    picture: ImageTask,
    budget: Budget,
    below: int | None,
    images: int = 1,
) -> tuple[list[Plan], Plan]:
    """Return all candidate plans and the one to run, which may be streamed.

    Streamed plans run only if they give the same result as the whole image on a small input.
    """
    wishes, wanted = settings.wishes, settings.wanted
    pricing = BandCandidates(prepared.costs, prepared.shape, picture, prepared.programs)
    plans: list[Plan] = []
    refused: list[Refusal] = []
    if wishes.strategy != "streamed":
        plans = tile_candidates(prepared.costs, prepared.shape, picture, wishes)
        if not prepared.others:
            plans = [_in_flight(plan, settings.streams, budget, below) for plan in plans]
        plans = _in_other_ways(plans, prepared, settings, images)
    if settings.compile == "on" or settings.cuda_graphs:
        how = "captured in CUDA graphs" if settings.cuda_graphs else "compiled"
        refused.append(Refusal(what="streamed", reason=f"streamed networks are not {how}"))
    elif prepared.network.let_go is not None:
        refused.append(
            Refusal(what="streamed", reason="ONNX Runtime runs the whole graph of a file")
        )
    elif is_eight_bits(prepared.precision):
        refused.append(Refusal(what="streamed", reason="8-bit layers do not run in bands"))
    elif why := _not_streamed(plans, wishes, budget, wanted, pricing, images):
        refused.append(Refusal(what="streamed", reason=why))
    elif wishes.strategy in ("auto", "streamed") and not wishes.about_tiles:
        before = StrategyCache(prepared, picture, budget, wanted)
        other = before.again(plans) if below is None else None
        if other is None:
            found = _with_bands(plans, prepared, pricing, budget, wanted, refused, below)
            if below is None:
                before.remember(found[1])
            return found
        reason = f"considered before, when {other} was the better choice"
        refused.append(Refusal(what="streamed", reason=reason))
    return _settled(_below(plans, below), prepared, pricing, budget, wanted, refused)


def _with_bands(
    plans: list[Plan],
    prepared: PreparedModel,
    pricing: BandCandidates,
    budget: Budget,
    wanted: AccuracyRequest,
    refused: list[Refusal],
    below: int | None,
) -> tuple[list[Plan], Plan]:
    """As `_settled`, with streamed candidates; narrow bands only where no others fit."""
    try:
        usual = _below(plans + pricing.candidates(), below)
    except ModelError as error:
        refused.append(Refusal(what="streamed", reason=error.message))
        return _settled(_below(plans, below), prepared, pricing, budget, wanted, refused)
    if any(shortfall(plan, budget) is None for plan in usual):
        try:
            return _settled(usual, prepared, pricing, budget, wanted, list(refused))
        except BudgetError:
            pass  # the exact peaks exceed the drafts that seemed to fit
    narrow = _below(plans + pricing.candidates(small=True), below)
    return _settled(narrow, prepared, pricing, budget, wanted, refused)


def _below(plans: list[Plan], most: int | None) -> list[Plan]:
    """Return the plans below ``most`` bytes, or else the smallest plan."""
    if most is None:
        return plans
    smallest = min(plans, key=lambda plan: plan.upper_bytes)
    return [plan for plan in plans if plan.upper_bytes < most] or [smallest]


def _settled(
    plans: list[Plan],
    prepared: PreparedModel,
    pricing: BandCandidates,
    budget: Budget,
    wanted: AccuracyRequest,
    refused: list[Refusal],
) -> tuple[list[Plan], Plan]:
    """Choose the plan to run; a streamed one is predicted exactly and verified.

    Raises as `choose_plan`.
    """
    told: set[object] = set()
    while True:
        try:
            chosen = choose_plan(plans, budget, wanted, refused)
        except BudgetError:
            # The message has to name the exact bytes of the smallest plan.
            chosen = min(accurate_enough(plans, wanted), key=lambda plan: plan.upper_bytes)
            if chosen.strategy != "streamed" or _draft(chosen) in told:
                raise
        else:
            if chosen.strategy != "streamed":
                return plans, chosen
            try:
                prepared.programs.certificate(*chosen.network_size)
            except ModelError as error:
                refused.append(Refusal(what="streamed", reason=error.message))
                plans = [plan for plan in plans if plan.strategy != "streamed"]
                continue
            if _draft(chosen) in told:
                return plans, chosen
        # Candidates are drafts: with the exact bytes of the best, another may be better.
        exact = pricing.told(chosen)
        told.add(_draft(exact))
        plans = [exact if _draft(plan) == _draft(exact) else plan for plan in plans]


def _in_other_ways(
    plans: list[Plan], prepared: PreparedModel, settings: UpscaleSettings, images: int
) -> list[Plan]:
    """Return ``plans`` for several devices, CUDA graphs or ``torch.compile``.

    Several devices where there are, graphs and compiling where requested; compiled plans are added
    to the others where an earlier run found that compiling may pay.
    """
    facts, compiling = prepared.compiling, settings.compile
    if settings.cuda_graphs:
        return [with_cuda_graph(plan, images) for plan in plans]
    # Assume that all images share a shape until one needs another compilation.
    sharing = 1 if prepared.compiled else images
    if compiling == "on":
        return [with_compile(plan, facts, sharing) for plan in plans]
    if prepared.others:
        return [on_several_devices(plan, 1 + len(prepared.others)) for plan in plans]
    if compiling == "off" or facts is None or facts.ratio >= 1:
        return plans
    return plans + [with_compile(plan, facts, sharing) for plan in plans]


def _in_flight(plan: Plan, streams: int, budget: Budget, below: int | None) -> Plan:
    """Return ``plan`` with as many batches in flight on a GPU as fit the budget."""
    for most in range(streams, 1, -1):
        more = with_prefetch(plan, most)
        if shortfall(more, budget) is None and (below is None or more.upper_bytes < below):
            return more
    return plan


def _not_streamed(
    plans: list[Plan],
    wishes: Overrides,
    budget: Budget,
    wanted: AccuracyRequest,
    pricing: BandCandidates,
    images: int,
) -> str | None:
    """Return why bands are not worth planning, or None if they may save time."""
    if wishes.strategy != "auto" or wishes.about_tiles:
        return None
    able = [
        plan.seconds
        for plan in plans
        if shortfall(plan, budget) is None and (plan.accuracy == "exact" or wanted == "fast")
    ]
    saved = images * (min(able, default=math.inf) - pricing.least_seconds)
    takes = pricing.programs.planning_seconds * pricing.costs.speed
    if saved > takes:
        return None
    return (
        f"not considered: planning it takes about {format_seconds(takes)}, and it would save at"
        f" most {format_seconds(max(saved, 0))}"
    )


def _draft(plan: Plan) -> tuple[object, ...]:
    return plan.banded, plan.heap, plan.tile_width


def _replayed(
    book: PlanFile, source: Path, info: ImageInfo, prepared: PreparedModel, budget: Budget
) -> Plan:
    plan = book.find(source.name, info.width, info.height)
    shape, padded = prepared.shape, prepared.padded(info)
    expected = {
        "model_sha256": prepared.descriptor.sha256,
        "device": prepared.network.device,
        "precision": prepared.precision,
        "scale": shape.scale,
        "padded_height": padded[0],
        "padded_width": padded[1],
        "images_per_tile": shape.images(info),
    }
    plan = plan.model_copy(update={"lanes": min(plan.lanes, 1 + len(prepared.others))})
    return check_replay(plan, expected, budget)
