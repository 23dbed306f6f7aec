"""Upscale files and folders within a budget: the job behind command and function."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.core.errors import Cancelled
from lowtide.core.progress import Cancel, ProgressCallback, check_cancel
from lowtide.jobs.build_network import copy_network
from lowtide.jobs.devices import resolve_devices
from lowtide.jobs.image_queue import ImageQueue
from lowtide.jobs.job_monitor import JobMonitor, report_progress
from lowtide.jobs.journal import Journal
from lowtide.jobs.prepare import preload_libraries
from lowtide.jobs.report import SkippedInput, UpscaleReport, versions
from lowtide.jobs.results import ResultRecorder, refuse_overwriting
from lowtide.jobs.resume_state import ResumeState
from lowtide.jobs.session import UpscaleSession
from lowtide.jobs.settings import UpscaleSettings
from lowtide.jobs.target_size import scale_checker
from lowtide.jobs.workers import Workers, budget_share, divide_threads
from lowtide.media import inspect_image
from lowtide.media.discover import Found, discover
from lowtide.memory.budget import Budget
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile

Inputs = str | Path | Sequence[str | Path]


def upscale(
    inputs: Inputs,
    output: str | Path,
    *,
    budget: str | int | Budget = "auto",
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    scratch: str | Path | None = None,
    force: bool = False,
    sidecar: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Any,
) -> UpscaleReport:
    """Upscale images within a byte budget.

    Results equal the unconstrained run unless the report's accuracy is ``bounded``, and then it
    states the measured error. An image that fails in a batch is reported (``report.failures``) and
    the others are done; the error of a single image is raised. Inputs in folders that are not
    images are in ``report.left_out``.

    Args:
        inputs: Files, folders (their tree is mirrored) or glob patterns.
        output: A file for one file, unless a folder has that name or a separator ends it, else a
            folder.
        budget: ``"6GiB"``, ``"80%"`` of what is free, ``"auto"`` or bytes.
        cancel: Stops the work with `Cancelled`, with no half-written file left.
        settings: Fields of `UpscaleSettings`: ``model``, ``scale``, ``width``, ``height``,
            ``max_side``, ``precision``, ``strategy``, ``tile``, ...

    Raises:
        UsageError: An argument is invalid.
        ImageError: An input cannot be read.
        ModelError: The model cannot be loaded or run.
        BudgetError: Nothing fits the budget.
        OutputError: A file cannot be written.
        Cancelled: ``cancel`` was set.
    """
    chosen = UpscaleSettings.of(**settings)
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    started = time.perf_counter()
    found, folder = find_jobs(inputs, output, chosen)
    jobs = found.pairs
    if folder is None:
        # Fail before a new model is measured, which may take minutes.
        inspect_image(jobs[0].source, max_pixels=chosen.max_pixels)
        refuse_overwriting(jobs[0].target, None, force)
    scratch_folder = Path(scratch) if scratch else folder or Path(output).parent
    devices = resolve_devices(chosen)
    preload_libraries(chosen)
    monitor = JobMonitor(open_meter(devices[0]), progress, cancel)
    monitor.meter.start()
    try:
        with _open_journal(folder) as journal, divide_threads(len(devices)) as threads:
            now = versions(chosen.model_name)
            resume_state = ResumeState(journal, now)
            least = _smallest_budget(devices, budget, host_budget, disk_budget, scratch_folder)
            parsed = resume_state.budget(budget, least)
            share = budget_share(parsed, devices)
            prepared = monitor.prepare(
                chosen,
                devices[0],
                share,
                plan_file,
                resume_state.costs,
                on_loaded=scale_checker(jobs, chosen),
            )
            resume_state.apply(prepared)
            resume_state.write(parsed, prepared)
            report = UpscaleReport(
                model=prepared.descriptor.to_dict(),
                device=",".join(devices),
                versions=now,
                skipped_inputs=skipped_inputs(found),
            )
            key = chosen.content_hash(prepared.descriptor.sha256, prepared.precision)
            results = ResultRecorder(jobs, report, journal, key, force=force, sidecar=sidecar)
            if len(devices) == 1 or len(jobs) == 1:
                # A single image stays in this process, which distributes its tiles.
                prepared.replicas = tuple(
                    copy_network(prepared.network, one) for one in devices[1:]
                )
                session = UpscaleSession(
                    prepared,
                    chosen,
                    parsed,
                    monitor.meter,
                    progress,
                    cancel,
                    scratch_folder,
                    len(jobs),
                    plan_file,
                    threads=threads * len(devices),
                )
                _run_in_process(session, results)
            else:
                workers = Workers(
                    devices,
                    prepared,
                    chosen,
                    share,
                    results,
                    threads=threads,
                    scratch=scratch_folder,
                    progress=progress,
                )
                del prepared  # free this copy: each worker loads the model
                _run_in_workers(workers, journal, cancel)
    finally:
        monitor.meter.stop()
    report.seconds = time.perf_counter() - started
    report_progress(progress, "done", "")
    return report


def _run_in_process(session: UpscaleSession, results: ResultRecorder) -> None:
    images = ImageQueue(session, results)
    try:
        for index, job in enumerate(results.jobs, start=1):
            check_cancel(session.cancel)
            if results.is_due(index):
                images.submit(job.source, job.target, index)
        images.finish()
    except Cancelled:
        images.finish()  # keep the images that are computed
        raise
    finally:
        images.abort()


def _run_in_workers(workers: Workers, journal: Journal | None, cancel: Cancel) -> None:
    try:
        workers.run(cancel)
    finally:
        if journal is not None:
            journal.remove_parts()  # remove the files of killed workers


def find_jobs(
    inputs: Inputs, output: str | Path, settings: UpscaleSettings
) -> tuple[Found, Path | None]:
    """Return the jobs, and the folder for a journal (None for one file to one file)."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found = discover(given, output, format=settings.format, suffix_text=settings.suffix)
    return found, None if found.single_file else Path(output)


def skipped_inputs(found: Found) -> list[SkippedInput]:
    """Return what was found in addition to images, as report entries."""
    return [SkippedInput(path=str(one.path), reason=one.reason) for one in found.skipped]


@contextlib.contextmanager
def _open_journal(folder: Path | None):
    if folder is None:
        yield None
        return
    with Journal(folder) as journal:
        journal.remove_parts()
        yield journal


def _smallest_budget(
    devices: list[str],
    budget: str | int | Budget,
    host: str | int | None,
    disk: str | int | None,
    scratch: Path,
) -> Budget:
    """Return the budget of the device that has least memory."""
    budgets = [
        Budget.parse(budget, device=device, host=host, disk=disk, scratch=scratch)
        for device in dict.fromkeys(devices)
    ]
    return min(budgets, key=lambda one: one.device_bytes)
