"""Run a kind of job on image files and folders within a budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.core.atomic_file import require_output, require_output_folder
from lowtide.core.errors import UsageError
from lowtide.core.progress import Cancel, ProgressCallback, report_phase
from lowtide.jobs.engine.devices import budget_share, divide_threads
from lowtide.jobs.engine.journal import open_journal
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import ProcessMemoryReport, sidecar_path
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.jobs.engine.workers import WorkerPool
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.plan import ImagePlan, ImageWork
from lowtide.jobs.images.plan_in_child import ChildPlanner
from lowtide.jobs.images.prepared import PinnedFirstRun, PreparedModel
from lowtide.jobs.images.runtime import devices_of, load_prepared_model, runtime_versions
from lowtide.jobs.images.settings import ImageSettings
from lowtide.jobs.images.whole_image import whole_image
from lowtide.media.discover import DiscoveredFiles
from lowtide.memory.budget import Budget
from lowtide.memory.meter import CudaMemoryMeter, HostMemoryMeter, open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.process_memory import RESIDENT_PEAK
from lowtide.streaming.tiles.network import RunnableNetwork

Inputs = str | Path | Sequence[str | Path]


def run_images(
    job_type: type[ImageJob],
    chosen: ImageSettings,
    inputs: Inputs,
    output: str | Path,
    *,
    dry_run: bool,
    force: bool,
    sidecar: bool,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> Any:
    """Run jobs of a type on images, or with ``dry_run`` plan them; return the report of the type.

    Arguments and errors are those of `lowtide.upscale`.
    """
    started = time.perf_counter()
    # 1. Find: pair inputs with outputs, and fail before a new model is measured for minutes.
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    found, folder = find_jobs(inputs, output, chosen, job_type)
    facts = None
    if folder is not None:
        require_output_folder(folder)
    else:
        facts = job_type.inspect(found.pairs[0].source, chosen)
        job_type.refuse_overwriting(found.pairs[0], chosen, force=force)
        if sidecar:
            require_output(sidecar_path(found.pairs[0].target), force=True, makes_folder=True)
    scratch = Path(chosen.scratch) if chosen.scratch else folder or Path(output).parent
    work = job_type, chosen, found, facts, scratch, plan_file, progress, cancel
    if dry_run:
        return ImagePlan(*work).report(folder, force=force, sidecar=sidecar)
    # 2. Libraries and devices: what is loaded from here on is metered.
    devices = devices_of(chosen)
    job_type.load_libraries(chosen)
    whole_process = RESIDENT_PEAK.reader()
    has_mark = whole_process.reset()
    meter = open_meter(devices[0])
    meter.start()
    try:
        run = _ImageRun(*work, devices, meter)
        report = run.report(folder, force=force, sidecar=sidecar)
    finally:
        meter.stop()
    # 7. Report: the process as a whole.
    if has_mark:
        peak_bytes = whole_process.peaks()[0]
        report.process = ProcessMemoryReport(
            peak_bytes=peak_bytes, library_bytes=meter.baseline_bytes
        )
    report.seconds = time.perf_counter() - started
    report_phase(progress, "done")
    return report


@dataclass(frozen=True)
class _ImageRun(ImageWork):
    """Images and how they are run, with the running ``meter``."""

    devices: list[str]
    meter: HostMemoryMeter | CudaMemoryMeter

    @property
    def streams(self) -> int:
        """Images that are in flight at once."""
        return self.settings.streams if self.job_type.overlaps else 1

    def report(self, folder: Path | None, *, force: bool, sidecar: bool) -> Any:
        """Run what is due and return the report; ``folder`` has the journal, if there is one."""
        with (
            open_journal(folder) as journal,
            divide_threads(len(self.devices)) as threads,
            contextlib.ExitStack() as opened,
        ):
            # 3. Settings: those that suit the files.
            before = () if journal is None else journal.models
            settings, why = self.job_type.suited(self.settings, self.pairs, before)
            run = replace(self, settings=settings)
            # 4. Load: the model and its costs, in a resumed folder those of the first run.
            now = runtime_versions(run.settings, run.job_type.packages)
            pin = PinnedFirstRun.read(journal, now)
            budget = run.budget(run.devices, pin)
            share = budget_share(budget, run.devices)
            helps = run.settings.computed_by == "torch" and ChildPlanner.helps(share)
            child = opened.enter_context(run.child(share)) if helps else None
            prepared = run.prepare(share, pin, child)
            PinnedFirstRun.write(journal, now, budget, prepared.measurements)
            # 5. Record: what is due, and what determines a result's bytes.
            devices = ",".join(run.devices)
            results = run.recorder(prepared, devices, why, journal, force=force, sidecar=sidecar)
            # 6. Plan, run, commit and report each item: `JobPipeline.submit`, here or in workers.
            if len(run.devices) == 1 or len(run.pairs) == 1:
                # A single image stays in this process, which distributes its tiles.
                pipeline = run.pipeline(prepared, budget, results, threads, child)
                pipeline.run(results.due_items())
            else:
                workers = run.workers(prepared, budget, results, threads)
                del prepared  # free this copy: each worker loads the model
                workers.run(run.cancel)
        return results.report

    def child(self, share: Budget) -> ChildPlanner:
        """Return what plans instead of this process."""
        return ChildPlanner(self.job_type, self.settings, share, self.progress, self.cancel)

    def prepare(
        self, share: Budget, pin: PinnedFirstRun | None, child: ChildPlanner | None
    ) -> PreparedModel:
        """Load the model and get its costs, for the ``share`` of the budget of one device."""
        return load_prepared_model(
            self.settings,
            device=self.devices[0],
            limit_bytes=share.device_bytes // 2,
            known=pin and pin.measured,
            replayed=self.plan_file and self.plan_file.first,
            meter=self.meter,
            progress=self.progress,
            cancel=self.cancel,
            on_loaded=self.check_scale,
            child=child,
            whole=whole_image(self.job_type, self.settings, share, self.pairs, self.facts),
        )

    def pipeline(
        self,
        prepared: PreparedModel,
        budget: Budget,
        results: ResultRecorder,
        threads: int,
        child: ChildPlanner | None,
    ) -> JobPipeline:
        """Return what runs the images in this process, with ``threads`` for each device."""
        copies: tuple[RunnableNetwork, ...] = ()
        if len(self.devices) > 1:
            from lowtide.jobs.images.build_network import copy_network

            copies = tuple(copy_network(prepared.network, one) for one in self.devices[1:])
        prepared, count = replace(prepared, replicas=copies), len(self.pairs)
        return JobPipeline(
            self.job_type(
                prepared,
                self.settings,
                budget,
                plan_file=self.plan_file,
                images=count,
                child=child,
            ),
            results,
            self.meter,
            progress=self.progress,
            cancel=self.cancel,
            scratch=self.scratch,
            count=count,
            streams=self.streams,
            threads=threads * len(self.devices),
        )

    def workers(
        self, prepared: PreparedModel, budget: Budget, results: ResultRecorder, threads: int
    ) -> WorkerPool:
        """Return what runs the images in a process for each device."""
        share = budget_share(budget, self.devices).of_processes(len(self.devices))
        job = self.job_type(prepared, self.settings, share, images=len(self.pairs))
        return WorkerPool(
            self.job_type,
            {device: job.worker_setup(device, share) for device in self.devices},
            self.devices,
            results,
            streams=self.streams,
            threads=threads,
            scratch=self.scratch,
            progress=self.progress,
        )


def named_inputs(inputs: Inputs) -> list[str | Path]:
    """Return inputs as a list; raises `UsageError` for what is no name, as arrays are."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    for one in given:
        if not isinstance(one, str | Path):
            raise UsageError(
                f"inputs are names of files and folders, not of type {type(one).__name__}",
                hint="write arrays to files, or call the network: lowtide.load(name)(tensor)",
            )
    return given


def find_jobs(
    inputs: Inputs, output: str | Path, settings: ImageSettings, job_type: type[ImageJob]
) -> tuple[DiscoveredFiles, Path | None]:
    """Return the jobs of a type on files, and the folder for a journal.

    That is None for one file to one file.
    """
    found = job_type.find(named_inputs(inputs), output, settings)
    return found, None if found.single_file else Path(output)
