"""Command `lowtide video`: upscale videos within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.cli.common_options import FOLDER_FLAGS, Inputs, Output
from lowtide.cli.image_command import named_output, run_and_print_job
from lowtide.cli.settings_options import with_settings
from lowtide.cli.shell import report_errors
from lowtide.jobs.video.settings import IMAGE_ONLY, VideoSettings

if TYPE_CHECKING:
    from lowtide.jobs.video.report import VideosReport

# Order in help, within each panel.
_ORDER = (
    "output model denoise budget fps frames time device devices plan_file dry_run scale codec"
    " quality preset sound segment damaged deinterlace self_ensemble accuracy precision strategy"
    " cuda_graphs compile tile format suffix force max_pixels"
)


@report_errors
@with_settings(VideoSettings, _ORDER, flags=FOLDER_FLAGS, without=IMAGE_ONLY)
def video(inputs: Inputs, output: Output = None, **settings: Any) -> None:
    """Upscale videos within a memory budget.

    Frames keep their time stamps; subtitles, chapters and tags are kept as far as the output's
    container holds them, sound that it does not hold is encoded, and what is not kept is named
    before work starts. A stopped run
    resumes where it was, by the same command. Numbered images are a video too: a folder of them,
    or 'frames/%05d.png', as input with --fps, as output, or both.
    """
    target = named_output(output, "upscaled/", settings)
    run_and_print_job(_load, inputs, target, **settings)


def _load() -> Callable[..., VideosReport]:
    from lowtide.jobs.video.command import video

    return video
