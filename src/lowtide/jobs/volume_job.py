"""Denoising of NIfTI volumes as a job of the pipeline: slice by slice, each volume at its level."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lowtide.core.errors import ImageError, UsageError
from lowtide.core.progress import check_cancel
from lowtide.core.signal import Sink
from lowtide.jobs.chosen_noise import ImageNoise, require_trained_noise
from lowtide.jobs.denoise_job import DenoiseJob
from lowtide.jobs.image_job import ItemRun
from lowtide.jobs.item import Item
from lowtide.jobs.planning import ImageTaskPlan
from lowtide.jobs.result_blend import Blend
from lowtide.jobs.target_size import TargetSize
from lowtide.jobs.volume_report import DenoisedVolumeReport, VolumeDenoiseReport
from lowtide.jobs.volume_scale import VolumeScale, change_of
from lowtide.jobs.volume_scores import MaskStatistics, SeriesScores
from lowtide.jobs.volume_slices import SliceAdapter, SliceArray
from lowtide.jobs.volume_survey import VolumeSurvey, survey_volume
from lowtide.media import ImageFacts
from lowtide.media.discover import MediaKind
from lowtide.media.encode import OutputCost
from lowtide.media.image_info import ImageFile, ImageInfo, ImageRows
from lowtide.media.volume_file import GradientFiles, VolumeSink, VolumeSource, find_gradients
from lowtide.media.volume_header import VOLUME_SUFFIXES, VolumeFacts, inspect_volume
from lowtide.models.denoiser.noise_models import GaussianNoise, RicianNoise, network_terms
from lowtide.streaming.tiles.runner import RunOutcome

VOLUMES = MediaKind(
    "NIfTI file",
    VOLUME_SUFFIXES,
    lambda suffix: suffix.lower() if suffix.lower() in VOLUME_SUFFIXES else None,
)
# Bytes of a slice's copies, in data units and the network's, and of the histograms of a survey.
_VOXEL_BYTES, _SURVEY_BYTES = 80, 24 << 20


@dataclass
class _Series:
    """One file: its survey and tables, the slice that is run, and what its run has found."""

    survey: VolumeSurvey
    gradients: GradientFiles
    unit: np.ndarray
    seed: int = 0
    clipped: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    def clipping_notes(self) -> list[str]:
        """Return a note where results were beyond the sample type."""
        if not self.clipped:
            return []
        facts = self.survey.facts
        low, high = facts.limits
        return [
            f"{self.clipped:,} results were beyond {facts.dtype.name}, which stores {low:g} to"
            f" {high:g}, and are clipped"
        ]


class VolumeJob(DenoiseJob):
    """Removes the noise of NIfTI files with one denoiser, each volume at its own level.

    A plan is for one slice, which is an image for the network. No more than a slice is in memory.
    """

    report_type = VolumeDenoiseReport
    media_kind: ClassVar[MediaKind] = VOLUMES
    packages = ("nibabel",)
    own_options = ("mask",)
    max_level = math.inf

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._series: dict[int, _Series] = {}  # by index

    @classmethod
    def inspect(cls, source: Path, settings: Any) -> ImageFacts:
        """Return the facts of a slice of an input; raises `InputError` where it cannot be read."""
        facts = inspect_volume(source)
        info = facts.slice_info
        if info.pixels > settings.max_pixels:
            raise ImageError(
                f"{source}: slices of {info.width} × {info.height} are {info.pixels:,} voxels, and"
                f" the limit is {settings.max_pixels:,}",
                hint=f"--max-pixels {info.pixels} if this size is intended",
            )
        bytes_taken = _SURVEY_BYTES + info.pixels * _VOXEL_BYTES
        return ImageFacts(
            info=info,
            format="NIfTI",
            orientation=1,
            resident_bytes=bytes_taken,
            typical_bytes=bytes_taken // 2,
            scratch_bytes=0,
            reason="a NIfTI file is read slice by slice",
            notes=facts.notes,
        )

    @classmethod
    def target_size(
        cls, source: Path, target: Path, settings: Any, scale: int, facts: ImageFacts | None = None
    ) -> TargetSize:
        """Return sizes and format of a result, which are those of the input."""
        facts = facts or cls.inspect(source, settings)
        writing = OutputCost(0, 0, "a NIfTI file is written slice by slice")
        return TargetSize(facts, facts.info, facts.info, facts.format, writing)

    def adapter(self, item: Item, info: ImageInfo) -> SliceAdapter:
        """Return the conversion between slices in the network's units and the network."""
        return SliceAdapter(info, self.prepared.geometry.in_channels)

    def open_source(self, item: Item, scratch: Path | None) -> ImageRows:
        """Return the slice that is run, or at the end that of which the error is measured."""
        return SliceArray(self._series[item.index].unit)

    def open_sink(self, item: Item, planned: ImageTaskPlan, source: ImageRows) -> ImageFile:
        """Open an item's result for writing slices."""
        series = self._series[item.index]
        facts, gradients = series.survey.facts, series.gradients
        return VolumeSink(item.target, facts, gradients, item.part, replace=item.replace)

    def item_report(self, item: Item, planned: ImageTaskPlan, status: Any) -> DenoisedVolumeReport:
        """Return the report of a planned or finished file."""
        series = self._series[item.index]
        survey = series.survey
        base = dict(super().item_report(item, planned, status))
        return DenoisedVolumeReport(
            **base | {"sigma": survey.median_level, "noise": survey.noise},
            shape=survey.facts.shape,
            levels=[None if one is None else round(one, 6) for one in survey.levels],
            not_finite=sum(one.not_finite for one in survey.ranges),
            gradients=[str(one) for _, one in series.gradients.copies(item.target)],
            clipped=series.clipped,
            **series.found,
        )

    def _check_noise(self) -> None:
        """Raise `UsageError` for noise or settings that are not of volumes."""
        settings, chosen = self.settings, self.settings.chosen_noise
        if settings.strip_metadata or settings.iso is not None:
            option = "--strip-metadata" if settings.strip_metadata else f"--iso {settings.iso}"
            raise UsageError(f"{option} is for files of cameras, not for volumes", hint="drop it")
        if self._config.cfa:
            raise UsageError(
                f"{settings.model_name} is for {self._config.cfa} mosaics of cameras",
                hint="another --model, such as lowtide-denoise",
            )
        known = RicianNoise.name, GaussianNoise.name
        if chosen is not None and chosen.name not in known:
            raise UsageError(
                f"--noise {settings.noise} is {chosen.name} noise, which is not that of MRI",
                hint="lowtide train noise --volumes FILE -o scanner.json measures it",
            )
        # Rician noise reaches the network as Gaussian noise.
        require_trained_noise(None, self._config, settings.model_name)

    def find_noise(self, item: Item, planned: ImageTaskPlan) -> ImageNoise:
        """Survey an item, and return the noise of its median volume in the network's units."""
        facts = inspect_volume(item.source)
        gradients = find_gradients(item.source, facts.shape[3])
        gradients.require_free(item.target)
        self._open_mask(facts)
        survey = survey_volume(
            facts, self.settings.sigma, self.settings.chosen_noise, self._config.max_sigma
        )
        unit = np.zeros(facts.slice_shape, np.float32)
        self._series[item.index] = _Series(survey, gradients, unit)
        known = [scale.sigma for scale in survey.scales if scale is not None]
        return self._network_noise(float(np.median(known)) if known else None, survey)

    def _network_noise(self, sigma: float | None, survey: VolumeSurvey) -> ImageNoise:
        if sigma is None:
            return ImageNoise(None, (0.0,) * self._config.noise_parameters, survey.source)
        return ImageNoise(*network_terms(GaussianNoise(std=sigma), self._config), survey.source)

    def level_notes(self, item: Item) -> list[str]:
        """Return notes of the survey and of gradient tables."""
        series = self._series[item.index]
        return [*series.survey.notes, *series.gradients.notes]

    def _open_mask(self, facts: VolumeFacts) -> MaskStatistics | None:
        path = self.settings.mask
        return None if path is None else MaskStatistics(Path(path), facts)

    def _execute(self, run: ItemRun, source: ImageRows, sink: Sink) -> RunOutcome:
        """Denoise slice after slice, and write them."""
        item, planned, pipeline = run.item, run.planned, run.pipeline
        series, outcome = self._series[item.index], RunOutcome()
        survey, facts = series.survey, series.survey.facts
        blend = Blend(self.settings.strength)
        scores = SeriesScores(self._open_mask(facts))
        on_slices = pipeline.report_rows(item, self.budget, facts.slices)
        quiet = copy(pipeline)
        quiet.progress = None  # slices are reported here, not the rows of each
        within = replace(run, pipeline=quiet)
        with VolumeSource(facts) as volumes, self._unchanged(item):
            for place in range(facts.slices):
                check_cancel(pipeline.cancel)
                volume, number = divmod(place, facts.shape[2])
                stored = volumes.read(place, place + 1)
                before = after = survey.ranges[volume].known(facts.to_units(stored)[0])
                scale = survey.scales[volume]
                if scale is not None and scale.has_noise:
                    network = partial(self._run_slice, within, place, scale, outcome)
                    after = blend.rows(before, scale.denoise(before, network))
                    stored, clipped = facts.to_stored(stored, change_of(before, after)[None])
                    series.clipped += clipped
                threshold = survey.ranges[volume].threshold
                scores.add(number, before[..., 0], after[..., 0], threshold)
                sink.write(place, stored)
                if number == facts.shape[2] - 1:
                    scores.end_volume()
                if on_slices is not None:
                    on_slices(1)
        series.found = {"residual": scores.structure.result(), "mask_scores": scores.of_mask()}
        # Slices repeat what they note.
        planned.notes[:] = dict.fromkeys([*planned.notes, *series.clipping_notes()])
        return outcome

    def _run_slice(
        self,
        run: ItemRun,
        place: int,
        scale: VolumeScale,
        outcome: RunOutcome,
        unit: np.ndarray,
    ) -> np.ndarray:
        """Return what the network makes of slice ``place`` of a file, in its own units."""
        series, made = self._series[run.item.index], SliceArray(np.empty_like(unit))
        series.unit = unit
        self._noise[run.item.index] = self._network_noise(scale.sigma, series.survey)
        # Another seed, so that no two slices get the same noise between steps.
        self.settings = replace(self.settings, seed=(series.seed + place) % (1 << 63))
        done = self._denoise(run, SliceArray(unit), made)
        outcome.events += done.events
        outcome.fp32_reruns += done.fp32_reruns
        return made.values

    @contextmanager
    def _unchanged(self, item: Item) -> Iterator[None]:
        """Restore what is set for each slice: the settings, and the noise of the report."""
        settings, noise = self.settings, self._noise[item.index]
        self._series[item.index].seed = settings.seed
        try:
            yield
        finally:
            self.settings, self._noise[item.index] = settings, noise
