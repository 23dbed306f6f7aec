"""Dry run of a job on images, on this machine or on a device that is not present."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowtide.core.errors import LowtideError
from lowtide.core.progress import Cancel, ProgressCallback, check_cancel
from lowtide.jobs.engine.devices import resolve_device
from lowtide.jobs.engine.item import Item
from lowtide.jobs.engine.report import SkippedInput, versions
from lowtide.jobs.images.absent_device import prepare_for_profile
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.model_costs import whole_image
from lowtide.jobs.images.prepare import prepare
from lowtide.jobs.images.run import Inputs, find_jobs, scale_checker
from lowtide.jobs.images.settings import ImageSettings
from lowtide.media.discover import FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.profiles import DeviceProfile, load_profile


def plan_images(
    job_type: type[ImageJob],
    chosen: ImageSettings,
    inputs: Inputs,
    output: str | Path,
    *,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> Any:
    """Plan what `run_images` would do, and return the report of the type; runs nothing.

    Arguments and errors are those of `lowtide.plan`.
    """
    found, _ = find_jobs(inputs, output, chosen, job_type)
    pairs = found.pairs
    chosen, why = job_type.suited(chosen, pairs)
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    job = _load_job(job_type, chosen, pairs, plan_file, Path(output), progress, cancel)
    report = job_type.report_type(
        model=job.prepared.descriptor.to_dict(),
        model_choice=why,
        device=job.prepared.network.device,
        versions=versions(chosen.model_name, job_type.packages),
        skipped_inputs=SkippedInput.of(found),
    )
    for index, pair in enumerate(pairs, start=1):
        check_cancel(cancel)
        item = Item(pair.source, pair.target, index)
        try:
            report.items.append(job.item_report(item, job.plan(item), "planned"))
        except LowtideError as error:
            if len(pairs) == 1:
                raise
            report.items.append(report.item_type.of_failure(pair.source, pair.target, error))
    return report


def _load_job(
    job_type: type[ImageJob],
    settings: ImageSettings,
    pairs: list[FilePair],
    plan_file: PlanFile | None,
    output: Path,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> ImageJob:
    """Load the model on the device of ``settings``, which may be absent."""
    profile, check = (
        absent_device_profile(settings.device),
        scale_checker(job_type, pairs, settings),
    )
    if profile is not None:
        budget = Budget.for_profile(profile, settings.budget)
        prepared = prepare_for_profile(settings, profile, progress, check)
    else:
        (device,) = map(resolve_device, settings.device_names[:1])
        budget = settings.parse_budget(device, settings.scratch or output)
        job_type.load_libraries(settings)
        meter = open_meter(device)
        meter.start()
        try:
            prepared = prepare(
                settings,
                device=device,
                limit_bytes=budget.device_bytes // 2,
                replayed=plan_file and plan_file.first,
                meter=meter,
                progress=progress,
                cancel=cancel,
                runs_job=False,
                on_loaded=check,
                whole=whole_image(job_type, settings, budget, pairs, None),
            )
        finally:
            meter.stop()
    return job_type(prepared, settings, budget, plan_file=plan_file, images=len(pairs))


def absent_device_profile(device: str) -> DeviceProfile | None:
    """Return the profile that ``device`` names, or None for a device of this machine.

    Raises:
        UsageError: The name is neither.
    """
    here = device == "auto" or device.partition(":")[0] in ("cpu", "cuda")
    return None if here else load_profile(device)
