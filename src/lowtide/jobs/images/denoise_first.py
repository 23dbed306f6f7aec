"""Base of jobs that upscale what a denoiser makes of their images, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.core.signal import Sink
from lowtide.jobs.denoise.job import DenoiseJob
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.engine.item import Item
from lowtide.jobs.engine.report import NoisyImageReport
from lowtide.jobs.images.job import ImageJob, ItemRun
from lowtide.jobs.images.planning import ImageTaskPlan
from lowtide.media.image_info import ImageInfo, ImageRows
from lowtide.streaming.tiles.runner import RunOutcome

Opener = Callable[[Item, Path | None], ImageRows]


class DenoisingFirst(ImageJob):
    """Runs a model on images, or with ``--denoise`` a denoiser and that model as one network.

    The denoiser is given the noise level of each item before its run.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._levels: _Levels | None = None
        if (sigma := self.settings.denoise) is not None:
            settings = DenoiseSettings(
                model=self.settings.denoiser, sigma=None if sigma == "auto" else sigma
            )
            self._levels = _Levels(self.prepared, settings, self.budget, opener=self.open_noisy)

    def open_noisy(self, item: Item, scratch: Path | None) -> ImageRows:
        """Open what the noise level of an item is estimated from."""
        return self.open_source(item, scratch)

    def plan(self, item: Item) -> ImageTaskPlan:
        """Plan one image from its header, and find its noise level."""
        planned = super().plan(item)
        if self._levels is not None:
            planned.notes += self._levels.known(item, planned)
        return planned

    def set_level(self, item: Item, info: ImageInfo) -> None:
        """Give the denoiser the noise level of an item, whose rows are of ``info``."""
        if self._levels is not None:
            self._levels.prepared = self.prepared
            self._levels.set(item, self.prepared.adapter(info).unit_share)

    def _execute(self, run: ItemRun, source: ImageRows, sink: Sink) -> RunOutcome:
        self.set_level(run.item, source.info)
        return super()._execute(run, source, sink)

    def item_report(self, item: Item, planned: ImageTaskPlan, status: Any) -> NoisyImageReport:
        """Return the report of a planned image, with its noise level if that is removed."""
        noise = {} if self._levels is None else self._levels.noise_report(item)
        return NoisyImageReport(**dict(super().item_report(item, planned, status)), **noise)


class _Levels(DenoiseJob):
    """Noise levels of items, and the denoiser in a network, which is given them."""

    def __init__(self, *given: Any, opener: Opener) -> None:
        super().__init__(*given)
        self._opener = opener

    def _open_whole(self, item: Item, scratch: Path | None) -> ImageRows:
        return self._opener(item, scratch)

    def known(self, item: Item, planned: ImageTaskPlan) -> list[str]:
        """Return what a user has to know of an item's noise, which is found if it is not known."""
        if item.index not in self._noise:
            self._noise[item.index] = self.find_noise(item, planned)
        return self.level_notes(item)

    def level_notes(self, item: Item) -> list[str]:
        """Return what a user has to know of an item's noise."""
        noise = self._noise[item.index]
        if noise.sigma is None:
            return ["no pixel tells the noise level, so that none is removed; --denoise 12 sets it"]
        notes = noise.doubts if noise.is_none else super().level_notes(item)
        found = ["no noise was found, so that none is removed"] if noise.is_none else []
        return found + [one.replace("--sigma", "--denoise") for one in notes]

    def set(self, item: Item, share: float) -> None:
        """Set the level of an item, of which a network's values are ``share``."""
        noise = self._noise[item.index]
        self._set_level((noise.sigma or 0.0) * share, noise.parameters)
