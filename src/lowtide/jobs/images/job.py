"""One model on images as a job of the pipeline: plan and compute one image."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from lowtide.core.atomic_file import require_output
from lowtide.core.signal import RowSink, RowSource, ValueAdapter
from lowtide.jobs.engine.devices import divide_threads
from lowtide.jobs.engine.item import ComputedItem, JobItem
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import JobReport
from lowtide.jobs.images.accuracy import measure_accuracy
from lowtide.jobs.images.held_memory import RunMemoryLimiter
from lowtide.jobs.images.plan_in_child import ChildPlanner
from lowtide.jobs.images.planning import PlannedImage, plan_image
from lowtide.jobs.images.prepared import PlanMeasurements, PreparedModel
from lowtide.jobs.images.report import ImageReport
from lowtide.jobs.images.run_clock import time_run_of_plan
from lowtide.jobs.images.runtime import import_job_libraries, load_prepared_model
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.target_size import TargetSize, drops_alpha, target_size
from lowtide.jobs.images.value_range import find_value_range, range_notes
from lowtide.jobs.images.whole_image import whole_image
from lowtide.media import (
    AsyncSink,
    ImageFacts,
    ImageSource,
    inspect_image,
    open_image,
    open_sink,
)
from lowtide.media.discover import IMAGES, DiscoveredFiles, FilePair, MediaKind, discover_files
from lowtide.media.image_info import ImageInfo, ImageRowReader, ImageRowWriter, ValueRange
from lowtide.media.image_source import CroppedSource
from lowtide.memory.budget import Budget
from lowtide.memory.plan import Plan
from lowtide.memory.plan_file import PlanFile
from lowtide.streaming.tiles.runner import TileRunOutcome, execute_plan


@dataclass(frozen=True)
class ItemRun:
    """An item that is run: its plan, the pipeline, and the bytes that may wait to be written."""

    item: JobItem
    planned: PlannedImage
    pipeline: JobPipeline
    queue_bytes: int


class ImageJob:
    """Runs one model on images.

    A kind of job has its settings and its report. One for other files than photographs overrides
    how they are found (``media_kind``), inspected, opened, converted for the network, and written.

    Args:
        prepared: The model.
        plan_file: Plan file to replay.
        images: Number of images that the job is about.
        child: Plans bands instead of this process, where the budget is small.
    """

    settings_type: ClassVar[type[ImageSettings]]
    report_type: ClassVar[type[JobReport]]
    media_kind: ClassVar[MediaKind] = IMAGES
    # Packages that determine its values, in addition to those of all jobs.
    packages: ClassVar[tuple[str, ...]] = ()

    # Whether a result may be written while the next item is computed.
    overlaps: ClassVar[bool] = True

    def __init__(
        self,
        prepared: PreparedModel,
        settings: Any,
        budget: Budget,
        *,
        plan_file: PlanFile | None = None,
        images: int = 1,
        child: ChildPlanner | None = None,
    ) -> None:
        self.prepared, self.settings, self.budget = prepared, settings, budget
        self._plan_file, self._images, self._child = plan_file, images, child
        self._fp32_job: Self | None = None

    @classmethod
    def suited(
        cls, settings: Any, pairs: Sequence[FilePair], before: Iterable[str] = ()
    ) -> tuple[Any, str]:
        """Return settings that suit the files, and why; a kind of job may choose its model.

        Args:
            settings: Those of the job.
            pairs: Its files.
            before: Names of the models that files of the output folder were made with.
        """
        return settings, ""

    def plan(self, item: JobItem) -> PlannedImage:
        """Plan one image from its header."""
        smaller = item.limit_bytes is not None and not self.settings.overrides.only_bands
        if smaller and self.prepared.costs.only_whole:
            self._measure_tiles()
        planned = self.plan_run(item) if self._child is None else self._child.plan(self, item)
        if self.media_kind is IMAGES:
            known = self._value_range(item, self.settings.scratch)
            planned.notes += range_notes(replace(planned.facts.info, value_range=known))
        return planned

    def plan_run(self, item: JobItem) -> PlannedImage:
        """Plan the runs of the network on one image from its header, in this process."""
        sizes = self.sizes(item)
        return plan_image(
            item.source,
            item.target,
            sizes,
            self.prepared,
            self.settings,
            self.budget,
            inputs=self.adapter(item, sizes.facts.info).inputs,
            limit_bytes=item.limit_bytes,
            plan_file=self._plan_file,
            images=self._images,
        )

    def run(
        self, item: JobItem, planned: PlannedImage, pipeline: JobPipeline, queue_bytes: int
    ) -> ComputedItem:
        """Compute all rows of one image, which are written meanwhile and after."""
        with contextlib.ExitStack() as opened:
            source = opened.enter_context(self.open_source(item, pipeline.scratch))
            sink = self.open_sink(item, planned, source)
            if queue_bytes:
                sink = AsyncSink(sink, queue_bytes)
            try:
                run = ItemRun(item, planned, pipeline, queue_bytes)
                outcome = self._execute(run, source, sink)
                # A format encodes the whole image when its rows are closed: nothing else is held
                # then, neither of the source nor of measuring.
                opened.close()
                usage = pipeline.lap()
                accuracy, measurement_usage = measure_accuracy(
                    self.prepared,
                    planned.plan,
                    lambda: self.open_source(item, pipeline.scratch),
                    self.adapter(item, source.info),
                    pipeline,
                    limit_bytes=self.budget.device_bytes - queue_bytes,
                )
                sink.close_rows()
                usage = usage.merged(pipeline.lap())
            except BaseException:
                sink.abort()
                raise
        report = self.item_report(item, planned, "done")
        report.accuracy, report.events = accuracy, _events(outcome)
        report.notes += sink.notes
        return ComputedItem(sink, report, usage, measurement_usage, self._comparable(planned.plan))

    @classmethod
    def load_libraries(cls, settings: Any) -> None:
        """Import the libraries that the job needs, before a meter takes its baseline.

        Raises:
            LowtideError: One is not installed; the hint names the extra.
        """
        import_job_libraries(settings)

    @classmethod
    def find(
        cls, inputs: Sequence[str | Path], output: str | Path, settings: Any
    ) -> DiscoveredFiles:
        """Pair inputs with outputs; raises as `lowtide.media.discover.discover_files`."""
        return discover_files(
            list(map(str, inputs)),
            output,
            kind=cls.media_kind,
            format=settings.format,
            suffix_text=settings.suffix,
        )

    @classmethod
    def refuse_overwriting(cls, pair: FilePair, settings: Any, *, force: bool) -> None:
        """Refuse the only output where it cannot become one; raises as `require_output`."""
        require_output(pair.target, force=force, makes_folder=True)

    @classmethod
    def inspect(cls, source: Path, settings: Any) -> ImageFacts:
        """Return the header facts of an input; raises `InputError` where it cannot be read."""
        return inspect_image(source, max_pixels=settings.max_pixels)

    @classmethod
    def target_size(
        cls, source: Path, target: Path, settings: Any, scale: int, facts: ImageFacts | None = None
    ) -> TargetSize:
        """Return sizes and format of a result, for a model of this ``scale``.

        ``facts`` are the header of ``source``, which is read by default. Raises as
        `lowtide.jobs.images.target_size.target_size`.
        """
        facts = facts or cls.inspect(source, settings)
        return target_size(source, target, settings, scale, facts)

    def sizes(self, item: JobItem) -> TargetSize:
        """Return sizes and format of an item's result; what the network gets is an image."""
        scale = self.prepared.geometry.scale
        return self.target_size(item.source, item.target, self.settings, scale)

    def adapter(self, item: JobItem, info: ImageInfo) -> ValueAdapter:
        """Return the conversion between an item's rows, of ``info``, and the network."""
        return self.prepared.adapter(info)

    def open_source(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        """Open an item for reading; may be called more than once."""
        return open_image(
            item.source,
            max_pixels=self.settings.max_pixels,
            scratch_dir=scratch,
            value_range=self._value_range(item, scratch),
            # What a format cannot hold was found to be opaque, or refused.
            with_alpha=not drops_alpha(item.target, self.settings, self._facts_of(item)),
        )

    def _facts_of(self, item: JobItem) -> ImageFacts:
        return inspect_image(item.source, max_pixels=self.settings.max_pixels)

    def _value_range(self, item: JobItem, scratch: str | Path | None) -> ValueRange | None:
        return find_value_range(item.source, self.settings.max_pixels, scratch)

    def open_sink(
        self, item: JobItem, planned: PlannedImage, source: ImageRowReader
    ) -> ImageRowWriter:
        """Open an item's result for writing the rows that the network makes of ``source``."""
        assert isinstance(source, ImageSource | CroppedSource)
        if source.zero_alpha:
            planned.notes.append("alpha is 0 everywhere and is kept; color is run as if opaque")
        return open_sink(
            item.target,
            replace(planned.upscaled, value_range=source.info.value_range),
            metadata=source.metadata,
            strip_metadata=self.settings.strip_metadata,
            options=self.settings.encode_options,
            resize_to=planned.resize_to,
            zero_alpha=source.zero_alpha,
            default_format=planned.sizes.format,
            part=item.part,
            replace=item.replace,
        )

    def in_fp32(self, pipeline: JobPipeline) -> Self:
        """Return the same job in fp32, within what the half-precision weights leave."""
        if self._fp32_job is None:
            settings = replace(self.settings, precision="fp32", plan_file=None)
            taken = self.prepared.costs.weight_bytes
            budget = replace(
                self.budget,
                device_bytes=self.budget.device_bytes - taken,
                host_bytes=self.budget.host_bytes - taken * (self.budget.device == "cpu"),
            )
            prepared = load_prepared_model(
                settings,
                device=self.prepared.network.device,
                cancel=pipeline.cancel,
                limit_bytes=budget.device_bytes // 2,
                child=self._child,
            )
            extra_bytes = self.prepared.extra_resident_bytes
            prepared = replace(prepared, extra_resident_bytes=extra_bytes)
            self._fp32_job = type(self)(
                prepared, settings, budget, images=self._images, child=self._child
            )
        return self._fp32_job

    def _measure_tiles(self) -> None:
        """Measure what a model that ran whole at once has not needed so far."""
        known = self.prepared
        measured = load_prepared_model(
            self.settings,
            device=known.network.device,
            limit_bytes=self.budget.device_bytes // 2,
            child=self._child,
        )
        self.prepared = replace(
            measured,
            extra_resident_bytes=known.extra_resident_bytes,
            float_copies=known.float_copies,
        )

    def item_report(self, item: JobItem, planned: PlannedImage, status: Any) -> ImageReport:
        """Return the report of a planned image."""
        info = planned.facts.info
        return ImageReport(
            input=str(item.source),
            output=str(item.target),
            status=status,
            width=info.width,
            height=info.height,
            out_width=planned.output.width,
            out_height=planned.output.height,
            plan=planned.plan,
            notes=planned.notes,
        )

    @classmethod
    def preload(cls, setup: dict[str, Any]) -> None:
        """Import the libraries of a worker's job, before its meter takes its baseline."""
        cls.load_libraries(cls.settings_type.from_json(setup["settings"]))

    @classmethod
    def load(cls, setup: dict[str, Any]) -> Self:
        """Make the job of a worker from what `worker_setup` returned.

        Or that of a `ChildPlanner`, for which ``measured`` may be None, and ``files`` be (source,
        target) of the only image.
        """
        settings, budget = cls.settings_type.from_json(setup["settings"]), Budget(**setup["budget"])
        plan_file = PlanFile.read(settings.plan_file) if settings.plan_file else None
        pairs = [FilePair(Path(one), Path(two), one) for one, two in setup.get("files", ())]
        prepared = load_prepared_model(
            settings,
            device=budget.device,
            limit_bytes=budget.device_bytes // 2,
            known=setup["measured"] and PlanMeasurements.model_validate(setup["measured"]),
            replayed=plan_file.first if plan_file else None,
            whole=whole_image(cls, settings, budget, pairs, None),
        )
        return cls(prepared, settings, budget, plan_file=plan_file, images=setup["images"])

    def worker_setup(self, device: str, budget: Budget) -> dict[str, Any]:
        """Return what `load` needs to make this job on ``device``, as plain data."""
        alone = replace(self.settings, precision=self.prepared.precision, devices=(), budget="auto")
        return {
            "settings": alone.to_json(),
            "budget": asdict(replace(budget, device=device)),
            "measured": self.prepared.measurements.on_device(device).model_dump(mode="json"),
            "images": self._images,
        }

    def _execute(self, run: ItemRun, source: ImageRowReader, sink: RowSink) -> TileRunOutcome:
        """Run the network on the rows of ``source``, and write those of the result."""
        on_rows = run.pipeline.report_rows(run.item, self.budget, run.planned.upscaled.height)
        return self._run_network(run, source, sink, self.adapter(run.item, source.info), on_rows)

    def _run_network(
        self,
        run: ItemRun,
        source: RowSource,
        sink: RowSink,
        adapter: ValueAdapter,
        on_rows: Callable[[int], None] | None,
    ) -> TileRunOutcome:
        plan, pipeline, prepared = run.planned.plan, run.pipeline, self.prepared
        other_bytes = run.queue_bytes + pipeline.others_bytes(plan.device)
        held_memory = RunMemoryLimiter(pipeline.meter, plan, self.budget.device_bytes, other_bytes)
        with divide_threads(plan.strategy.device_count, pipeline.threads):
            required = self.settings.compile == "on"
            network = prepared.network_for(
                plan, pipeline, run.item, run.planned.notes, required=required
            )
            program = None
            if plan.strategy.name == "streamed":
                assert prepared.programs is not None
                program = prepared.programs.program(*plan.network_size)
            with held_memory.limited(network), time_run_of_plan(prepared.costs, plan):
                return execute_plan(
                    network,
                    adapter,
                    source,
                    sink,
                    plan,
                    replicas=prepared.replicas,
                    on_rows=on_rows,
                    cancel=pipeline.cancel,
                    over_budget=held_memory.over_budget,
                    before_step=held_memory.make_room,
                    program=program,
                    scratch=pipeline.scratch,
                )

    def _comparable(self, plan: Plan) -> bool:
        """Return whether a run of ``plan`` measures what those of others take."""
        special = plan.is_specialized or plan.heap == "trim"
        several = plan.strategy.device_count > 1
        return not (special or several) and self.prepared.network.free_memory is None


def _events(outcome: TileRunOutcome) -> list[str]:
    redone = [
        f"{outcome.fp32_reruns} batches had values that are not finite and were run again in fp32"
    ]
    return outcome.events + (redone if outcome.fp32_reruns else [])
