"""Upscale videos within a budget: the job behind command and function."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

from lowtide.core.progress import Cancel, ProgressCallback
from lowtide.jobs.clips.settings import ClipKeywords
from lowtide.jobs.engine.settings import show_keywords
from lowtide.jobs.images.keywords import EnlargeKeywords
from lowtide.jobs.images.run import Inputs, run_images
from lowtide.jobs.video.job import VideoJob
from lowtide.jobs.video.report import VideosReport
from lowtide.jobs.video.settings import VideoSettings


class VideoKeywords(EnlargeKeywords, ClipKeywords, total=False):
    """Keywords of `video`: the fields of `VideoSettings`."""

    fps: str | float | None
    sound: str | Path
    damaged: Literal["refuse", "keep"]


@show_keywords(VideoSettings, VideoKeywords)
def video(
    inputs: Inputs,
    output: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    sidecar: bool = False,
    progress: ProgressCallback | None = None,
    cancel: Cancel = None,
    **settings: Unpack[VideoKeywords],
) -> VideosReport:
    """Upscale videos within a byte budget, frame by frame.

    Frames keep their number and their time stamps, and all other streams of the file are copied as
    far as the output's container holds them; sound that it does not hold is encoded. Memory does
    not grow with the length. A run that was stopped goes on when it is called again: segments of
    frames that were finished are kept in a hidden folder next to the output, which has its name
    only when it is complete and was read back.

    Args:
        inputs: Files, folders (their tree is mirrored) or glob patterns. Or one sequence of images:
            a folder of numbered PNG or TIFF files, or a pattern such as ``"frames/%05d.png"``.
        output: A file for one file, unless a folder has that name or a separator ends it, else a
            folder. Or a pattern, for an image file of each frame.
        dry_run: Plan, but run nothing and write no result.
        force: Replace files and redo finished work.
        sidecar: Write a report next to each result, or a plan where it would be.
        cancel: Stops the work with `Cancelled`, after one frame at most.
        settings: Budget, model, target size, encoder and all else, as fields of `VideoSettings`.

    Raises:
        UsageError: An argument is invalid, or the output cannot hold the video.
        VideoError: An input is damaged, or of a kind that is not supported.
        ModelError: The model cannot be loaded or run.
        BudgetError: Nothing fits the budget.
        OutputError: A file cannot be written, or another run writes it.
        Cancelled: ``cancel`` was set.
    """
    chosen = VideoSettings.of(**settings)
    return run_images(
        VideoJob,
        chosen,
        inputs,
        output,
        dry_run=dry_run,
        force=force,
        sidecar=sidecar,
        progress=progress,
        cancel=cancel,
    )
