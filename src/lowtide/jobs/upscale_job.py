"""Upscaling as a job of the pipeline."""

from __future__ import annotations

from typing import Any

from lowtide.jobs.image_job import ImageJob
from lowtide.jobs.report import UpscaleReport
from lowtide.jobs.upscale_settings import UpscaleSettings


class UpscaleJob(ImageJob):
    """Upscales images with one model."""

    settings_type, report_type = UpscaleSettings, UpscaleReport


def preload(setup: dict[str, Any]) -> None:
    """Import the libraries of a worker's job."""
    UpscaleJob.preload(setup)


def load_job(setup: dict[str, Any]) -> UpscaleJob:
    """Make the job of a worker."""
    return UpscaleJob.load(setup)
