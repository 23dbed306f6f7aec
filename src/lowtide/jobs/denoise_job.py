"""Denoising as a job of the pipeline: the noise level of each image, then the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from torch import nn

from lowtide.core.progress import check_cancel
from lowtide.jobs.denoise_settings import DenoiseSettings
from lowtide.jobs.image_adapter import NoisyImageAdapter
from lowtide.jobs.image_job import ImageJob
from lowtide.jobs.item import Item
from lowtide.jobs.pipeline import Pipeline
from lowtide.jobs.planning import ImageTaskPlan
from lowtide.jobs.report import DenoisedImageReport, DenoiseReport
from lowtide.media import AsyncWriter, ImageSink, ImageSource, open_image
from lowtide.models.denoiser.denoiser import Denoiser, denoisers_in
from lowtide.models.denoiser.noise_level import NoiseLevel
from lowtide.streaming.tiles.runner import RunOutcome

# Half a step of 8 bits: no noise that could be seen, and less than texture is taken for.
_LEAST_SIGMA = 0.5
_BAND_PIXELS = 1 << 18


class DenoiseJob(ImageJob):
    """Removes the noise of images with one denoiser, each at its own level."""

    settings_type, report_type = DenoiseSettings, DenoiseReport

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # By index, in levels of 255; None where the image does not tell.
        self._levels: dict[int, float | None] = {}

    def plan(self, item: Item) -> ImageTaskPlan:
        """Plan one image from its header, and estimate its noise from its pixels."""
        planned = super().plan(item)
        if item.index not in self._levels:
            given = self.settings.sigma
            self._levels[item.index] = self._estimate(item.source) if given is None else given
        planned.notes += self._level_notes(self._levels[item.index])
        return planned

    def item_report(self, item: Item, planned: ImageTaskPlan, status: Any) -> DenoisedImageReport:
        """Return the report of a planned image, with its noise level."""
        return DenoisedImageReport(
            **dict(super().item_report(item, planned, status)),
            sigma=self._levels[item.index],
            sigma_source="estimated" if self.settings.sigma is None else "given",
        )

    def _execute(
        self,
        item: Item,
        planned: ImageTaskPlan,
        source: ImageSource,
        sink: ImageSink | AsyncWriter,
        pipeline: Pipeline,
        queue_bytes: int,
    ) -> RunOutcome:
        sigma = self._levels[item.index]
        copied = sigma is None or sigma < _LEAST_SIGMA
        for denoiser in self._denoisers():
            denoiser.set_level(0 if sigma is None or copied else sigma / 255)
        if not copied:
            return super()._execute(item, planned, source, sink, pipeline, queue_bytes)
        on_rows = pipeline.report_rows(item, self.budget, planned.upscaled.height)
        for first, rows in _bands(source):
            check_cancel(pipeline.cancel)
            sink.write(first, rows)
            if on_rows is not None:
                on_rows(len(rows))
        return RunOutcome()

    def _denoisers(self) -> Iterator[Denoiser]:
        """Iterate over the network's denoisers: on all devices, and in fp32 to compare with."""
        for network in (self.prepared.network, *self.prepared.replicas):
            yield from denoisers_in(cast(nn.Module, network.forward))
            if network.make_fp32_forward is not None:
                yield from denoisers_in(cast(nn.Module, network.make_fp32_forward()))

    def _estimate(self, path: Path) -> float | None:
        scratch = self.settings.scratch
        with open_image(path, max_pixels=self.settings.max_pixels, scratch_dir=scratch) as source:
            adapter = self.prepared.adapter(source.info)
            assert isinstance(adapter, NoisyImageAdapter)
            level = NoiseLevel(source.info.color_channels)
            for _, rows in _bands(source):
                level.add(adapter.visible_color(rows))
        sigma = level.sigma()
        return None if sigma is None else round(sigma * 255, 2)

    def _level_notes(self, sigma: float | None) -> list[str]:
        if sigma is None:
            return ["no pixel tells the noise level, so samples are copied; --sigma sets it"]
        if sigma < _LEAST_SIGMA:
            return [
                "no noise was found, so samples are copied"
                if self.settings.sigma is None
                else "without noise samples are copied"
            ]
        most = 255 * next(self._denoisers()).config.max_sigma
        if sigma > most * 1.001:
            return [f"the model was trained up to a sigma of {most:.3g} of 255"]
        return []


def _bands(source: ImageSource) -> Iterator[tuple[int, Any]]:
    """Yield (first row, rows) of an image, from the top down."""
    height, width, _ = source.shape
    step = max(1, _BAND_PIXELS // width)
    for first in range(0, height, step):
        yield first, source.read(first, min(first + step, height))


def preload(setup: dict[str, Any]) -> None:
    """Import the libraries of a worker's job."""
    DenoiseJob.preload(setup)


def load_job(setup: dict[str, Any]) -> DenoiseJob:
    """Make the job of a worker."""
    return DenoiseJob.load(setup)
