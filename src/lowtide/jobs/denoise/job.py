"""Denoising as a job of the pipeline: the noise level of each image, then the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from lowtide.core.errors import UsageError
from lowtide.core.signal import RowSink, RowSource
from lowtide.jobs.denoise.parts import (
    BlendSettings,
    BlendSink,
    PreviewPart,
    inspect_mask,
    open_mask,
)
from lowtide.jobs.denoise.report import DenoisedImageReport, DenoiseReport
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.denoise.states import (
    STATE_FILES,
    SamplingStateAdapter,
    SamplingStepSink,
    ScratchImage,
)
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.jobs.images.chosen_noise import (
    ImageNoise,
    require_trained_noise,
)
from lowtide.jobs.images.job import ImageJob, ItemRun
from lowtide.jobs.images.model_choice import DENOISER, suited_denoiser
from lowtide.jobs.images.noise_finder import NoiseFinder, denoisers_of, read_bands, set_noise_level
from lowtide.jobs.images.planning import PlannedImage
from lowtide.jobs.images.prepared import PreparedModel
from lowtide.media import ImageFacts, ImageSource
from lowtide.media.discover import IMAGES, FilePair
from lowtide.media.image_info import ImageInfo, ImageRowReader
from lowtide.media.image_source import CroppedSource
from lowtide.memory.budget import Budget
from lowtide.models.denoiser.config import DenoiserConfig, SchedulerName
from lowtide.models.denoiser.noise_models import (
    GaussianNoise,
)
from lowtide.models.denoiser.sampling import earlier_predictions, sampling_steps
from lowtide.streaming.tiles.runner import TileRunOutcome

# Options that are for one kind of files.
_KIND_OPTIONS = {
    "black_level": "camera RAW files",
    "hot_pixels": "camera RAW files",
    "raw_output": "camera RAW files",
    "slices": "volumes",
    "mask": "pictures and volumes",
    "chroma_only": "pictures",
    "preview": "pictures",
}


class DenoiseJob(ImageJob):
    """Removes the noise of images with one denoiser, each at its own level."""

    settings_type, report_type = DenoiseSettings, DenoiseReport
    # Of the options for one kind of files, those for this one; and the largest --sigma.
    own_options: ClassVar[tuple[str, ...]] = ("mask", "chroma_only", "preview")
    max_level: ClassVar[float] = 255

    def __init__(
        self, prepared: PreparedModel, settings: DenoiseSettings, budget: Budget, **more: Any
    ) -> None:
        super().__init__(prepared, settings, budget, **more)
        self._earlier = earlier_predictions(self._scheduler, settings.steps)
        copies = STATE_FILES + self._earlier if settings.steps > 1 else 0
        self.prepared = replace(prepared, float_copies=copies)
        self._check_noise()
        self._noise: dict[int, ImageNoise] = {}  # by index

    def _check_noise(self) -> None:
        """Raise `UsageError` for noise that the network was not trained for."""
        chosen = self.settings.chosen_noise
        require_trained_noise(chosen, self._config, self.settings.model_name)
        if chosen is not None and chosen.table is not None:
            chosen.at()

    @classmethod
    def suited(
        cls, settings: Any, pairs: Sequence[FilePair], before: Iterable[str] = ()
    ) -> tuple[Any, str]:
        """Return the settings with a bundled denoiser for these files, and why, if none is named.

        There is one choice alone for other files than pictures, for several steps, and for noise
        that depends on the values.
        """
        chosen = settings.chosen_noise
        special = settings.steps > 1 or (chosen is not None and chosen.name != GaussianNoise.name)
        if settings.model is not None or cls.media_kind is not IMAGES or special:
            return settings, ""
        name, reason = suited_denoiser([pair.source for pair in pairs], before)
        return replace(settings, model=name), reason

    @classmethod
    def check_settings(cls, settings: DenoiseSettings) -> None:
        """Raise `UsageError` for settings that are not for files of this kind."""
        for name, kind in _KIND_OPTIONS.items():
            is_default = getattr(settings, name) == getattr(DenoiseSettings, name)
            if name not in cls.own_options and not is_default:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for {kind}, and the inputs are"
                    f" {cls.media_kind.noun}s",
                    hint="drop it",
                )
        if settings.sigma is not None and settings.sigma > cls.max_level:
            raise UsageError(
                f"--sigma {settings.sigma:g} is more than the {cls.max_level:g} levels of"
                f" a {cls.media_kind.noun}",
                hint="--sigma 25",
            )

    @classmethod
    def inspect(cls, source: Path, settings: DenoiseSettings) -> ImageFacts:
        """Return the facts of an input, or of the part that is denoised.

        Raises:
            UsageError: That lies outside, or the mask has another size.
        """
        facts = super().inspect(source, settings)
        others = [facts] if settings.is_blended else []  # the input is read a second time then
        if settings.mask is not None:
            mask = Path(settings.mask), source, facts.info
            others.append(inspect_mask(*mask, settings.max_pixels))
        if settings.preview is not None:
            facts = PreviewPart(*settings.preview).facts_of(source, facts)
        return replace(
            facts,
            resident_bytes=facts.resident_bytes + sum(one.resident_bytes for one in others),
            typical_bytes=facts.typical_bytes + sum(one.typical_bytes for one in others),
            scratch_bytes=facts.scratch_bytes + sum(one.scratch_bytes for one in others),
        )

    def open_source(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        """Open an item, or the part that is denoised; may be called more than once."""
        opened, preview = self._open_whole(item, scratch), self.settings.preview
        if preview is None:
            return opened
        assert isinstance(opened, ImageSource)
        return CroppedSource(opened, *preview)

    def _open_whole(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        return super().open_source(item, scratch)

    def plan(self, item: JobItem) -> PlannedImage:
        """Plan one image from its header, and estimate its noise from its pixels."""
        planned = super().plan(item)
        self.check_colors(item, planned)
        if item.index not in self._noise:
            self._noise[item.index] = self.find_noise(item, planned)
        planned.notes += self.level_notes(item)
        return planned

    def item_report(self, item: JobItem, planned: PlannedImage, status: Any) -> DenoisedImageReport:
        """Return the report of a planned image, with its noise level."""
        settings = self.settings
        return DenoisedImageReport(
            **dict(super().item_report(item, planned, status)),
            **self._finder.report_fields(self._noise[item.index]),
            strength=settings.strength,
            chroma_only=settings.chroma_only,
            mask=None if settings.mask is None else str(settings.mask),
            preview=settings.preview,
        )

    def _execute(self, run: ItemRun, source: ImageRowReader, sink: RowSink) -> TileRunOutcome:
        settings, item, scratch = self.settings, run.item, run.pipeline.scratch
        if self._noise[item.index].is_none or not settings.is_blended:
            return self._denoise(run, source, sink)
        info = source.info
        white = None if info.sample_type == "float32" else info.full_scale
        blend, crop = (
            BlendSettings(settings.strength, settings.chroma_only, white),
            settings.preview,
        )
        with ExitStack() as opened:
            before = opened.enter_context(self.open_again(item, source, scratch))
            mask = None
            if settings.mask is not None:
                parts = Path(settings.mask), crop, settings.max_pixels, scratch
                mask = opened.enter_context(open_mask(*parts))
            return self._denoise(run, source, BlendSink(sink, blend, before, mask))

    def open_again(
        self, item: JobItem, source: ImageRowReader, scratch: Path | None
    ) -> AbstractContextManager[RowSource]:
        """Open an item whose ``source`` is being read for reading it a second time."""
        return self.open_source(item, scratch)

    def _denoise(self, run: ItemRun, source: ImageRowReader, sink: RowSink) -> TileRunOutcome:
        noise, pipeline = self._noise[run.item.index], run.pipeline
        if noise.is_none:
            self._set_level(0, noise.parameters)
            on_rows = pipeline.report_rows(run.item, self.budget, run.planned.upscaled.height)
            for first, rows in read_bands(source, pipeline.cancel):
                sink.write(first, rows)
                if on_rows is not None:
                    on_rows(len(rows))
            return TileRunOutcome()
        assert noise.sigma is not None
        self._set_level(noise.sigma, noise.parameters)
        if self.settings.steps > 1:
            return self._sample(run, source, sink, noise.sigma)
        return super()._execute(run, source, sink)

    def _sample(
        self, run: ItemRun, source: ImageRowReader, sink: RowSink, sigma: float
    ) -> TileRunOutcome:
        """Run the network at each step's level, from one state to the next."""
        settings, info, item, pipeline = self.settings, source.info, run.item, run.pipeline
        parameters = self._noise[item.index].parameters
        steps = sampling_steps(self._scheduler, sigma, settings.steps, eta=settings.eta)
        ends, outcome = self.adapter(item, info), TileRunOutcome()
        between = SamplingStateAdapter(ends)
        on_rows = pipeline.report_rows(item, self.budget, info.height * len(steps))
        shape = (info.height, info.width, info.color_channels)
        with ExitStack() as stack:
            state, after, *earlier = (
                stack.enter_context(closing(ScratchImage(shape, pipeline.scratch)))
                for _ in range(STATE_FILES + self._earlier)
            )
            for first, rows in read_bands(source, pipeline.cancel):
                state.write(first, ends.color(rows))
            for step in steps:
                self._set_level(step.sigma, parameters)
                made = SamplingStepSink(step, state, after, earlier, settings.seed)
                done = self._run_network(run, state, made, between, on_rows)
                outcome.events += done.events
                outcome.fp32_reruns += done.fp32_reruns
                state, after = after, state
            with self.open_source(item, pipeline.scratch) as again:
                for first, rows in read_bands(again, pipeline.cancel):
                    color = state.read(first, first + len(rows))
                    sink.write(first, ends.to_samples(color, rows))
        self._set_level(sigma, parameters)
        if self.prepared.network.make_fp32_forward is not None:
            run.planned.notes.append("the error of the precision is that of the first step")
        return outcome

    @cached_property
    def _scheduler(self) -> SchedulerName:
        settings = self.settings
        return settings.scheduler or ("ddim" if settings.eta else self._config.scheduler)

    @property
    def _finder(self) -> NoiseFinder:
        settings = self.settings
        return NoiseFinder(self._config, settings.sigma, settings.chosen_noise)

    @property
    def _config(self) -> DenoiserConfig:
        return next(denoisers_of(self.prepared)).config

    def _set_level(self, sigma: float, parameters: tuple[float, ...]) -> None:
        set_noise_level(self.prepared, sigma, parameters)

    def adapter(self, item: JobItem, info: ImageInfo) -> NoisyImageAdapter:
        """Return the conversion between an item's rows, of ``info``, and the network."""
        return NoisyImageAdapter(info, self.prepared.geometry.in_channels)

    def check_colors(self, item: JobItem, planned: PlannedImage) -> None:
        """Raise `UsageError` for an image whose colors the network is not for; note gray."""
        config, color = self._config, planned.facts.info.color_channels
        if config.cfa and color > 1:
            raise UsageError(
                f"{item.source} has {color} colors, and {self.settings.model_name} is for"
                f" {config.cfa} mosaics, which have one channel",
                hint=f"another --model, such as {DENOISER}",
            )
        if self.settings.chroma_only and color == 1:
            planned.notes.append("the image is gray, so that with its brightness all of it is kept")

    def find_noise(self, item: JobItem, planned: PlannedImage) -> ImageNoise:
        """Return an image's noise: as given, of the table, or estimated from its pixels."""
        opened = partial(self._open_whole, item, self.settings.scratch)
        return self._finder.find(item.source, planned.facts, opened)

    def level_notes(self, item: JobItem) -> list[str]:
        """Return what a user has to know of an item's noise."""
        noise = self._noise[item.index]
        if noise.sigma is None:
            return ["no pixel tells the noise level, so samples are copied; --sigma sets it"]
        if not noise.is_none:
            return self._finder.notes(noise)
        found = "no noise was found, so samples are copied"
        given = "without noise samples are copied"
        return [found if noise.source == "estimated" else given, *noise.doubts]
