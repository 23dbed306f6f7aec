"""The only image of a job, which may be run whole before anything is measured about tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lowtide.core.errors import BudgetError
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.images.planning import PlannedImage
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.jobs.images.settings import ImageSettings
from lowtide.media import ImageFacts
from lowtide.media.discover import IMAGES, FilePair, MediaKind
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.models import SizeRule

if TYPE_CHECKING:
    from lowtide.jobs.images.model_costs import ModelCostFinder

# The receptive field takes 20 runs on 64×64 pixels, or 20 more on nine times that. A larger image
# repays it where tiles turn out to be faster, and takes less memory in them anyway.
_MAX_PIXELS = 1 << 20


class PlannableJob(Protocol):
    """Protocol of a job on images as far as its runs are planned."""

    media_kind: ClassVar[MediaKind]
    budget: Budget

    @classmethod
    def inspect(cls, source: Path, settings: Any) -> ImageFacts:
        """Return the header facts of an input."""
        ...

    def plan_run(self, item: JobItem) -> PlannedImage:
        """Plan the runs of the network on one image, in this process."""
        ...

    def worker_setup(self, device: str, budget: Budget) -> dict[str, Any]:
        """Return what is needed to make the same job in another process, as plain data."""
        ...


@dataclass(frozen=True)
class WholeImage:
    """The only image of a job, of ``size`` (H, W) without padding."""

    make_job: Callable[[PreparedModel, ImageSettings, Budget], PlannableJob]
    settings: ImageSettings
    budget: Budget
    item: JobItem
    size: tuple[int, int]

    def padded_size(self, rule: SizeRule) -> tuple[int, int]:
        """Return (H, W) of the image padded by the model's size rule."""
        rows, columns = rule.padding(*self.size)
        return self.size[0] + rows, self.size[1] + columns

    def traced_costs(
        self, lookup: ModelCostFinder, rule: SizeRule, limit_bytes: int | None
    ) -> ModelCosts | None:
        """Return what traces say of a run of the image, whole or in bands, from the cache or now.

        ``rule`` is that of the model's sizes. None for a network that cannot be traced.
        """
        size = self.padded_size(rule)
        if self.settings.overrides.only_bands:
            return lookup.of_bands(math.prod(size), limit_bytes)
        return lookup.of_whole(size, self.budget.device_bytes // 2)

    def fits(self, prepared: PreparedModel) -> bool:
        """Return whether half of the budget is enough for a run on the whole image.

        ``prepared`` is the model with its `traced_costs`, which is all that bands need.
        """
        if self.settings.overrides.only_bands:
            return True
        half = replace(
            self.budget,
            device_bytes=self.budget.device_bytes // 2,
            host_bytes=self.budget.host_bytes // 2,
        )
        try:
            self.make_job(prepared, self.settings, half).plan_run(self.item)
        except BudgetError:
            return False
        return True


def whole_image(
    job_type: type[PlannableJob],
    settings: ImageSettings,
    budget: Budget,
    pairs: Sequence[FilePair],
    facts: ImageFacts | None,
) -> WholeImage | None:
    """Return the only image of a job, or None where tiles may be needed.

    So where there are several images, or one of more than a million pixels, and where the settings
    ask for tiles, for a device other than the CPU, for less than fp32 or for a plan of
    earlier. ``facts`` are the header of the first input, if it was read.
    """
    plain = (
        settings.strategy in ("auto", "whole", "streamed")
        and settings.precision in ("auto", "fp32")
        and settings.compile != "on"
        and settings.plan_file is None
        and not settings.overrides.requires_tiles
    )
    if not plain or budget.device != "cpu" or len(pairs) != 1 or job_type.media_kind is not IMAGES:
        return None
    pair = pairs[0]
    info = (facts or job_type.inspect(pair.source, settings)).info
    if info.pixels > _MAX_PIXELS:
        return None
    item = JobItem(pair.source, pair.target)
    return WholeImage(job_type, settings, budget, item, (info.height, info.width))
