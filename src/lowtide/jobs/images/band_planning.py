"""Plans of one image in bands of rows, beside those of the whole image and of tiles."""

from __future__ import annotations

import math

from lowtide.core.errors import ModelError
from lowtide.core.heap import trimming_heap
from lowtide.core.units import format_seconds
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.settings import ImageSettings
from lowtide.memory.budget import Budget
from lowtide.memory.choice import (
    AccuracyRequest,
    accurate_enough,
    choose_plan,
    plans_below,
    shortfall,
)
from lowtide.memory.library_memory import reason_not_to_plan
from lowtide.memory.oom import OutOfMemoryCatcher
from lowtide.memory.plan import Plan
from lowtide.memory.process_memory import failing_beyond_container
from lowtide.streaming.planner.band_candidates import BandPlanner
from lowtide.streaming.planner.model_facts import ImageTask
from lowtide.streaming.planner.stream_planner import choose_exact


def plan_with_bands(
    plans: list[Plan],
    prepared: PreparedModel,
    settings: ImageSettings,
    image_task: ImageTask,
    budget: Budget,
    limit_bytes: int | None,
    images: int,
) -> tuple[list[Plan], Plan] | str:
    """Return ``plans`` with those in bands, and the one to run; or why there are no bands.

    That is "" where tiles are requested.

    Raises:
        BudgetError: No plan fits; names the exact bytes of the smallest.
    """
    assert prepared.programs is not None
    bands = BandPlanner(prepared.costs, prepared.geometry, image_task, prepared.programs)
    reason = _reason_not_streamed(plans, prepared, settings, budget, bands, images)
    if reason is not None:
        return reason
    try:
        # A proof and dry runs left 20 MiB of free blocks to the run.
        with OutOfMemoryCatcher("cpu"), trimming_heap(), failing_beyond_container():
            return _choose_with_bands(plans, bands, budget, settings.accuracy_request, limit_bytes)
    except ModelError as error:
        return error.message
    return "memory ran out while bands were planned"


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
        candidates = plans_below(plans + bands.candidates(), limit_bytes)
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
        takes = bands.programs.planning_seconds * prepared.costs.time_scale
        if saved <= takes:
            return (
                f"not considered: planning it takes about {format_seconds(takes)}, and it would"
                f" save at most {format_seconds(max(saved, 0))}"
            )
    if no_room := reason_not_to_plan():
        return f"not considered: {no_room}"
    return None
