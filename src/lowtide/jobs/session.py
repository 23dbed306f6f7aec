"""State shared by all images of a job, and the images still being written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.planning import ImageTaskPlan
from lowtide.jobs.prepare import PreparedModel, prepare
from lowtide.jobs.settings import UpscaleSettings
from lowtide.memory.budget import Budget
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.meter import CudaMeter, HostMeter, Usage
from lowtide.memory.oom import trim_allocators
from lowtide.memory.plan import Plan
from lowtide.memory.plan_file import PlanFile

if TYPE_CHECKING:
    from lowtide.jobs.finish import ComputedImage

# Fields of a plan that determine the sizes of blocks in the heap.
_SIZES = {
    "padded_width",
    "padded_height",
    "tile_width",
    "tile_height",
    "batch",
    "band_plan",
    "heap",
}


@dataclass
class UpscaleSession:
    """A job's model, settings, budget and meter.

    ``in_flight`` are images that are computed and still being written, oldest first; ``commit`` is
    called with each when it is waited for. ``plan_file`` is the plan file to replay. ``threads`` is
    the number of CPU threads that the devices of an image share; None leaves it unchanged.
    """

    prepared: PreparedModel
    settings: UpscaleSettings
    budget: Budget
    meter: HostMeter | CudaMeter
    progress: ProgressCallback | None
    cancel: Cancel
    scratch: Path | None
    images: int = 1
    plan_file: PlanFile | None = None
    threads: int | None = None
    commit: Callable[[ComputedImage], object] = lambda computed: computed.commit()
    in_flight: list[ComputedImage] = field(default_factory=list)
    _block_sizes: dict[str, Any] = field(default_factory=dict)
    _fp32_session: UpscaleSession | None = None

    def begin(self, plan: Plan) -> None:
        """Start an image: from here its memory counts for the images in flight too.

        Frees what the last image, or a probe, left in the heap and in the GPU's caching allocator,
        unless this plan's blocks have the same sizes: allocating them again would take longer than
        a light network's operators.
        """
        shape = plan.model_dump(include=_SIZES)
        if shape != self._block_sizes:
            trim_allocators(plan.device)
        self._block_sizes = shape
        self.lap()
        for image in self.in_flight:
            image.undisturbed = False

    def lap(self) -> Usage:
        """Return the peak since the last lap, and add it to the images in flight."""
        usage = self.meter.lap()
        for image in self.in_flight:
            image.usage = image.usage.merged(usage)
        return usage

    def writing_row(self) -> LedgerRow:
        """Return the memory of the images that are still being written, as a ledger row."""
        rows = [image.writing_row for image in self.in_flight]
        return LedgerRow(
            name="other images being written",
            place="host",
            origin="known",
            value=sum(row.value for row in rows),
            upper=sum(row.upper for row in rows),
        )

    def make_room(self, task: ImageTaskPlan) -> int:
        """Wait for images in flight until ``task`` fits with the others.

        Returns:
            How many bytes of its rows may wait to be written: all of them, or 0 where rows have
            to be written at once.
        """
        plan, budget = task.plan, self.budget
        # On the CPU host memory is device memory.
        need = plan.bytes_at("host", upper=True)
        limit = budget.device_bytes if plan.device == "cpu" else budget.host_bytes
        streams = self.settings.streams if self.images > 1 else 1
        queue_bytes = task.upscaled.height * task.upscaled.row_bytes if streams > 1 else 0
        if need + queue_bytes > limit:
            queue_bytes = 0
        while self.in_flight and (
            len(self.in_flight) >= streams or need + queue_bytes + self.writing_row().upper > limit
        ):
            self._commit_oldest()
        return queue_bytes

    def in_fp32(self) -> UpscaleSession:
        """Return the same job in fp32, within what the half-precision weights leave."""
        if self._fp32_session is None:
            settings = self.settings.model_copy(update={"precision": "fp32", "plan_file": None})
            taken = self.prepared.costs.weight_bytes
            device_bytes = self.budget.device_bytes - taken
            host_bytes = self.budget.host_bytes - taken * (self.budget.device == "cpu")
            prepared = prepare(
                settings,
                device=self.prepared.network.device,
                cancel=self.cancel,
                limit_bytes=device_bytes // 2,
            )
            prepared.extra_resident_bytes = self.prepared.extra_resident_bytes
            self._fp32_session = replace(
                self,
                prepared=prepared,
                settings=settings,
                plan_file=None,
                budget=replace(self.budget, device_bytes=device_bytes, host_bytes=host_bytes),
            )
        return self._fp32_session

    def commit_all(self) -> None:
        """Wait for all images in flight."""
        while self.in_flight:
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        self.commit(self.in_flight.pop(0))
