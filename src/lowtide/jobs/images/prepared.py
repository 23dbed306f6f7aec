"""A model that is ready to run: its network, and what was measured about it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from lowtide.core.errors import ModelError
from lowtide.core.heap import HeapMode, current_heap_mode
from lowtide.core.option import Precision
from lowtide.core.progress import report_phase
from lowtide.core.units import format_seconds
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.engine.journal import JobJournal
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.images.adapter import ImageAdapter, NoisyImageAdapter
from lowtide.jobs.images.target_size import TargetSize
from lowtide.media.image_info import ImageInfo
from lowtide.memory.budget import Budget
from lowtide.memory.costs import ModelCosts
from lowtide.memory.plan import Plan
from lowtide.memory.prediction.calibration import BoundCalibration, RunBounds, RunKind
from lowtide.models import ModelDescriptor
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry
from lowtide.streaming.tiles.network import RunnableNetwork

if TYPE_CHECKING:
    from lowtide.streaming.planner.program_cache import StreamPlannerCache

# Share of the budget for rows that wait to be run or written.
_ROW_SHARE = 0.03


class PlanMeasurements(BaseModel):
    """All that plans depend on and that differs a little each time it is measured.

    A job that continues another, or runs in another process, takes them over, and so plans equally.

    Attributes:
        costs: Memory and time of the model.
        bounds: Upper bounds of past runs in such a heap.
        heap: How the C heap of the process that measured treats freed blocks.
        extra_resident_bytes: Host memory that became resident with the model and is not weights,
            such as kernels that were built while its parts were compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    costs: ModelCosts
    bounds: dict[RunKind, BoundCalibration | None]
    extra_resident_bytes: int
    heap: HeapMode

    def hold_for(self, sha256: str, device: str, precision: str) -> bool:
        """Return whether they hold for this model, device and precision in this process's heap."""
        costs, heap = self.costs, current_heap_mode()
        given = costs.sha256, costs.device, costs.precision, self.heap
        return given == (sha256, device, precision, heap)

    def on_device(self, device: str) -> PlanMeasurements:
        """Return the same for an equal device of another name."""
        return self.model_copy(update={"costs": self.costs.model_copy(update={"device": device})})

    def of_weights(self, sha256: str) -> PlanMeasurements:
        """Return the same for other weights of the same network."""
        return self.model_copy(update={"costs": self.costs.model_copy(update={"sha256": sha256})})


