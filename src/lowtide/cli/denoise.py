"""Command `lowtide denoise`: remove the noise of images within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lowtide.cli.common_options import FOLDER_FLAGS, Inputs, Output, option
from lowtide.cli.image_command import named_output, run_and_print_job
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.jobs.denoise.settings import DenoiseSettings

if TYPE_CHECKING:
    from lowtide.jobs.denoise.report import DenoiseReport

# Order in help, within each panel.
_ORDER = (
    "output model sigma noise iso steps scheduler eta seed black_level hot_pixels raw_output"
    " budget device devices plan_file dry_run self_ensemble accuracy precision strategy"
    " cuda_graphs compile tile kind format suffix force strip_metadata max_pixels"
    " png_compression jpeg_quality webp_quality webp_lossless avif_quality tiff_compression"
)


@report_errors
@with_settings(DenoiseSettings, _ORDER, flags=FOLDER_FLAGS)
def denoise(
    inputs: Inputs,
    output: Output = None,
    reference: Annotated[
        Path | None,
        option(
            "--reference",
            panel="Output",
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
            panel="Output",
            metavar="PICTURE",
            help=(
                "Draw a detail: noisy, denoised, by non-local means, and the residual. For one"
                " file."
            ),
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Remove the noise of photographs within a memory budget.

    The noise level is estimated from each image. The result equals that of the unconstrained
    model unless the report says otherwise, and then it states the error. A stopped folder
    resumes where it was.
    """
    target = named_output(output, "denoised/", settings)
    run_and_print_job(_load, inputs, target, reference=reference, comparison=comparison, **settings)


def _load() -> Callable[..., DenoiseReport]:
    from lowtide.jobs.denoise.command import denoise

    return denoise
