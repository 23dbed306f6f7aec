"""Denoising as a job of the pipeline: the noise level of each image, then the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from typing import Any

from lowtide.core.progress import Cancel, check_cancel
from lowtide.jobs.denoise_settings import DenoiseSettings
from lowtide.jobs.denoise_states import STATE_COPIES, StateAdapter, StateFile, StepSink
from lowtide.jobs.image_adapter import NoisyImageAdapter
from lowtide.jobs.image_job import ImageJob
from lowtide.jobs.item import Item
from lowtide.jobs.pipeline import Pipeline
from lowtide.jobs.planning import ImageTaskPlan
from lowtide.jobs.prepared import PreparedModel
from lowtide.jobs.report import DenoisedImageReport, DenoiseReport
from lowtide.media import AsyncWriter
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_rows import ImageFile, ImageRows
from lowtide.memory.budget import Budget
from lowtide.models.denoiser.denoiser import Denoiser, denoisers_in
from lowtide.models.denoiser.noise_level import NoiseLevel
from lowtide.models.denoiser.noise_schedule import NoiseSchedule
from lowtide.models.denoiser.sampling import sampling_steps
from lowtide.streaming.tiles.runner import RunOutcome

# Half a step of 8 bits: no noise that could be seen, and less than texture is taken for.
_LEAST_SIGMA = 0.5
_BAND_PIXELS = 1 << 15


class DenoiseJob(ImageJob):
    """Removes the noise of images with one denoiser, each at its own level."""

    settings_type, report_type = DenoiseSettings, DenoiseReport

    def __init__(
        self, prepared: PreparedModel, settings: DenoiseSettings, budget: Budget, **more: Any
    ) -> None:
        copies = STATE_COPIES if settings.steps > 1 else 0
        super().__init__(replace(prepared, float_copies=copies), settings, budget, **more)
        # By index, in levels of 255; None where the image does not tell.
        self._levels: dict[int, float | None] = {}

    def plan(self, item: Item) -> ImageTaskPlan:
        """Plan one image from its header, and estimate its noise from its pixels."""
        planned = super().plan(item)
        if item.index not in self._levels:
            self._levels[item.index] = self._find_level(item)
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
        source: ImageRows,
        sink: ImageFile | AsyncWriter,
        pipeline: Pipeline,
        queue_bytes: int,
    ) -> RunOutcome:
        sigma = self._levels[item.index]
        if sigma is None or sigma < _LEAST_SIGMA:
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
        source: ImageRows,
        sink: ImageFile | AsyncWriter,
        pipeline: Pipeline,
        queue_bytes: int,
        sigma: float,
    ) -> RunOutcome:
        """Run the network at each step's level, from one state to the next."""
        settings, info = self.settings, source.info
        steps = sampling_steps(self._schedule, sigma, settings.steps, settings.noise_share)
        ends, outcome = self.adapter(item, info), RunOutcome()
        between = StateAdapter(ends)
        on_rows = pipeline.report_rows(item, self.budget, info.height * len(steps))
        shape = (info.height, info.width, info.color_channels)
        with ExitStack() as stack:
            state, after = (
                stack.enter_context(closing(StateFile(shape, pipeline.scratch)))
                for _ in range(STATE_COPIES)
            )
            for first, rows in _bands(source, pipeline.cancel):
                state.write(first, ends.color(rows))
            for step in steps:
                self._set_level(step.sigma)
                done = self._run_network(
                    item,
                    planned,
                    state,
                    StepSink(step, state, after, settings.seed),
                    between,
                    pipeline,
                    queue_bytes,
                    on_rows,
                )
                outcome.events += done.events
                outcome.fp32_reruns += done.fp32_reruns
                state, after = after, state
            with self.open_source(item, pipeline.scratch) as again:
                for first, rows in _bands(again, pipeline.cancel):
                    color = state.read(first, first + len(rows))
                    sink.write(first, ends.to_samples(color, rows))
        self._set_level(sigma)
        if self.prepared.network.make_fp32_forward is not None:
            planned.notes.append("the error of the precision is that of the first step")
        return outcome

    @cached_property
    def _schedule(self) -> NoiseSchedule:
        return NoiseSchedule("flow" if self.settings.scheduler == "flow" else "linear")

    def _set_level(self, sigma: float) -> None:
        for denoiser in self._denoisers():
            denoiser.set_level(sigma)

    def adapter(self, item: Item, info: ImageInfo) -> NoisyImageAdapter:
        """Return the conversion between an item's rows, of ``info``, and the network."""
        return NoisyImageAdapter(info, self.prepared.geometry.in_channels)

    def _denoisers(self) -> Iterator[Denoiser]:
        """Iterate over the network's denoisers: on all devices, and in fp32 to compare with."""
        for network in (self.prepared.network, *self.prepared.replicas):
            yield from denoisers_in(network.forward)
            if network.make_fp32_forward is not None:
                yield from denoisers_in(network.make_fp32_forward())

    def _find_level(self, item: Item) -> float | None:
        """Return the noise level of an item in levels of 255, or None where it does not tell."""
        if self.settings.sigma is not None:
            return self.settings.sigma
        with self.open_source(item, self.settings.scratch) as source:
            info = source.info
            adapter, level = self.adapter(item, info), NoiseLevel(info.color_channels)
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


def _bands(source: ImageRows, cancel: Cancel = None) -> Iterator[tuple[int, Any]]:
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