@dataclass(frozen=True)
class PreparedModel:
    """A model on its device with its measured costs.

    ``replicas`` are copies of the network on further devices. ``bounds`` are the upper bounds of
    past runs, without an entry where there are none. ``float_copies`` counts copies of an image's
    color in float32 that the job keeps on disk, between which the network runs. ``specialized`` are
    the networks that were compiled or captured, by the shape of their inputs.
    """

    descriptor: ModelDescriptor
    network: RunnableNetwork
    geometry: ModelGeometry
    costs: ModelCosts
    precision: Precision
    programs: StreamPlannerCache | None = None
    bounds: dict[RunKind, RunBounds] = field(default_factory=dict)
    extra_resident_bytes: int = 0
    replicas: tuple[RunnableNetwork, ...] = ()
    float_copies: int = 0
    specialized: dict[tuple[int, ...], RunnableNetwork] = field(default_factory=dict)

    @property
    def measurements(self) -> PlanMeasurements:
        """What was measured, to prepare the model equally."""
        return PlanMeasurements(
            costs=self.costs,
            bounds={kind: bounds.current_heap for kind, bounds in self.bounds.items()},
            extra_resident_bytes=self.extra_resident_bytes,
            heap=current_heap_mode(),
        )

    def adapter(self, info: ImageInfo) -> ImageAdapter:
        """Return the conversion between images of this kind and the network."""
        denoises = self.descriptor.noise is not None
        kind = NoisyImageAdapter if denoises else ImageAdapter
        return kind(info, self.geometry.in_channels)

    def network_for(
        self, plan: Plan, pipeline: JobPipeline, item: JobItem, notes: list[str], *, required: bool
    ) -> RunnableNetwork:
        """Return the network as ``plan`` has it: compiled, as a CUDA graph, or plain.

        Compiled once for each shape of tiles. Where that fails and was not ``required``, as in a
        plan from another machine, the plain network is returned, and the item's events state why.
        What it took is added to ``notes``.

        Raises:
            ModelError: Compiling or capturing was requested and fails.
        """
        if not plan.is_specialized:
            return self.network
        from lowtide.streaming.specialize import (
            SPECIALIZING,
            import_compiler_libraries,
            specialize_network,
        )

        batch = plan.strategy.batch * plan.image.network_inputs
        shape = (batch, self.network.in_channels, *plan.network_size)
        if shape in self.specialized:
            return self.specialized[shape]
        phase = "record" if plan.cuda_graph else "compile"
        report_phase(pipeline.progress, phase, self.descriptor.name)
        if plan.cuda_graph:
            self.specialized.clear()  # each holds memory while it exists
        else:
            with pipeline.meter.excluding():
                import_compiler_libraries()
        started = time.perf_counter()
        try:
            network = specialize_network(self.network, shape, as_graph=plan.cuda_graph)
        except ModelError as error:
            if required or plan.cuda_graph:
                raise
            item.events.append(error.message)
            return self.network
        took = format_seconds(time.perf_counter() - started)
        notes.append(f"{SPECIALIZING[plan.cuda_graph]} took {took}")
        self.specialized[shape] = network
        return network

    def padded_size(self, info: ImageInfo) -> tuple[int, int]:
        """Return (H, W) of an image padded by the model's size rule."""
        rows, columns = self.descriptor.size.padding(info.height, info.width)
        return info.height + rows, info.width + columns

    def image_task(
        self,
        sizes: TargetSize,
        budget: Budget,
        inputs: int | None = None,
    ) -> ImageTask:
        """Return the `ImageTask` of an image, padded by the model's size rule.

        ``inputs`` are by default those of `adapter`.
        """
        info = sizes.facts.info
        copy_bytes = info.pixels * info.color_channels * 4
        return ImageTask(
            info.shape,
            self.padded_size(info),
            **sizes.codec_memory,
            scratch_bytes=sizes.facts.scratch_bytes + self.float_copies * copy_bytes,
            row_buffer_bytes=int(budget.host_bytes * _ROW_SHARE),
            ample_bytes=budget.device_bytes // 4,
            tiled_bounds=self.bounds.get("tiled", RunBounds()),
            streamed_bounds=self.bounds.get("streamed", RunBounds()),
            extra_resident_bytes=self.extra_resident_bytes,
            item_bytes=4 if self.float_copies else info.sample_bytes,
            inputs=self.adapter(info).inputs if inputs is None else inputs,
        )


def geometry_of(model: ModelDescriptor) -> ModelGeometry:
    """Return the geometry of a model, for plans."""
    return ModelGeometry(
        scale=model.scale,
        in_channels=model.in_channels,
        out_channels=model.out_channels,
        align=model.size.multiple_of,
        minimum=model.size.minimum,
        square=model.size.square,
        tileable=model.tiling != "internal",
    )


class PinnedFirstRun(BaseModel):
    """Budget and measurements of a folder's first run, by which a resumed run makes equal files.

    Measured costs and free memory differ a little each time; with the pinned ones a resumed file is
    planned, and so made, as in an undisturbed run. Valid while the versions of all that computes
    are the same.
    """

    model_config = ConfigDict(extra="forbid")  # a pin with other names counts as damaged

    device: str
    device_bytes: int
    host_bytes: int
    versions: dict[str, str]
    measured: PlanMeasurements

    @classmethod
    def read(cls, journal: JobJournal | None, versions: dict[str, str]) -> PinnedFirstRun | None:
        """Return the pin of a folder's journal, or None where all has to be measured.

        So where no file was made by it: a run that was refused decides nothing about the next.
        """
        pin = journal.pin if journal is not None and journal.has_results else {}
        if pin.get("versions") != versions:
            return None
        try:
            return cls.model_validate(pin)
        except ValidationError:  # a damaged pin counts as one of other versions
            return None

    @classmethod
    def write(
        cls,
        journal: JobJournal | None,
        versions: dict[str, str],
        budget: Budget,
        measured: PlanMeasurements,
    ) -> None:
        """Pin this run's state for a run that resumes the folder."""
        if journal is None:
            return
        pin = cls(
            device=budget.device,
            device_bytes=budget.device_bytes,
            host_bytes=budget.host_bytes,
            versions=versions,
            measured=measured,
        )
        journal.set_pin(pin.model_dump(mode="json"))

    def pinned_budget(self, requested: str | int | Budget, budget: Budget) -> Budget:
        """Return ``budget``, or the first run's if ``requested`` follows free memory."""
        follows = isinstance(requested, str) and (requested == "auto" or requested.endswith("%"))
        if not follows or self.device != budget.device:
            return budget
        return replace(budget, device_bytes=self.device_bytes, host_bytes=self.host_bytes)
