"""Upscaling as a job of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lowtide.jobs.images.denoise_first import DenoiseFirstJob
from lowtide.jobs.images.model_choice import suited_upscaler
from lowtide.jobs.upscale.report import UpscaleReport
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.media.discover import FilePair


class UpscaleJob(DenoiseFirstJob):
    """Upscales images with one model, denoised or as they are."""

    settings_type, report_type = UpscaleSettings, UpscaleReport

    @classmethod
    def suited(
        cls, settings: Any, pairs: Sequence[FilePair], before: Iterable[str] = ()
    ) -> tuple[Any, str]:
        """Return the settings with a bundled model for these files, and why, if none is named."""
        if settings.model is not None:
            return settings, ""
        files = [pair.source for pair in pairs]
        name, reason = suited_upscaler(files, settings.bundled_scale, before)
        return replace(settings, model=name), reason
