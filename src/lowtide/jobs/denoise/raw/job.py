"""Denoising of camera RAW files: their mosaics, before they are developed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.signal import RowSource
from lowtide.jobs.denoise.job import DenoiseJob
from lowtide.jobs.denoise.raw.adapter import RawAdapter, RawScale
from lowtide.jobs.denoise.raw.noise import (
    diagonal_parity,
    estimate_shot_and_read,
    shot_and_read,
    stabilizer_for,
    table_noise,
    white_noise,
)
from lowtide.jobs.denoise.raw.report import DenoiseRawReport, RawImageReport
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.images.chosen_noise import ImageNoise, NoiseSource, require_trained_noise
from lowtide.jobs.images.model_choice import DENOISER
from lowtide.jobs.images.noise_finder import read_bands
from lowtide.jobs.images.planning import PlannedImage
from lowtide.jobs.images.target_size import TargetSize
from lowtide.media import ImageFacts
from lowtide.media.discover import RAW_FILES
from lowtide.media.hot_pixels import mend_hot_pixels
from lowtide.media.image_info import ImageInfo, ImageRowReader
from lowtide.media.raw_facts import RawFacts, RawOutputFacts, inspect_raw, raw_result
from lowtide.media.raw_file import MosaicLayout, RawFile, RawPlanesInfo, RawSource, load_rawpy
from lowtide.media.raw_sink import RawSink
from lowtide.models.denoiser.noise_models import GaussianNoise, PoissonGaussianNoise, network_terms

# Rounding alone is 0.3 of a level.
_LEAST_LEVELS = 0.5
_BAND_VALUES = 1 << 20


class DenoiseRawJob(DenoiseJob):
    """Removes the noise of camera RAW files, and develops them after."""

    report_type = DenoiseRawReport
    media_kind = RAW_FILES
    packages = ("rawpy",)
    own_options = "black_level", "hot_pixels", "raw_output"
    max_level = 65_535

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._sensor_noise: dict[int, PoissonGaussianNoise] = {}
        self._scales: dict[int, RawScale] = {}
        self._mended: dict[int, str] = {}
        self._errors: dict[int, tuple[float, float]] = {}

    def _check_noise(self) -> None:
        # After the transform noise is Gaussian; a network for linear values gets it as it is.
        chosen = self.settings.chosen_noise if self._config.linear else None
        require_trained_noise(chosen, self._config, self.settings.model_name)

    @classmethod
    def load_libraries(cls, settings: Any) -> None:
        """Import rawpy too."""
        super().load_libraries(settings)
        load_rawpy()

    @classmethod
    def inspect(cls, source: Path, settings: DenoiseSettings) -> RawFacts:
        """Return the facts of a RAW file, which is decoded for them."""
        return inspect_raw(source, max_pixels=settings.max_pixels, black_level=settings.black_level)

    @classmethod
    def target_size(
        cls, source: Path, target: Path, settings: Any, scale: int, facts: ImageFacts | None = None
    ) -> TargetSize:
        """Return sizes and format of a result; what the network gets is the filter's planes."""
        raw = cls.inspect(source, settings)
        return _sizes(raw, MosaicLayout(raw.period), _result(raw, source, target, settings))

    def sizes(self, item: JobItem) -> TargetSize:
        """Return sizes and format of an item's result."""
        facts = self._facts(item)
        return _sizes(facts, self._layout(item), self._result(item))

    def check_colors(self, item: JobItem, planned: PlannedImage) -> None:
        """Note what a filter array costs; one that the network is not for was refused before."""
        period = self._layout(item).period
        if period > 2:
            planned.notes.append(
                f"each of the {period**2} places of the filter array is denoised as an image of its"
                " own, which loses more detail than with a filter of 2 × 2"
            )
        planned.notes += _crop_notes(self._facts(item), self._result(item))

    def find_noise(self, item: JobItem, planned: PlannedImage) -> ImageNoise:
        """Return a file's noise as the network is given it, and keep that of the sensor."""
        facts, layout, config = self._facts(item), self._layout(item), self._config
        black = _black(facts, layout)
        self._scales[item.index] = RawScale(black, facts.white)
        noise, source = self._known_noise(item, facts, black)
        if noise is None or float(noise.sigma(1.0)) * facts.range < _LEAST_LEVELS:
            level = None if noise is None else 0.0
            return ImageNoise(level, (0.0,) * config.noise_parameters, source)
        self._sensor_noise[item.index] = noise
        if config.linear:
            chosen = self.settings.chosen_noise
            if chosen is not None and chosen.table is not None:
                return ImageNoise(*network_terms(chosen.at(facts.iso), config), source)
            return ImageNoise(*network_terms(noise, config), source)
        stabilizer = stabilizer_for(noise, facts, config.max_sigma)
        self._scales[item.index] = RawScale(black, facts.white, stabilizer)
        return ImageNoise(*network_terms(GaussianNoise(std=stabilizer.sigma), config), source)

    def _known_noise(
        self, item: JobItem, facts: RawFacts, black: np.ndarray
    ) -> tuple[PoissonGaussianNoise | None, NoiseSource]:
        chosen, sigma = self.settings.chosen_noise, self.settings.sigma
        if chosen is not None and chosen.table is not None:
            noise = table_noise(chosen, facts, item.source)
            return shot_and_read(noise, facts, item.source), "table"
        if sigma is not None:
            return shot_and_read(white_noise(sigma, facts), facts, item.source), "given"
        with self.open_source(item, self.settings.scratch) as source:
            parity = diagonal_parity(facts, self._layout(item))
            bands = read_bands(source, pixels=_BAND_VALUES // source.shape[2])
            found = estimate_shot_and_read((rows for _, rows in bands), black, facts.white, parity)
        if found is None:
            return None, "estimated"
        self._errors[item.index] = found.a_error * facts.range, found.b_error * facts.range
        return found.noise, "estimated"

    def adapter(self, item: JobItem, info: ImageInfo) -> RawAdapter:
        """Return the conversion between rows of an item's planes and the network."""
        assert isinstance(info, RawPlanesInfo)
        facts = self._facts(item)
        # Before its noise is known, a file is planned: for that the scale does not matter.
        unknown = RawScale(_black(facts, self._layout(item)), facts.white)
        scale = self._scales.get(item.index, unknown)
        return RawAdapter(info, self.prepared.geometry.in_channels, scale)

    def open_source(self, item: JobItem, scratch: Path | None) -> RawSource:
        """Open a file; its values are in memory as a whole, hot pixels mended if that is asked."""
        raw = RawFile(item.source, self.settings.black_level)
        if self.settings.hot_pixels:
            count = mend_hot_pixels(raw.values, self._facts(item).period)
            self._mended[item.index] = f"{count:,} hot pixels were mended"
        return RawSource(raw, self._layout(item))

    def open_again(
        self, item: JobItem, source: ImageRowReader, scratch: Path | None
    ) -> AbstractContextManager[RowSource]:
        """Return the file that is open: rows are what they were until their result is written."""
        return nullcontext(source)

    def open_sink(self, item: JobItem, planned: PlannedImage, source: ImageRowReader) -> RawSink:
        """Open an item's result, which shares the values of ``source``."""
        assert isinstance(source, RawSource)
        planned.notes += filter(None, [self._mended.get(item.index)])
        return RawSink(
            item.target,
            source,
            self._result(item),
            strip_metadata=self.settings.strip_metadata,
            options=self.settings.encode_options,
            part=item.part,
            replace=item.replace,
        )

    def item_report(self, item: JobItem, planned: PlannedImage, status: Any) -> RawImageReport:
        """Return the report of a planned file: its sensor, its noise and what is written."""
        facts, noise = self._facts(item), self._sensor_noise.get(item.index)
        errors = (None, None) if noise is None else self._errors.get(item.index, (None, None))
        report = dict(super().item_report(item, planned, status))
        report |= dict(
            width=facts.info.width,
            height=facts.info.height,
            colors=facts.colors,
            iso=facts.iso,
            black=facts.black,
            white=facts.white,
            written=self._result(item).output,
            shot_noise=None if noise is None else noise.a * facts.range,
            read_noise=None if noise is None else noise.b * facts.range,
            shot_noise_error=errors[0],
            read_noise_error=errors[1],
        )
        return RawImageReport(**report)

    def _facts(self, item: JobItem) -> RawFacts:
        return self.inspect(item.source, self.settings)

    def _result(self, item: JobItem) -> RawOutputFacts:
        return _result(self._facts(item), item.source, item.target, self.settings)

    def _layout(self, item: JobItem) -> MosaicLayout:
        """Return the planes that the network gets; raises `UsageError` for a filter not its own."""
        facts, cfa = self._facts(item), self._config.cfa
        if not cfa:
            return MosaicLayout(facts.period)
        for top, left in ((top, left) for top in (0, 1) for left in (0, 1)):
            places = [(y - top) % 2 * 2 + (x - left) % 2 for y in (0, 1) for x in (0, 1)]
            if facts.period == 2 and "".join(facts.colors[one] for one in places) == cfa:
                return MosaicLayout(1, top, left)
        raise UsageError(
            f"{item.source} has the colors {facts.colors} in a period of {facts.period}, and"
            f" {self.settings.model_name} is for {cfa} mosaics",
            hint=f"another --model, such as {DENOISER}",
        )


def _result(
    facts: RawFacts, source: Path, target: Path, settings: DenoiseSettings
) -> RawOutputFacts:
    options, format = settings.encode_options, settings.format
    return raw_result(facts, source, target, settings.raw_output, options, format)


def _sizes(facts: RawFacts, layout: MosaicLayout, result: RawOutputFacts) -> TargetSize:
    planes = layout.info(facts.values_shape)
    shown = replace(facts, info=planes)
    return TargetSize(shown, planes, result.info, result.format, result.writing)


def _crop_notes(facts: RawFacts, result: RawOutputFacts) -> list[str]:
    """Return a note on the crop that a file has, taken or not."""
    frame, (height, width) = facts.frame, facts.frame.whole
    if frame.crop is None:
        return []
    if result.output != "mosaic" and frame.is_cropped:
        out = f"{result.info.width}×{result.info.height} of {width}×{height}"
        return [f"the camera's crop is taken: {out} pixels; --raw-output mosaic writes all"]
    why = "a mosaic is written whole" if frame.is_cropped else "it leaves half a side or less"
    return [f"the camera's crop, {frame.crop[0]}×{frame.crop[1]} pixels, is not taken: {why}"]


def _black(facts: RawFacts, layout: MosaicLayout) -> np.ndarray:
    """Return the black level of each plane; of a mosaic that stays one, the mean."""
    levels = np.array(facts.black_levels, np.float32)
    return levels if layout.period == facts.period else levels.mean(keepdims=True)
