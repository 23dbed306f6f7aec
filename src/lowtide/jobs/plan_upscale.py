"""Dry run of an upscaling job, on this machine or on a device that is not present."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from lowtide.core.errors import LowtideError
from lowtide.core.progress import Cancel, ProgressCallback, check_cancel
from lowtide.jobs.absent_device import prepare_for_profile
from lowtide.jobs.devices import resolve_device
from lowtide.jobs.item import Item
from lowtide.jobs.prepare import preload_libraries, prepare
from lowtide.jobs.report import ImageReport, SkippedInput, UpscaleReport, versions
from lowtide.jobs.target_size import scale_checker
from lowtide.jobs.upscale import Inputs, UpscaleKeywords, find_jobs, show_keywords
from lowtide.jobs.upscale_job import UpscaleJob, image_report
from lowtide.jobs.upscale_settings import UpscaleSettings
from lowtide.media.discover import FilePair
from lowtide.memory.budget import Budget
from lowtide.memory.meter import open_meter
from lowtide.memory.plan_file import PlanFile
from lowtide.memory.profiles import DeviceProfile, load_profile, profile_names


@show_keywords
def plan(
    inputs: Inputs,
    output: str | Path,
    *,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[UpscaleKeywords],
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
    pairs = found.pairs
    plan_file = PlanFile.read(chosen.plan_file) if chosen.plan_file else None
    job = _load_job(chosen, pairs, plan_file, Path(output), progress, cancel)
    report = UpscaleReport(
        model=job.prepared.descriptor.to_dict(),
        device=job.prepared.network.device,
        versions=versions(chosen.model_name),
        skipped_inputs=SkippedInput.of(found),
    )
    for index, pair in enumerate(pairs, start=1):
        check_cancel(cancel)
        item = Item(pair.source, pair.target, index)
        try:
            report.images.append(image_report(item, job.plan(item), "planned"))
        except LowtideError as error:
            if len(pairs) == 1:
                raise
            report.images.append(ImageReport.of_failure(pair.source, pair.target, error))
    return report


def _load_job(
    settings: UpscaleSettings,
    pairs: list[FilePair],
    plan_file: PlanFile | None,
    output: Path,
    progress: ProgressCallback | None,
    cancel: Cancel,
) -> UpscaleJob:
    """Load the model on the device of ``settings``, which may be absent."""
    check, profile = scale_checker(pairs, settings), absent_device_profile(settings.device)
    if profile is not None:
        budget = Budget.for_profile(profile, settings.budget)
        prepared = prepare_for_profile(settings, profile, progress, check)
    else:
        (device,) = map(resolve_device, settings.device_names[:1])
        budget = settings.parse_budget(device, settings.scratch or output)
        preload_libraries(settings)
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
            )
        finally:
            meter.stop()
    return UpscaleJob(prepared, settings, budget, plan_file=plan_file, images=len(pairs))


def plan_on_all_devices(
    inputs: Inputs, output: str | Path, **settings: Unpack[UpscaleKeywords]
) -> dict[str, UpscaleReport | LowtideError]:
    """Run `plan` for the CPU and every GPU profile, and return reports by name.

    A device on which nothing fits, or that the settings do not suit, has the error instead. An
    error that all devices share is raised, since it comes from the inputs or the settings.
    """
    results: dict[str, UpscaleReport | LowtideError] = {}
    for name in profile_names():
        try:
            settings["device"] = name
            results[name] = plan(inputs, output, **settings)
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
