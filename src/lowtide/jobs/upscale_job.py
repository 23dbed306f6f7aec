"""Upscaling as a job of the pipeline."""

from __future__ import annotations

from lowtide.jobs.image_job import ImageJob
from lowtide.jobs.report import UpscaleReport
from lowtide.jobs.upscale_settings import UpscaleSettings


class UpscaleJob(ImageJob):
    """Upscales images with one model."""

    settings_type, report_type = UpscaleSettings, UpscaleReport
