"""The noise of pictures, as the denoisers of a network are given it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.jobs.images.chosen_noise import (
    ChosenNoise,
    ImageNoise,
    estimate_doubts,
    estimate_poisson_gaussian,
)
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.media import ImageFacts
from lowtide.media.coding_traces import color_step
from lowtide.media.formats import JPEG
from lowtide.media.image_info import ImageRowReader
from lowtide.models.denoiser.config import DenoiserConfig, FiniteDenoiserConfig
from lowtide.models.denoiser.noise_level import NoiseEstimate, NoiseEstimator
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
    PoissonGaussianNoise,
    network_terms,
)
from lowtide.models.denoiser.octaves import BLOCK

if TYPE_CHECKING:
    from lowtide.models.denoiser.denoiser import LeveledDenoiser

_BAND_PIXELS = 1 << 15
# Of larger images so many pixels tell the noise.
_ENOUGH_PIXELS = 1 << 22
# Bands that tell shot noise from the rest: more pixels have more of one brightness to choose from.
_STATISTICS_PIXELS = 1 << 18


def denoisers_of(prepared: PreparedModel) -> Iterator[LeveledDenoiser]:
    """Iterate over a network's denoisers: on all devices, and in fp32 to compare with."""
    from lowtide.models.denoiser.denoiser import denoisers_in

    for network in (prepared.network, *prepared.replicas):
        yield from denoisers_in(network.forward)
        if network.make_fp32_forward is not None:
            yield from denoisers_in(network.make_fp32_forward())


def set_noise_level(prepared: PreparedModel, sigma: float, parameters: tuple[float, ...]) -> None:
    """Give a network's denoisers the noise that they remove, as `ImageNoise` has it."""
    for denoiser in denoisers_of(prepared):
        denoiser.set_level(sigma, parameters)


def read_bands(
    source: ImageRowReader, cancel: Cancel = None, pixels: int = _BAND_PIXELS
) -> Iterator[tuple[int, Any]]:
    """Yield (first row, rows) of an image, from the top down, of about ``pixels`` each."""
    height, width, _ = source.shape
    step = max(1, pixels // width)
    for first in range(0, height, step):
        raise_if_cancelled(cancel)
        yield first, source.read(first, min(first + step, height))


@dataclass(frozen=True)
class NoiseFinder:
    """Finds the noise of pictures: as it was given, of a table, or estimated from their pixels.

    Attributes:
        config: That of the denoisers.
        sigma: The level that was given, in levels of 255; None: it is estimated.
        chosen: What ``--noise`` chose; None is Gaussian noise.
        option: The option that gives a level, for notes.
    """

    config: DenoiserConfig
    sigma: float | None = None
    chosen: ChosenNoise | None = None
    option: str = "--sigma"

    def find(
        self, source: Path, facts: ImageFacts, open_picture: Callable[[], ImageRowReader]
    ) -> ImageNoise:
        """Return the noise of a picture, which is opened and read where it has to be estimated."""
        chosen, given = self.chosen, "given"
        if chosen is not None and chosen.table is not None:
            known, given = chosen.at(), "table"
        elif self.sigma is not None:
            known = GaussianNoise(std=self.sigma / 255)
            if isinstance(self.config, FiniteDenoiserConfig) and self.sigma:
                return self._estimate(source, facts, open_picture)
        else:
            return self._estimate(source, facts, open_picture)
        return ImageNoise(*network_terms(known, self.config), given)

    def notes(self, noise: ImageNoise) -> list[str]:
        """Return what a user has to know of noise that is removed."""
        most = self.config.max_sigma
        notes = list(noise.doubts)
        if noise.is_none or noise.sigma is None:
            return notes
        if noise.sigma > most * 1.001:
            notes.append(f"the model was trained up to a sigma of {most * 255:.3g} of 255")
        if self.config.linear:
            notes.append("the model is for values in proportion to light, as undeveloped files are")
        return notes

    def report_fields(self, noise: ImageNoise) -> dict[str, Any]:
        """Return what a report says of noise, as fields of `NoisyImageReport`."""
        return {
            "sigma": noise.levels,
            "sigma_source": noise.source,
            "shared_by_neighbors": noise.shared and not noise.is_none,
            "noise": "gaussian" if self.chosen is None else self.chosen.describe(),
            "noise_parameters": noise.parameters,
        }

    def _estimate(
        self, source: Path, facts: ImageFacts, open_picture: Callable[[], ImageRowReader]
    ) -> ImageNoise:
        """Return the noise that pixels show; its kind alone where the level was given."""
        by_light = self.chosen is not None and self.chosen.name == PoissonGaussianNoise.name
        lost = color_step(source) / 255 if facts.format == JPEG.name else 0.0
        level = NoiseEstimator(facts.info.color_channels, lost=lost)
        with open_picture() as opened:
            adapter = NoisyImageAdapter(opened.info, opened.info.color_channels)
            bands = read_bands(opened, pixels=_STATISTICS_PIXELS) if by_light else _strips(opened)
            colors = (adapter.visible_color(rows) for _, rows in bands)
            return (self._by_light if by_light else self._gaussian)(colors, level)

    def _gaussian(self, bands: Iterable[np.ndarray], level: NoiseEstimator) -> ImageNoise:
        """Return noise that is the same at all values; by octaves, if the network takes them."""
        for rows in bands:
            level.add(rows)
        found = level.estimate()
        if self.sigma is not None:
            given = GaussianNoise(std=self.sigma / 255)
            noise = self._by_octaves(given, found or NoiseEstimate(0.0))
            return replace(noise, source="given")
        if found is None:
            return self._unknown
        known = GaussianNoise(std=round(found.sigma * 255, 2) / 255)
        doubts = estimate_doubts(found, known, self.option)
        return replace(self._by_octaves(known, found), doubts=doubts)

    def _by_light(self, bands: Iterable[np.ndarray], level: NoiseEstimator) -> ImageNoise:
        """Return noise that grows with the values."""

        def seen() -> Iterator[np.ndarray]:
            for rows in bands:
                level.add(rows)
                yield rows

        known = estimate_poisson_gaussian(seen())
        found = level.estimate()
        if known is None or found is None:
            return self._unknown
        doubts = estimate_doubts(found, known, self.option)
        return ImageNoise(*network_terms(known, self.config), "estimated", doubts=doubts)

    def _by_octaves(self, known: GaussianNoise, found: NoiseEstimate) -> ImageNoise:
        sigma, parameters = network_terms(known, self.config)
        if isinstance(self.config, FiniteDenoiserConfig):
            parameters = found.shares or parameters
        return ImageNoise(sigma, parameters, "estimated", found.shared)

    @property
    def _unknown(self) -> ImageNoise:
        """The noise of a picture no pixel of which tells it."""
        return ImageNoise(None, (0.0,) * self.config.noise_parameters, "estimated")


def _strips(source: ImageRowReader) -> Iterator[tuple[int, Any]]:
    """Yield (first row, rows) of strips of blocks: all of them, or of a large image some."""
    height, width, _ = source.shape
    step = BLOCK * -(-height * width // _ENOUGH_PIXELS)
    for first in range(0, height, step):
        yield first, source.read(first, min(first + BLOCK, height))
