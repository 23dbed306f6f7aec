"""Run a kind of job on image files and folders within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowtide.core.progress import Cancel, ProgressCallback, report_phase
from lowtide.jobs.build_network import copy_network
from lowtide.jobs.devices import budget_share, divide_threads, resolve_devices
from lowtide.jobs.image_job import ImageJob
from lowtide.jobs.image_settings import ImageSettings
from lowtide.jobs.journal import open_journal
from lowtide.jobs.pipeline import Pipeline
from lowtide.jobs.prepare import prepare
from lowtide.jobs.prepared import Pin
from lowtide.jobs.report import ProcessMemory, SkippedInput, versions
from lowtide.jobs.results import ResultRecorder
from lowtide.jobs.whole_image import whole_image
from lowtide.jobs.workers import Workers
from lowtide.media import ImageFacts
from lowtide.media.discover import FilePair, Found
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.process_memory import RESIDENT_PEAK

Inputs = str | Path | Sequence[str | Path]


def run_images(
    job_type: type[ImageJob],
    chosen: ImageSettings,
    inputs: Inputs,
    output: str | Path,
    *,
    force: bool,
    sidecar: bool,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> Any:
    """Run jobs of a type on images, and return the report of the type.

    Arguments and errors are those of `lowtide.upscale`.
    """
    started = time.perf_counter()
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    found, folder = find_jobs(inputs, output, chosen, job_type)
    pairs, facts = found.pairs, None
    if folder is None:
        # Fail before a new model is measured, which may take minutes.
        facts = job_type.inspect(pairs[0].source, chosen)
        job_type.refuse_overwriting(pairs[0], chosen, force=force)
    scratch = Path(chosen.scratch) if chosen.scratch else folder or Path(output).parent
    devices = resolve_devices(chosen.device_names)
    job_type.load_libraries(chosen)
    whole_process = RESIDENT_PEAK.reader()
    has_mark = whole_process.reset()
    meter = open_meter(devices[0])
    meter.start()
    try:
        with open_journal(folder) as journal, divide_threads(len(devices)) as threads:
            now = versions(chosen.model_name, job_type.packages)
            pin = Pin.read(journal, now)
            budget = min(
                (chosen.parse_budget(device, scratch) for device in dict.fromkeys(devices)),
                key=lambda one: one.device_bytes,
            )
            if pin is not None:
                budget = pin.pinned_budget(chosen.budget, budget)
            share = budget_share(budget, devices)
            prepared = prepare(
                chosen,
                device=devices[0],
                limit_bytes=share.device_bytes // 2,
                known=pin and pin.measured,
                replayed=plan_file and plan_file.first,
                meter=meter,
                progress=progress,
                cancel=cancel,
                on_loaded=scale_checker(job_type, pairs, chosen, facts),
                whole=whole_image(job_type, chosen, share, pairs, facts),
            )
            Pin.write(journal, now, budget, prepared.measurements)
            report = job_type.report_type(
                model=prepared.descriptor.to_dict(),
                device=",".join(devices),
                versions=now,
                skipped_inputs=SkippedInput.of(found),
            )
            key = chosen.content_hash(prepared.descriptor.sha256, prepared.precision)
            results = ResultRecorder(pairs, report, journal, key, force=force, sidecar=sidecar)
            if len(devices) == 1 or len(pairs) == 1:
                # A single image stays in this process, which distributes its tiles.
                copies = tuple(copy_network(prepared.network, one) for one in devices[1:])
                prepared = replace(prepared, replicas=copies)
                Pipeline(
                    job_type(prepared, chosen, budget, plan_file=plan_file, images=len(pairs)),
                    results,
                    meter,
                    progress=progress,
                    cancel=cancel,
                    scratch=scratch,
                    count=len(pairs),
                    streams=chosen.streams if job_type.overlaps else 1,
                    threads=threads * len(devices),
                ).run(results.due_items())
            else:
                job = job_type(prepared, chosen, share, images=len(pairs))
                workers = Workers(
                    job_type,
                    {device: job.worker_setup(device, share) for device in devices},
                    devices,
                    results,
                    streams=chosen.streams if job_type.overlaps else 1,
                    threads=threads,
                    scratch=scratch,
                    progress=progress,
                )
                del prepared, job  # free this copy: each worker loads the model
                try:
                    workers.run(cancel)
                finally:
                    if journal is not None:
                        journal.remove_parts()  # remove the files of killed workers
    finally:
        meter.stop()
    if has_mark:
        peak_bytes = whole_process.peaks()[0]
        report.process = ProcessMemory(peak_bytes=peak_bytes, library_bytes=meter.baseline_bytes)
    report.seconds = time.perf_counter() - started
    report_phase(progress, "done")
    return report


def find_jobs(
    inputs: Inputs, output: str | Path, settings: ImageSettings, job_type: type[ImageJob]
) -> tuple[Found, Path | None]:
    """Return the jobs of a type on files, and the folder for a journal.

    That is None for one file to one file.
    """
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found = job_type.find(given, output, settings)
    return found, None if found.single_file else Path(output)


def scale_checker(
    job_type: type[ImageJob],
    jobs: Sequence[FilePair],
    settings: ImageSettings,
    facts: ImageFacts | None = None,
) -> Callable[[int], None]:
    """Return a callback for the model's scale that checks the result's size early.

    It is called before anything is measured, which may take minutes. For a single image it raises
    what `ImageJob.target_size` raises; of several images the valid ones are run.
    """

    def check(scale: int) -> None:
        if len(jobs) == 1:
            job_type.target_size(jobs[0].source, jobs[0].target, settings, scale, facts)

    return check
