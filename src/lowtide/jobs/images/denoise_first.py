"""Base of jobs that upscale what a denoiser makes of their images, in one pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lowtide.core.signal import RowSink
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.images.chosen_noise import ImageNoise, require_trained_noise
from lowtide.jobs.images.job import ImageJob, ItemRun
from lowtide.jobs.images.noise_finder import NoiseFinder, denoisers_of, set_noise_level
from lowtide.jobs.images.planning import PlannedImage
from lowtide.jobs.images.report import NoisyImageReport
from lowtide.media.image_info import ImageInfo, ImageRowReader
from lowtide.streaming.tiles.runner import TileRunOutcome


class DenoiseFirstJob(ImageJob):
    """Runs a model on images, or with ``--denoise`` a denoiser and that model as one network.

    The denoiser is given the noise level of each item before its run.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._finder: NoiseFinder | None = None
        self._noise: dict[int, ImageNoise] = {}  # by index
        if (sigma := self.settings.denoise) is not None:
            config = next(denoisers_of(self.prepared)).config
            require_trained_noise(None, config, self.settings.denoiser)
            level = None if sigma == "auto" else float(sigma)
            self._finder = NoiseFinder(config, level, option="--denoise")

    def open_noisy(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        """Open what the noise level of an item is estimated from."""
        return self.open_source(item, scratch)

    def plan(self, item: JobItem) -> PlannedImage:
        """Plan one image from its header, and find its noise level."""
        planned = super().plan(item)
        if self._finder is not None:
            if item.index not in self._noise:
                opened = partial(self.open_noisy, item, self.settings.scratch)
                self._noise[item.index] = self._finder.find(item.source, planned.facts, opened)
            planned.notes += self._level_notes(self._finder, self._noise[item.index])
        return planned

    def _level_notes(self, finder: NoiseFinder, noise: ImageNoise) -> list[str]:
        if noise.sigma is None:
            return ["no pixel tells the noise level, so that none is removed; --denoise 12 sets it"]
        found = ["no noise was found, so that none is removed"] if noise.is_none else []
        return found + finder.notes(noise)

    def set_level(self, item: JobItem, info: ImageInfo) -> None:
        """Give the denoiser the noise level of an item, whose rows are of ``info``."""
        if self._finder is not None:
            noise, share = self._noise[item.index], self.prepared.adapter(info).unit_share
            set_noise_level(self.prepared, (noise.sigma or 0.0) * share, noise.parameters)

    def _execute(self, run: ItemRun, source: ImageRowReader, sink: RowSink) -> TileRunOutcome:
        self.set_level(run.item, source.info)
        return super()._execute(run, source, sink)

    def item_report(self, item: JobItem, planned: PlannedImage, status: Any) -> NoisyImageReport:
        """Return the report of a planned image, with its noise level if that is removed."""
        finder = self._finder
        noise = {} if finder is None else finder.report_fields(self._noise[item.index])
        return NoisyImageReport(**dict(super().item_report(item, planned, status)), **noise)
