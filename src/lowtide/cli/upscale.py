"""Command `lowtide upscale`: upscale images within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowtide.cli.common_options import FOLDER_FLAGS, Inputs, Output, option
from lowtide.cli.image_command import named_output, run_and_print_job
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.core.errors import UsageError
from lowtide.jobs.upscale.settings import UpscaleSettings

if TYPE_CHECKING:
    from lowtide.jobs.upscale.report import UpscaleReport

# Order in help, within each panel.
_ORDER = (
    "output model denoise budget device devices plan_file dry_run scale self_ensemble accuracy"
    " precision strategy cuda_graphs compile tile tile_auto"
    " format suffix force strip_metadata max_pixels png_compression jpeg_quality webp_quality"
    " webp_lossless avif_quality tiff_compression"
)


@report_errors
@with_settings(UpscaleSettings, _ORDER, flags=FOLDER_FLAGS)
def upscale(
    inputs: Inputs,
    output: Output = None,
    tile_auto: Annotated[
        bool,
        option(
            "--tile-auto",
            panel="Overriding the plan",
            help=("Let the plan choose the tiles: the default. Contradicts --tile."),
        ),
    ] = False,
    comparison: Annotated[
        Path | None,
        option(
            "--comparison",
            panel="Output",
            metavar="PICTURE",
            help="Draw a detail: before, enlarged by a cubic filter, and after. For one file.",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Upscale photographs within a memory budget.

    The result equals that of the unconstrained model unless the report says otherwise, and
    then it states the error. A stopped folder resumes where it was.
    """
    if tile_auto and settings["tile"] is not None:
        raise UsageError("--tile-auto and --tile contradict each other", hint="drop one of them")
    target = named_output(output, "upscaled/", settings)
    run_and_print_job(_load, inputs, target, comparison=comparison, **settings)


def _load() -> Callable[..., UpscaleReport]:
    from lowtide.jobs.upscale.command import upscale

    return upscale
