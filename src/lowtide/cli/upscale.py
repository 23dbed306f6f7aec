"""Command `lowtide upscale`: upscale images within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowtide.cli.common_options import (
    DryRun,
    Inputs,
    JsonReport,
    Output,
    Quiet,
    Redo,
    SidecarReport,
    option,
)
from lowtide.cli.image_command import require_output, run_job
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import handle_errors
from lowtide.core.errors import UsageError
from lowtide.jobs.upscale.settings import UpscaleSettings

if TYPE_CHECKING:
    from lowtide.jobs.upscale.report import UpscaleReport

DEFAULT_OUTPUT = "upscaled/"  # for a dry run, which writes nothing
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
    dry_run: DryRun = False,
    tile_auto: Annotated[
        bool,
        option(
            "--tile-auto",
            panel="Overriding the plan",
            help=("Let the plan choose the tiles: the default. Contradicts --tile."),
        ),
    ] = False,
    force: Redo = False,
    report: SidecarReport = False,
    comparison: Annotated[
        Path | None,
        option(
            "--comparison",
            panel="Output",
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
