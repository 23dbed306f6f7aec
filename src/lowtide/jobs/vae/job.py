"""Videos to latents and back by a video autoencoder, as a job of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lowtide.core.errors import BudgetError, NotFiniteError, UsageError
from lowtide.core.input_file import is_folder
from lowtide.core.progress import Cancel, ProgressCallback, report_phase
from lowtide.integrations.clip_autoencoder import (
    ClipAutoencoder,
    PartName,
    PlannedClipPart,
    import_autoencoder_libraries,
    load_clip_autoencoder,
)
from lowtide.jobs.clips.work import pinned_plan, segments_folder
from lowtide.jobs.engine.devices import resolve_device
from lowtide.jobs.engine.item import ComputedItem, JobItem
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import versions_used
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.jobs.vae.inputs import FoundClip, VaeClip, find_clip, model_sha256
from lowtide.jobs.vae.memory import clip_plan, device_bytes, part_rows
from lowtide.jobs.vae.report import ClipReport, Operation, PartCheck, VaeReport
from lowtide.jobs.vae.settings import VaePrecision, VaeSettings
from lowtide.jobs.vae.stages import ClipRun, Decoding, Encoding
from lowtide.media.discover import FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.cpu_half_precision import slowdown_note
from lowtide.memory.meter import open_meter
from lowtide.memory.oom import lacks_memory, naming_out_of_memory
from lowtide.memory.plan import LedgerRow, Plan
from lowtide.memory.process_memory import failing_beyond_container
from lowtide.streaming.tiles.tile_step import DTYPES

_PHASES = "read", "encode", "decode", "compare", "write"


def run_vae(
    operation: Operation,
    source: str | Path,
    output: str | Path | None,
    settings: VaeSettings,
    *,
    dry_run: bool,
    force: bool,
    sidecar: bool,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> VaeReport:
    """Encode a video, decode latents, or do both; see `lowtide.jobs.vae.command`."""
    started = time.perf_counter()
    # 1. Find what goes in and what comes out.
    if sidecar and output is None:
        raise UsageError("--report is a file next to a result", hint="add -o FILE, or --json")
    found = find_clip(operation, source, output, settings, force=force)
    # 2. Load the model.
    model, note = load_model(settings, progress)
    clip = found.clip(model, settings)
    with _target_of(found, settings) as target:
        # 3. Plan.
        job = VaeJob(settings, model, clip, progress, [note] if note else [])
        item = JobItem(found.source, target, replace=force)
        planned = job.plan(item)
        report = VaeReport(
            model={"name": model.kind, "path": str(settings.model)},
            device=model.budget.device,
            versions=job.versions,
        )
        pairs = [FilePair(found.source, target, str(source))]
        results = ResultRecorder(pairs, report, None, "", force=force, sidecar=sidecar)
        if dry_run:
            results.record(1, job.item_report(planned, "planned"))
            return report
        # 4. Run and commit.
        meter = open_meter(model.budget.device)
        meter.start()
        try:
            pipeline = JobPipeline(
                job, results, meter, progress=progress, cancel=cancel, scratch=settings.scratch
            )
            pipeline.run([item])
        finally:
            meter.stop()
    # 5. Report.
    report.seconds = time.perf_counter() - started
    report_phase(progress, "done")
    return report


def load_model(
    settings: VaeSettings, progress: ProgressCallback | None
) -> tuple[ClipAutoencoder, str | None]:
    """Return the model of the settings, and a note on its precision on this device."""
    assert settings.model is not None
    device = resolve_device(settings.device)
    import_autoencoder_libraries(settings.model)
    budget = Budget.parse(settings.budget, device=device, scratch=settings.scratch)
    report_phase(progress, "load", str(settings.model))
    note = slowdown_note(settings.resolved_precision) if device == "cpu" else None
    if note:
        report_phase(progress, "slow", note)
    return _load(settings, budget), note


@contextmanager
def _target_of(found: FoundClip, settings: VaeSettings) -> Iterator[Path]:
    """Yield where the result goes: without an output to a folder that is removed."""
    if found.target is not None:
        yield found.target
        return
    with TemporaryDirectory(dir=settings.scratch, prefix="lowtide-") as folder:
        yield Path(folder) / found.source.name


@dataclass
class PlannedClip:
    """How the parts of an autoencoder run on a clip.

    Attributes:
        plan: The memory of both.
        parts: The parts, in the order in which they run.
        precision: What they compute in.
        notes: What the user should know.
    """

    plan: Plan
    parts: dict[PartName, PlannedClipPart]
    precision: VaePrecision
    notes: list[str]
    can_shrink: bool = True
    result_bytes: int = 0
    writing_bytes: tuple[int, int] = (0, 0)


@dataclass
class VaeJob:
    """Encodes or decodes one clip.

    Attributes:
        settings: What was asked for.
        model: The autoencoder in its precision.
        clip: The clip.
        progress: Called after each chunk.
        notes: What the user should know.
        is_wider: Whether this is the run in a wider precision, after one in fp16 or bf16.
    """

    settings: VaeSettings
    model: ClipAutoencoder
    clip: VaeClip
    progress: ProgressCallback | None
    notes: list[str] = field(default_factory=list)
    is_wider: bool = False
    _first_plan: PlannedClip | None = None
    _model_sha256: str = ""

    @property
    def budget(self) -> Budget:
        """What the run may take."""
        return self.model.budget

    def plan(self, item: JobItem) -> PlannedClip:
        """Plan all parts, once unless memory runs out.

        As before where a stopped run left segments, and its budget is within that of now.

        Raises:
            BudgetError: One does not fit; names the least that would do for all.
        """
        if item.limit_bytes is not None:
            return self._plan(replace(self.budget, device_bytes=item.limit_bytes))
        if self._first_plan is None:
            budget, left = self.budget, None
            if is_folder(segments_folder(item.target)):
                left = pinned_plan(item.target, self._key)
            if left is not None and left.upper_bytes <= budget.device_bytes:
                budget = replace(budget, device_bytes=left.budget_bytes)
            self._first_plan = self._plan(budget)
        return self._first_plan

    def _plan(self, budget: Budget) -> PlannedClip:
        model = replace(self.model, budget=budget)
        try:
            return self._plan_parts(model, self.settings.resolved_precision)
        except BudgetError:
            if not self.is_wider:
                raise
        self.settings = replace(self.settings, precision="bf16")
        self.model = _load(self.settings, self.budget)
        planned = self._plan_parts(replace(self.model, budget=budget), "bf16")
        planned.notes.append("fp32 does not fit the budget: run again in bf16")
        return planned

    def _plan_parts(self, model: ClipAutoencoder, precision: VaePrecision) -> PlannedClip:
        operation, shapes = self.clip.found.operation, self.clip.shapes
        given: dict[PartName, tuple[int, int, int]] = {}
        if operation != "decode":
            given["encoder"] = shapes.padded
        if operation != "encode":
            given["decoder"] = shapes.latents[1:]
        parts, refusals = dict[PartName, PlannedClipPart](), list[BudgetError]()
        rows: dict[PartName, list[LedgerRow]] = {
            name: part_rows(name, model, self.clip) for name in given
        }
        for name, shape in given.items():
            report_phase(self.progress, "capture", f"{name} of {model.kind}")
            reserved = device_bytes(rows[name], upper=True)
            try:
                planned = naming_out_of_memory(
                    f"while the {name} was planned", is_lack=lacks_memory
                )
                with failing_beyond_container(), planned:
                    parts[name] = model.plan(name, shape, reserved=reserved)
            except BudgetError as refusal:
                refusals.append(refusal)
        if refusals:
            raise max(refusals, key=lambda one: one.smallest or 0)
        plan = clip_plan(shapes, parts, rows, model.budget, precision)
        return PlannedClip(plan, parts, precision, [*self.notes, *self.clip.notes])

    def run(
        self, item: JobItem, planned: PlannedClip, pipeline: JobPipeline, queue_bytes: int
    ) -> ComputedItem:
        """Run the parts, and make the result of what they make."""
        run = ClipRun(
            self.settings, self.model, self.clip, item, planned.parts, pipeline, self._key
        )
        encoding = Encoding(run) if "encoder" in planned.parts else None
        decoding = Decoding(run) if "decoder" in planned.parts else None
        last = decoding or encoding
        assert last is not None
        try:
            run.work.pin(planned.plan)
            notes = run.notes(encoding or last)
            if encoding is not None:
                encoding.run()
            if decoding is not None:
                decoding.run(self.clip.found.latents if encoding is None else encoding.latents())
            usage, checking, checks = pipeline.lap(), None, list[PartCheck | str]()
            if self.settings.verify:
                reserved = planned.plan.upper_bytes - max(
                    part.plan.upper_bytes for part in planned.parts.values()
                )
                free = self.budget.device_bytes - reserved
                checks = [one.check(free) for one in (encoding, decoding) if one]
                checking = pipeline.lap()
            with run.clock.phase("write"):
                last.result.close_rows()
            usage = usage.merged(pipeline.lap())
        except BaseException:
            last.result.abort()
            raise
        report = self.item_report(planned, "done")
        report.notes += [*notes, *last.result.notes]
        report.notes += [one for one in checks if isinstance(one, str)]
        report.checks = [one for one in checks if isinstance(one, PartCheck)]
        report.frames_resumed = last.resumed
        found = run.clock.seconds
        report.phases = {name: round(found[name], 3) for name in _PHASES if name in found}
        if decoding is not None:
            report = report.model_copy(update=decoding.figures)
        return ComputedItem(last.result, report, usage, checking, comparable=False)

    def in_fp32(self, pipeline: JobPipeline) -> VaeJob:
        """Return the same job in fp32, or in bf16 where the budget is too small for that."""
        if self.is_wider:
            raise NotFiniteError("values exceed the range of bf16 too")
        settings = replace(self.settings, precision="fp32")
        with pipeline.meter.excluding():
            report_phase(self.progress, "load", f"{settings.model} in fp32")
            model = _load(settings, self.budget)
        return VaeJob(settings, model, self.clip, self.progress, self.notes, is_wider=True)

    def item_report(self, planned: PlannedClip, status: Any) -> ClipReport:
        """Return the report of a planned or finished clip."""
        found, shapes, settings = self.clip.found, self.clip.shapes, self.settings
        encodes = found.operation != "decode"
        return ClipReport(
            input=str(found.source),
            output="" if found.target is None else str(found.target),
            status=status,
            operation=found.operation,
            **shapes.for_report(),
            precision=planned.precision,
            posterior=("sample" if settings.sample else "mean") if encodes else None,
            seed=settings.seed if encodes and settings.sample else None,
            scaling=self.model.scaling,
            plans={name: part.plan.title for name, part in planned.parts.items()},
            notes=planned.notes,
        )

    @property
    def versions(self) -> dict[str, str]:
        """Versions of all that determines the values."""
        library = type(self.model.module).__module__.partition(".")[0]
        return versions_used(packages=["av", *(["diffusers"] if library == "diffusers" else [])])

    @property
    def _key(self) -> str:
        """All that determines the bytes of segments, except which frames they hold."""
        found, settings = self.clip.found, self.settings
        assert settings.model is not None
        self._model_sha256 = self._model_sha256 or model_sha256(settings.model)
        content = self.clip.task.content_sha256
        now = sorted(self.versions.items())
        how = found.operation, settings.resolved_precision, settings.hashed_values
        return f"{content} {self._model_sha256} {how} {now} {self.budget.device}"


def _load(settings: VaeSettings, budget: Budget) -> ClipAutoencoder:
    assert settings.model is not None
    dtype = DTYPES[settings.resolved_precision]
    return load_clip_autoencoder(settings.model, budget, dtype=dtype, scratch=settings.scratch)
