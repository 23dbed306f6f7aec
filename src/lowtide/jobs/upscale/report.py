"""Report of an upscaling job."""

from __future__ import annotations

from pydantic import Field

from lowtide.core.errors import ImageError
from lowtide.jobs.engine.report import JobReport
from lowtide.jobs.images.report import NoisyImageReport


class UpscaleReport(JobReport):
    """Report of an upscaling job."""

    item_type = NoisyImageReport
    noun = "images"
    input_error = ImageError

    images: list[NoisyImageReport] = Field(default=[])
