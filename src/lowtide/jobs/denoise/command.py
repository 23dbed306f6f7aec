"""Denoise files and folders within a budget: the job behind command and function."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

from lowtide.core.errors import UsageError
from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.denoise.comparisons import ReferenceFiles
from lowtide.jobs.denoise.job import DenoiseJob
from lowtide.jobs.denoise.raw.job import DenoiseRawJob
from lowtide.jobs.denoise.report import DenoiseReport
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.denoise.volumes.job import DenoiseVolumeJob
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.images.keywords import ImageKeywords
from lowtide.jobs.images.run import Inputs, named_inputs, run_images
from lowtide.media.discover import count_by_kind
from lowtide.models.denoiser.config import SchedulerName

_JOBS: dict[str, type[DenoiseJob]] = {
    "image": DenoiseJob,
    "raw": DenoiseRawJob,
    "volume": DenoiseVolumeJob,
}


class DenoiseKeywords(ImageKeywords, total=False):
    """Keywords of `denoise`: the fields of `DenoiseSettings`."""

    kind: Literal["auto", "image", "raw", "volume"]
    sigma: float | None
    noise: str | Path | None
    iso: int | None
    steps: int
    scheduler: SchedulerName | None
    eta: float
    seed: int
    black_level: float | None
    hot_pixels: bool
    raw_output: Literal["auto", "linear", "developed", "mosaic"]
    strength: float
    chroma_only: bool
    mask: str | Path | None
    slices: bool
    preview: str | tuple[int, int, int, int] | None


@show_keywords(DenoiseSettings, DenoiseKeywords)
def denoise(
    inputs: Inputs,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    sidecar: bool = False,
    reference: str | Path | None = None,
    comparison: str | Path | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[DenoiseKeywords],
) -> DenoiseReport:
    """Remove the noise of images within a byte budget.

    The noise level of each image is estimated, unless ``sigma`` gives it in levels of 255, or
    ``noise`` a camera's table. An image without noise is copied, sample for sample. Alpha is
    copied. ``strength``, ``chroma_only`` and ``mask`` keep part of the input, and ``preview`` runs
    a part alone. Results equal the unconstrained run unless the report's accuracy is ``bounded``,
    and then it states the measured error. An image that fails in a batch is reported
    (``report.failures``) and the others are done; the error of a single image is raised.

    Args:
        inputs: Files, folders (their tree is mirrored) or glob patterns.
        output: A file for one file, unless a folder has that name or a separator ends it, else a
            folder.
        dry_run: Estimate noise levels and plan, but run nothing and write no result.
        force: Replace files and redo finished work.
        sidecar: Write a report next to each result, or a plan where it would be.
        reference: A clean file for one input, or a folder with a clean file of the same relative
            name for each: reports have `scores`, of the files as they were written.
        comparison: Picture of a detail: noisy, denoised, by non-local means, and the residual.
            For one file.
        cancel: Stops the work with `Cancelled`, with no half-written file left.
        settings: Budget, model, noise level and all else, as fields of `DenoiseSettings`.

    Raises:
        UsageError: An argument is invalid, or the model is no denoiser.
        ImageError: An input cannot be read.
        ModelError: The model cannot be loaded or run.
        BudgetError: Nothing fits the budget.
        OutputError: A file cannot be written.
        Cancelled: ``cancel`` was set.
    """
    chosen = DenoiseSettings.of(**settings)
    job_type = choose_job(inputs, output, chosen.kind)
    job_type.check_settings(chosen)
    if chosen.preview is not None and (reference is not None or comparison is not None):
        raise UsageError(
            "--preview writes a part of a picture, and --reference and --comparison look at all",
            hint="drop --preview, or both of them",
        )
    comparisons = ReferenceFiles.find(
        job_type.media_kind, inputs, output, chosen, reference, comparison, force=force
    )
    report = run_images(
        job_type,
        chosen,
        inputs,
        output,
        dry_run=dry_run,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )
    if not dry_run:
        comparisons.make(report, sidecar=sidecar, cancel=cancel)
    return report


def choose_job(inputs: Inputs, output: str | Path, kind: str) -> type[DenoiseJob]:
    """Return the job for a kind of inputs; ``auto`` is the one kind that their names show.

    Raises:
        UsageError: Inputs are of several kinds.
        ImageError: There are none.
    """
    if kind != "auto":
        return _JOBS[kind]
    counts = count_by_kind(named_inputs(inputs), output, [job.media_kind for job in _JOBS.values()])
    present = {name: count for name, count in zip(_JOBS, counts, strict=True) if count}
    if len(present) > 1:
        found = " and ".join(
            f"{count} {_JOBS[name].media_kind.noun}s" for name, count in present.items()
        )
        raise UsageError(
            f"the inputs are of several kinds: {found}",
            hint=" or ".join(f"--kind {name}" for name in present),
        )
    return _JOBS[next(iter(present), "image")]
