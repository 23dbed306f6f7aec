"""Command `lowtide upscale`: upscale images within a memory budget."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.progress_bar import ProgressLine
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import JsonReport, Quiet, handle_errors, option, print_result
from lowtide.core.errors import UsageError
from lowtide.jobs.upscale_settings import UpscaleSettings

if TYPE_CHECKING:
    from lowtide.jobs.report import UpscaleReport

DEFAULT_OUTPUT = "upscaled/"  # for a dry run, which writes nothing
_MAIN, _OUT = "Main", "Output"
# Order in help, within each panel.
_ORDER = (
    "output model budget device devices plan_file dry_run scale self_ensemble accuracy"
    " precision strategy cuda_graphs provider compile tile tile_auto"
    " format suffix force strip_metadata max_pixels png_compression jpeg_quality webp_quality"
    " webp_lossless avif_quality tiff_compression"
)


@handle_errors
@with_settings(UpscaleSettings, _ORDER)
def upscale(
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
        bool, option("--dry-run", panel=_MAIN, help="Print the plan and stop.")
    ] = False,
    tile_auto: Annotated[
        bool,
        option(
            "--tile-auto",
            panel="Overriding the plan",
            help=("Let the plan choose the tiles: the default. Contradicts --tile."),
        ),
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
    as_json: JsonReport = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Upscale photographs within a memory budget.

    The result equals that of the unconstrained model unless the report says otherwise, and
    then it states the error. A stopped folder resumes where it was.
    """
    if tile_auto and settings["tile"] is not None:
        raise UsageError("--tile-auto and --tile contradict each other", hint="drop one of them")
    if output is None and not dry_run:
        raise UsageError("no output is given", hint="add -o OUTPUT")
    progress = ProgressLine(quiet=quiet)
    try:
        result = _work(inputs, output, dry_run, force, report, progress, settings)
    finally:
        progress.close()
    _show(result, as_json=as_json)


def _work(
    inputs: list[str],
    output: str | None,
    dry_run: bool,
    force: bool,
    sidecar: bool,
    progress: ProgressLine,
    settings: dict[str, Any],
) -> UpscaleReport:
    from lowtide.core.heap import tune_heap

    tune_heap()  # before the libraries load; no other code shares this process
    from lowtide.jobs.plan_upscale import plan
    from lowtide.jobs.upscale import upscale

    gc.freeze()  # keep library objects out of the collection before each image
    if dry_run:
        return plan(inputs, output or DEFAULT_OUTPUT, progress=progress, **settings)
    assert output is not None
    return upscale(inputs, output, force=force, sidecar=sidecar, progress=progress, **settings)


def _show(result: UpscaleReport, *, as_json: bool) -> None:
    from lowtide.cli.print_report import print_report, print_skipped_inputs

    print_skipped_inputs(result)
    print_result(result, lambda: print_report(result), result.raise_for_failures, as_json=as_json)
