"""Denoising as a job of the pipeline: the noise level of each image, then the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.denoise_settings import DenoiseSettings
from lowtide.jobs.denoise_states import STATE_FILES, StateAdapter, StateFile, StepSink
from lowtide.jobs.image_adapter import NoisyImageAdapter
from lowtide.jobs.image_job import ImageJob
from lowtide.jobs.item import Item
from lowtide.jobs.pipeline import Pipeline
from lowtide.jobs.planning import ImageTaskPlan
from lowtide.jobs.prepared import PreparedModel
from lowtide.jobs.report import DenoisedImageReport, DenoiseReport
from lowtide.media import AsyncWriter, ImageSink, ImageSource, open_image
from lowtide.media.image_info import ImageInfo
from lowtide.memory.budget import Budget
from lowtide.models.denoiser.denoiser import Denoiser, denoisers_in
from lowtide.models.denoiser.noise_level import LEAST_SIGMA, NoiseLevel
from lowtide.models.denoiser.sampling import earlier_predictions, sampling_steps
from lowtide.streaming.tiles.runner import RunOutcome

_BAND_PIXELS = 1 << 15


class DenoiseJob(ImageJob):
    """Removes the noise of images with one denoiser, each at its own level."""

    settings_type, report_type = DenoiseSettings, DenoiseReport

    def __init__(
        self, prepared: PreparedModel, settings: DenoiseSettings, budget: Budget, **more: Any
    ) -> None:
        self._earlier = earlier_predictions(settings.scheduler, settings.steps)
        copies = STATE_FILES + self._earlier if settings.steps > 1 else 0
        super().__init__(replace(prepared, float_copies=copies), settings, budget, **more)
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
        if sigma is None or sigma < LEAST_SIGMA:
            self._set_level(0)
            on_rows = pipeline.report_rows(item, self.budget, planned.upscaled.height)
            for first, rows in _bands(source, pipeline.cancel):
                sink.write(first, rows)
                if on_rows is not None:
                    on_rows(len(rows))
            return RunOutcome()
        self._set_level(sigma / 255)
        if self.settings.steps > 1:
            return self._sample(item, planned, source, sink, pipeline, queue_bytes, sigma / 255)
        return super()._execute(item, planned, source, sink, pipeline, queue_bytes)

    def _sample(
        self,
        item: Item,
        planned: ImageTaskPlan,
        source: ImageSource,
        sink: ImageSink | AsyncWriter,
        pipeline: Pipeline,
        queue_bytes: int,
        sigma: float,
    ) -> RunOutcome:
        """Run the network at each step's level, from one state to the next."""
        settings, info = self.settings, source.info
        steps = sampling_steps(settings.scheduler, sigma, settings.steps, eta=settings.eta)
        between = StateAdapter(info, self.prepared.geometry.in_channels)
        ends, outcome = self._adapter(info), RunOutcome()
        on_rows = pipeline.report_rows(item, self.budget, info.height * len(steps))
        shape = (info.height, info.width, info.color_channels)
        with ExitStack() as stack:
            state, after, *earlier = (
                stack.enter_context(closing(StateFile(shape, pipeline.scratch)))
                for _ in range(STATE_FILES + self._earlier)
            )
            for first, rows in _bands(source, pipeline.cancel):
                state.write(first, ends.color(rows))
            for step in steps:
                self._set_level(step.sigma)
                done = self._run_network(
                    item,
                    planned,
                    state,
                    StepSink(step, state, after, earlier, settings.seed),
                    between,
                    pipeline,
                    queue_bytes,
                    on_rows,
                )
                outcome.events += done.events
                outcome.fp32_reruns += done.fp32_reruns
                state, after = after, state
            with self._open(item.source, pipeline.scratch) as again:
                for first, rows in _bands(again, pipeline.cancel):
                    color = state.read(first, first + len(rows))
                    sink.write(first, ends.to_samples(color, rows))
        self._set_level(sigma)
        if self.prepared.network.make_fp32_forward is not None:
            planned.notes.append("the error of the precision is that of the first step")
        return outcome

    def _set_level(self, sigma: float) -> None:
        for denoiser in self._denoisers():
            denoiser.set_level(sigma)

    def _adapter(self, info: ImageInfo) -> NoisyImageAdapter:
        adapter = self.prepared.adapter(info)
        assert isinstance(adapter, NoisyImageAdapter)
        return adapter

    def _open(self, path: Path, scratch: Path | None) -> ImageSource:
        return open_image(path, max_pixels=self.settings.max_pixels, scratch_dir=scratch)

    def _denoisers(self) -> Iterator[Denoiser]:
        """Iterate over the network's denoisers: on all devices, and in fp32 to compare with."""
        for network in (self.prepared.network, *self.prepared.replicas):
            yield from denoisers_in(network.forward)
            if network.make_fp32_forward is not None:
                yield from denoisers_in(network.make_fp32_forward())

    def _estimate(self, path: Path) -> float | None:
        with self._open(path, self.settings.scratch) as source:
            adapter, level = self._adapter(source.info), NoiseLevel(source.info.color_channels)
            for _, rows in _bands(source):
                level.add(adapter.visible_color(rows))
        return level.levels_of_255()

    def _level_notes(self, sigma: float | None) -> list[str]:
        if sigma is None:
            return ["no pixel tells the noise level, so samples are copied; --sigma sets it"]
        if sigma < LEAST_SIGMA:
            return [
                "no noise was found, so samples are copied"
                if self.settings.sigma is None
                else "without noise samples are copied"
            ]
        most = 255 * next(self._denoisers()).config.max_sigma
        if sigma > most * 1.001:
            return [f"the model was trained up to a sigma of {most:.3g} of 255"]
        return []


def _bands(source: ImageSource, cancel: Cancel = None) -> Iterator[tuple[int, Any]]:
    """Yield (first row, rows) of an image, from the top down."""
    height, width, _ = source.shape
    step = max(1, _BAND_PIXELS // width)
    for first in range(0, height, step):
        check_cancel(cancel)
        yield first, source.read(first, min(first + step, height))


def preload(setup: dict[str, Any]) -> None:
    """Import the libraries of a worker's job."""
    DenoiseJob.preload(setup)


def load_job(setup: dict[str, Any]) -> DenoiseJob:
    """Make the job of a worker."""
    return DenoiseJob.load(setup)
