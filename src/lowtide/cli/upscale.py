"""Command `lowtide upscale`: upscale images within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowtide.cli.image_command import (
    Force,
    Inputs,
    Output,
    SidecarReport,
    require_output,
    run_job,
)
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import JsonReport, Quiet, handle_errors, option
from lowtide.core.errors import UsageError
from lowtide.jobs.upscale.settings import UpscaleSettings

if TYPE_CHECKING:
    from lowtide.jobs.upscale.report import UpscaleReport

DEFAULT_OUTPUT = "upscaled/"  # for a dry run, which writes nothing
_MAIN, _OUT = "Main", "Output"
# Order in help, within each panel.
_ORDER = (
    "output model denoise budget device devices plan_file dry_run scale self_ensemble accuracy"
    " precision strategy cuda_graphs compile tile tile_auto"
    " format suffix force strip_metadata max_pixels png_compression jpeg_quality webp_quality"
    " webp_lossless avif_quality tiff_compression"
)


@handle_errors
@with_settings(UpscaleSettings, _ORDER)
def upscale(
    inputs: Inputs,
    output: Output = None,
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
    force: Force = False,
    report: SidecarReport = False,
    comparison: Annotated[
        Path | None,
        option(
            "--comparison",
            panel=_OUT,
            metavar="PICTURE",
            help="Draw a detail: before, enlarged by a cubic filter, and after. For one file.",
        ),
    ] = None,
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
    require_output(output, dry_run=dry_run)
    written: dict[str, Any] = {}
    if not dry_run:
        written = {"force": force, "sidecar": report, "comparison": comparison}
    run_job(
        _load_plan if dry_run else _load_upscale,
        inputs,
        DEFAULT_OUTPUT if output is None else output,
        quiet=quiet,
        as_json=as_json,
        **written,
        **settings,
    )


def _load_plan() -> Callable[..., UpscaleReport]:
    from lowtide.jobs.upscale.plan import plan

    return plan


def _load_upscale() -> Callable[..., UpscaleReport]:
    from lowtide.jobs.upscale.command import upscale

    return upscale
