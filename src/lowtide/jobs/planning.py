"""From a file to a plan: its header, the formats' prices, the model's costs, the budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import ImageError
from lowtide.core.rows import ImageInfo
from lowtide.jobs.prepare import Prepared
from lowtide.jobs.settings import UpscaleSettings
from lowtide.media import ImageFacts, check_output, inspect_image, output_cost
from lowtide.memory.budget import Budget
from lowtide.memory.plan import Plan, choose
from lowtide.memory.replay import PlanBook, check_replay
from lowtide.streaming.channels import ChannelPlan
from lowtide.streaming.pricing import candidates


@dataclass
class Task:
    """One image with everything that was decided about it before it runs."""

    facts: ImageFacts
    made: ImageInfo
    written: ImageInfo
    plans: list[Plan]
    plan: Plan
    notes: list[str]

    @property
    def resize_to(self) -> tuple[int, int] | None:
        """(width, height) to resize to after the model, or None."""
        size = self.written.width, self.written.height
        return None if size == (self.made.width, self.made.height) else size


def plan_image(
    source: Path, target: Path, prepared: Prepared, settings: UpscaleSettings, budget: Budget,
    *, below: int | None = None, book: PlanBook | None = None,
) -> Task:  # fmt: skip
    """Decide how one image will be run. Reads only its header.

    ``below`` leaves out plans whose upper bound is not smaller, after one that size failed; a
    plan of ``book`` is taken as it is until then. Raises `ImageError`, `OutputError` (a format's
    limit), `UsageError` and `BudgetError`.
    """
    facts = inspect_image(source, max_pixels=settings.max_pixels)
    info, scale = facts.info, prepared.shape.scale
    made = ImageInfo(info.width * scale, info.height * scale, info.bands, info.sample)
    width, height = settings.target_size(info, scale)
    written = ImageInfo(width, height, info.bands, info.sample)
    if written.pixels > settings.max_pixels * 64:
        raise ImageError(
            f"{source}: the result would be {width}×{height} pixels, over 64 times --max-pixels",
            hint="a smaller --scale, or a larger --max-pixels",
        )
    check_output(target, written)
    notes = list(facts.notes)
    resized = made if made != written else None
    writing = output_cost(target, written, settings.encode, resized_from=resized)
    codec = facts.resident_bytes + writing.resident_bytes
    if resized is not None:
        notes.append(
            f"the model makes {made.width}×{made.height}, then resized to {width}×{height}"
        )
    if book is not None and below is None:
        plan = _replayed(book, source, info, prepared, budget)
        return Task(facts, made, written, [plan], plan, notes)
    picture = prepared.picture(info, codec, facts.scratch_bytes, budget)
    plans = candidates(prepared.costs, prepared.shape, picture, settings.wishes)
    if below is not None:
        smallest = min(plans, key=lambda plan: plan.upper_bytes)
        plans = [plan for plan in plans if plan.upper_bytes < below] or [smallest]
    chosen = choose(plans, budget)
    chosen = chosen.model_copy(update={"model_sha256": prepared.descriptor.sha256})
    return Task(facts, made, written, plans, chosen, notes)


def _replayed(
    book: PlanBook, source: Path, info: ImageInfo, prepared: Prepared, budget: Budget
) -> Plan:
    plan = book.find(source.name, info.width, info.height)
    shape, padded = prepared.shape, prepared.padded(info)
    expected = {
        "model_sha256": prepared.descriptor.sha256, "device": prepared.network.device,
        "precision": prepared.precision, "scale": shape.scale,
        "padded_height": padded[0], "padded_width": padded[1],
        "images_per_tile": ChannelPlan(info.bands, shape.in_channels, shape.out_channels).images,
    }  # fmt: skip
    return check_replay(plan, expected, budget)
