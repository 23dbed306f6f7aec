"""Upscale files and folders within a budget: the job behind command and function."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.images.keywords import UpscaleKeywords
from lowtide.jobs.images.run import Inputs, find_jobs, run_images
from lowtide.jobs.upscale.job import UpscaleJob
from lowtide.jobs.upscale.report import UpscaleReport
from lowtide.jobs.upscale.settings import UpscaleSettings


@show_keywords(UpscaleSettings, UpscaleKeywords)
def upscale(
    inputs: Inputs,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    sidecar: bool = False,
    comparison: str | Path | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[UpscaleKeywords],
) -> UpscaleReport:
    """Upscale images within a byte budget.

    Results equal the unconstrained run unless the report's accuracy is ``bounded``, and then it
    states the measured error. An image that fails in a batch is reported (``report.failures``) and
    the others are done; the error of a single image is raised. Inputs in folders that are not
    images are in ``report.skipped_inputs``.

    Args:
        inputs: Files, folders (their tree is mirrored) or glob patterns.
        output: A file for one file, unless a folder has that name or a separator ends it, else a
            folder.
        dry_run: Plan, but run nothing and write no result, as `lowtide.plan` does.
        force: Replace files and redo finished work.
        sidecar: Write a report next to each result, or a plan where it would be.
        comparison: Picture of a detail, before and after. For one file.
        cancel: Stops the work with `Cancelled`, with no half-written file left.
        settings: Budget, model, target size and all else, as fields of `UpscaleSettings`.

    Raises:
        UsageError: An argument is invalid.
        ImageError: An input cannot be read.
        ModelError: The model cannot be loaded or run.
        BudgetError: Nothing fits the budget.
        OutputError: A file cannot be written.
        Cancelled: ``cancel`` was set.
    """
    chosen = UpscaleSettings.of(**settings)
    if comparison is not None:
        from lowtide.jobs.images.detail_picture import require_comparison

        found, _ = find_jobs(inputs, output, chosen, UpscaleJob)
        require_comparison(Path(comparison), found, force=force)
    report = run_images(
        UpscaleJob,
        chosen,
        inputs,
        output,
        dry_run=dry_run,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )
    if comparison is not None and not dry_run:
        from lowtide.jobs.images.detail_picture import draw_enlargement

        (image,) = report.images
        model, scratch = report.model["name"], Path(chosen.scratch) if chosen.scratch else None
        limit = max(chosen.max_pixels, image.out_width * image.out_height)
        draw_enlargement(Path(comparison), image, model, limit, scratch, replace=force)
    return report
