"""Command `lowtide denoise`: remove the noise of images within a memory budget."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.progress_bar import ProgressLine
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import JsonReport, Quiet, handle_errors, option, print_result
from lowtide.core.errors import UsageError
from lowtide.jobs.denoise_settings import DenoiseSettings

DEFAULT_OUTPUT = "denoised/"  # for a dry run, which writes nothing
_MAIN, _OUT = "Main", "Output"
# Order in help, within each panel.
_ORDER = (
    "output model sigma noise iso steps scheduler eta seed black_level raw_output budget device"
    " devices plan_file dry_run self_ensemble accuracy precision strategy cuda_graphs compile tile"
    " kind format suffix force strip_metadata max_pixels png_compression jpeg_quality webp_quality"
    " webp_lossless avif_quality tiff_compression"
)


@handle_errors
@with_settings(DenoiseSettings, _ORDER)
def denoise(
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files, folders (their tree is mirrored) or quoted glob patterns."),
    ],
    output: Annotated[
        str | None,
        option(
            "-o",
            "--output",
            panel=_MAIN,
            metavar="PATH",
            help=(
                "A file for one input; a folder for several, or with a slash at its end. Nothing is"
                " overwritten without --force."
            ),
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        option("--dry-run", panel=_MAIN, help="Print the noise levels and the plan, and stop."),
    ] = False,
    force: Annotated[
        bool, option("--force", panel="Files", help="Replace files and redo finished work.")
    ] = False,
    report: Annotated[
        bool,
        option(
            "--report", panel=_OUT, help=("Write a report next to each result, NAME.lowtide.json.")
        ),
    ] = False,
    reference: Annotated[
        Path | None,
        option(
            "--reference",
            panel=_OUT,
            metavar="PATH",
            help=(
                "A clean file, or a folder with a clean file of the same name for each: report PSNR"
                " and SSIM against it, as they are and brightness-aligned."
            ),
        ),
    ] = None,
    comparison: Annotated[
        Path | None,
        option(
            "--comparison",
            panel=_OUT,
            metavar="PICTURE",
            help=(
                "Draw a detail: noisy, denoised, by non-local means, and the residual. For one"
                " file."
            ),
        ),
    ] = None,
    as_json: JsonReport = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Remove the noise of photographs within a memory budget.

    The noise level is estimated from each image. The result equals that of the unconstrained
    model unless the report says otherwise, and then it states the error. A stopped folder
    resumes where it was.
    """
    if output is None and not dry_run:
        raise UsageError("no output is given", hint="add -o OUTPUT")
    from lowtide.core.heap import tune_heap

    tune_heap()  # before the libraries load; no other code shares this process
    from lowtide.cli.print_report import print_report, print_skipped_inputs
    from lowtide.jobs.denoise import denoise as run

    gc.freeze()  # keep library objects out of the collection before each image
    progress = ProgressLine(quiet=quiet)
    try:
        result = run(
            inputs,
            output or DEFAULT_OUTPUT,
            dry_run=dry_run,
            force=force,
            sidecar=report,
            reference=reference,
            comparison=comparison,
            progress=progress,
            **settings,
        )
    finally:
        progress.close()
    print_skipped_inputs(result)
    print_result(result, lambda: print_report(result), result.raise_for_failures, as_json=as_json)
