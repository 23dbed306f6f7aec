"""Dry run of an upscaling job, on this machine or on a device that is not present."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from lowtide.core.errors import LowtideError
from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.images.keywords import UpscaleKeywords
from lowtide.jobs.images.run import Inputs
from lowtide.jobs.upscale.command import upscale
from lowtide.jobs.upscale.report import UpscaleReport
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.memory.profiles import profile_names


@show_keywords(UpscaleSettings, UpscaleKeywords)
def plan(
    inputs: Inputs,
    output: str | Path,
    *,
    force: bool = False,
    sidecar: bool = False,
    comparison: str | Path | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[UpscaleKeywords],
) -> UpscaleReport:
    """Plan what `upscale` would do with the same arguments; nothing is run, no result is written.

    What `upscale` refuses is refused: an output that exists, without ``force``. Files that an
    earlier run of the folder finished are ``skipped``. With ``sidecar`` the plan of each image is
    written, where the report on its result would be.

    ``device`` may also be the name of a device profile (``"rtx3060-12gb"``), which need not be
    present: memory is then traced and its allocator simulated, time is a rough prior, and
    ``budget`` is by default what a desktop leaves of the GPU's memory. Each image of the report has
    status ``planned`` and its `Plan`, or ``failed`` and the reason. On this machine the model is
    probed unless its costs are cached. Raises as `upscale` does.
    """
    return upscale(
        inputs,
        output,
        dry_run=True,
        force=force,
        sidecar=sidecar,
        comparison=comparison,
        progress=progress,
        cancel=cancel,
        **settings,
    )


def plan_on_all_devices(
    inputs: Inputs,
    output: str | Path,
    *,
    force: bool = False,
    comparison: str | Path | None = None,
    **settings: Unpack[UpscaleKeywords],
) -> dict[str, UpscaleReport | LowtideError]:
    """Run `plan` for the CPU and every GPU profile, and return reports by name.

    A device on which nothing fits, or that the settings do not suit, has the error instead. An
    error that all devices share is raised, since it comes from the inputs or the settings.
    """
    results: dict[str, UpscaleReport | LowtideError] = {}
    for name in profile_names():
        try:
            settings["device"] = name
            results[name] = plan(inputs, output, force=force, comparison=comparison, **settings)
        except LowtideError as error:
            results[name] = error
    first = next(iter(results.values()))
    if isinstance(first, LowtideError) and len({str(one) for one in results.values()}) == 1:
        raise first
    return results
