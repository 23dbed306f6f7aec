"""Dry run of an upscaling job, on this machine or on a device that is not present."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.core.errors import LowtideError
from lowtide.core.progress import Cancel, ProgressCallback, check_cancel
from lowtide.jobs.absent_device import prepare_for_profile
from lowtide.jobs.devices import resolve_device
from lowtide.jobs.job_monitor import JobMonitor, report_progress
from lowtide.jobs.planning import plan_image
from lowtide.jobs.prepare import PreparedModel, preload_libraries
from lowtide.jobs.report import ImageReport, UpscaleReport, versions
from lowtide.jobs.results import failed_image
from lowtide.jobs.settings import UpscaleSettings
from lowtide.jobs.target_size import scale_checker
from lowtide.jobs.upscale import Inputs, find_jobs, skipped_inputs
from lowtide.media.discover import FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.profiles import DeviceProfile, load_profile, profile_names


def plan(
    inputs: Inputs,
    output: str | Path,
    *,
    budget: str | int | Budget = "auto",
    host_budget: str | int | None = None,
    disk_budget: str | int | None = None,
    scratch: str | Path | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Any,
) -> UpscaleReport:
    """Plan what `upscale` would do with the same arguments; nothing is run or written.

    ``device`` may also be the name of a device profile (``"rtx3060-12gb"``), which need not be
    present: memory is then traced and its allocator simulated, time is a rough prior, and
    ``budget`` is by default what a desktop leaves of the GPU's memory. Each image of the report has
    status ``planned`` and its `Plan`, or ``failed`` and the reason. On this machine the model is
    probed unless its costs are cached. Raises as `upscale` does.
    """
    chosen = UpscaleSettings.of(**settings)
    found, _ = find_jobs(inputs, output, chosen)
    jobs, check = found.pairs, scale_checker(found.pairs, chosen)
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    profile = absent_device_profile(chosen.device)
    if profile is None:
        device = resolve_device(chosen.one_device)
        parsed = Budget.parse(
            budget,
            device=device,
            host=host_budget,
            disk=disk_budget,
            scratch=Path(scratch) if scratch else Path(output),
        )
        preload_libraries(chosen)
        monitor = JobMonitor(open_meter(device), progress, cancel)
        monitor.meter.start()
        try:
            prepared = monitor.prepare(
                chosen, device, parsed, plan_file, runs_job=False, on_loaded=check
            )
        finally:
            monitor.meter.stop()
    else:
        report_progress(progress, "load", chosen.model_name)
        parsed = Budget.for_profile(profile, budget)
        prepared = prepare_for_profile(chosen, profile, check)
        prepared.programs.on_capture = lambda: report_progress(
            progress, "capture", chosen.model_name
        )
    planner = _PlannedImage(prepared, chosen, parsed, plan_file, len(jobs))
    report = UpscaleReport(
        model=prepared.descriptor.to_dict(),
        device=prepared.network.device,
        versions=versions(chosen.model_name),
        skipped_inputs=skipped_inputs(found),
    )
    for job in jobs:
        check_cancel(cancel)
        report.images.append(planner.plan(job, is_single=len(jobs) == 1))
    return report


def plan_on_all_devices(
    inputs: Inputs, output: str | Path, **settings: Any
) -> dict[str, UpscaleReport | LowtideError]:
    """Run `plan` for the CPU and every GPU profile, and return reports by name.

    A device on which nothing fits, or that the settings do not suit, has the error instead. An
    error that all devices share is raised, since it comes from the inputs or the settings.
    """
    results: dict[str, UpscaleReport | LowtideError] = {}
    for name in profile_names():
        try:
            results[name] = plan(inputs, output, **{**settings, "device": name})
        except LowtideError as error:
            results[name] = error
    first = next(iter(results.values()))
    if isinstance(first, LowtideError) and len({str(one) for one in results.values()}) == 1:
        raise first
    return results


def absent_device_profile(device: str) -> DeviceProfile | None:
    """Return the profile that ``device`` names, or None for a device of this machine.

    Raises:
        UsageError: The name is neither.
    """
    here = device == "auto" or device.partition(":")[0] in ("cpu", "cuda")
    return None if here else load_profile(device)


@dataclass
class _PlannedImage:
    prepared: PreparedModel
    settings: UpscaleSettings
    budget: Budget
    plan_file: PlanFile | None
    images: int

    def plan(self, job: FilePair, *, is_single: bool) -> ImageReport:
        """Return the report of one image's plan; the error of a single image is raised."""
        try:
            task = plan_image(
                job.source,
                job.target,
                self.prepared,
                self.settings,
                self.budget,
                plan_file=self.plan_file,
                images=self.images,
            )
        except LowtideError as error:
            if is_single:
                raise
            return failed_image(job, error)
        return ImageReport(
            input=str(job.source),
            output=str(job.target),
            status="planned",
            width=task.facts.info.width,
            height=task.facts.info.height,
            out_width=task.output.width,
            out_height=task.output.height,
            plan=task.plan,
            notes=task.notes,
        )
