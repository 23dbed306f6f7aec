"""Denoising of NIfTI volumes as a job of the pipeline: a series at once, others slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lowtide.core.errors import ImageError, UsageError, install_extra
from lowtide.core.progress import raise_if_cancelled
from lowtide.core.signal import RowSink
from lowtide.jobs.denoise.job import DenoiseJob
from lowtide.jobs.denoise.parts import BlendSettings
from lowtide.jobs.denoise.volumes.report import DenoisedVolumeReport, VolumeDenoiseReport
from lowtide.jobs.denoise.volumes.scale import VolumeScale, finite_difference
from lowtide.jobs.denoise.volumes.scores import SeriesScorer, VolumeMask
from lowtide.jobs.denoise.volumes.series import (
    DenoisedSeriesSlices,
    SeriesPatches,
    has_dipy,
    load_dipy,
)
from lowtide.jobs.denoise.volumes.slices import NetworkDenoisedSlices, SliceAdapter, SliceArray
from lowtide.jobs.denoise.volumes.survey import VolumeSurvey, survey_volume
from lowtide.jobs.engine.item import JobItem
from lowtide.jobs.images.chosen_noise import ImageNoise, require_trained_noise
from lowtide.jobs.images.job import ItemRun
from lowtide.jobs.images.planning import PlannedImage
from lowtide.jobs.images.target_size import TargetSize
from lowtide.media import ImageFacts
from lowtide.media.discover import FilePair, MediaKind
from lowtide.media.image_info import ImageInfo, ImageRowReader, ImageRowWriter
from lowtide.media.image_sink import EncodingMemory
from lowtide.media.volume_file import GradientFiles, VolumeSink, VolumeSource, find_gradients
from lowtide.media.volume_header import VOLUME_SUFFIXES, inspect_volume
from lowtide.memory.plan import Plan
from lowtide.models.denoiser.noise_models import GaussianNoise, RicianNoise, network_terms
from lowtide.streaming.tiles.runner import TileRunOutcome

VOLUMES = MediaKind(
    "NIfTI file",
    VOLUME_SUFFIXES,
    lambda suffix: suffix.lower() if suffix.lower() in VOLUME_SUFFIXES else None,
)
# Bytes of a slice's copies, in data units and the network's, and of the histograms of a survey.
_VOXEL_BYTES, _SURVEY_BYTES = 80, 24 << 20
# Of the budget, for a block of a series; the network is not run then, and planned all the same.
_BLOCK_SHARE = 2
_AXES = "first", "second", "third"


@dataclass
class _Series:
    """One file: its survey and tables, the slice that is run, and what its run has found."""

    survey: VolumeSurvey
    gradients: GradientFiles
    mask: VolumeMask | None
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


class DenoiseVolumeJob(DenoiseJob):
    """Removes the noise of NIfTI files: of a series by what its volumes share, else by a network.

    A plan is for one slice, which is an image for the network, and a block of a series. No more is
    in memory.
    """

    report_type = VolumeDenoiseReport
    media_kind: ClassVar[MediaKind] = VOLUMES
    packages = ("nibabel", *(["dipy"] if has_dipy() else []))
    own_options = ("mask", "slices")
    max_level = math.inf

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._series: dict[int, _Series] = {}  # by index

    @classmethod
    def suited(
        cls, settings: Any, pairs: Sequence[FilePair], before: Iterable[str] = ()
    ) -> tuple[Any, str]:
        """Return the settings with ``slices`` set where they ask for a network, or dipy lacks."""
        asked = settings.model is not None or settings.steps > 1 or settings.self_ensemble
        slices = settings.slices or asked or not has_dipy()
        return replace(settings, slices=slices), ""

    @classmethod
    def inspect(cls, source: Path, settings: Any) -> ImageFacts:
        """Return the facts of a slice of an input; raises `InputError` where it cannot be read."""
        facts = inspect_volume(source)
        info = facts.plane_info
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
            scratch_bytes=0 if facts.thick_axis == 2 else math.prod(facts.shape[:3]) * 4,
            reason="a NIfTI file is read slice by slice",
            notes=facts.notes,
        )

    @classmethod
    def target_size(
        cls, source: Path, target: Path, settings: Any, scale: int, facts: ImageFacts | None = None
    ) -> TargetSize:
        """Return sizes and format of a result, which are those of the input."""
        facts = facts or cls.inspect(source, settings)
        writing = EncodingMemory(0, 0, "a NIfTI file is written slice by slice")
        return TargetSize(facts, facts.info, facts.info, facts.format, writing)

    def sizes(self, item: JobItem) -> TargetSize:
        """Return sizes and format of an item's result, with the memory of a series' block."""
        sizes = super().sizes(item)
        patches = self._patches(inspect_volume(item.source).shape)
        if patches is None:
            return sizes
        rows = self._block_rows(item, patches)
        block, facts = patches.bytes_of(rows), sizes.facts
        facts = replace(
            facts,
            resident_bytes=facts.resident_bytes + block,
            typical_bytes=facts.typical_bytes + block,
            scratch_bytes=math.prod(patches.shape) * 4,
            reason=f"a series is denoised in blocks that make {rows} rows of all its slices",
        )
        return replace(sizes, facts=facts)

    def _patches(self, shape: tuple[int, int, int, int]) -> SeriesPatches | None:
        """Return the patches of a file that is denoised as a series, None for others."""
        return None if self.settings.slices else SeriesPatches.of(shape)

    def _comparable(self, plan: Plan) -> bool:
        return self.settings.slices and super()._comparable(plan)

    def _block_rows(self, item: JobItem, patches: SeriesPatches) -> int:
        limit = min(self.budget.host_bytes, item.limit_bytes or self.budget.host_bytes)
        return patches.rows_within(limit // _BLOCK_SHARE)

    def adapter(self, item: JobItem, info: ImageInfo) -> SliceAdapter:
        """Return the conversion between slices in the network's units and the network."""
        return SliceAdapter(info, self.prepared.geometry.in_channels)

    def open_source(self, item: JobItem, scratch: Path | None) -> ImageRowReader:
        """Return the slice that is run, or at the end that of which the error is measured."""
        return SliceArray(self._series[item.index].unit)

    def open_sink(
        self, item: JobItem, planned: PlannedImage, source: ImageRowReader
    ) -> ImageRowWriter:
        """Open an item's result for writing slices."""
        series = self._series[item.index]
        facts, gradients = series.survey.facts, series.gradients
        return VolumeSink(item.target, facts, gradients, item.part, replace=item.replace)

    def item_report(
        self, item: JobItem, planned: PlannedImage, status: Any
    ) -> DenoisedVolumeReport:
        """Return the report of a planned or finished file."""
        series = self._series[item.index]
        survey = series.survey
        base = dict(super().item_report(item, planned, status))
        return DenoisedVolumeReport(
            **base | {"sigma": survey.median_level, "noise": survey.noise},
            shape=survey.facts.shape,
            method=self._method(survey),
            levels=[None if one is None else round(one, 6) for one in survey.levels],
            not_finite=sum(one.not_finite for one in survey.ranges),
            gradients=[str(one) for _, one in series.gradients.copies(item.target)],
            clipped=series.clipped,
            **series.found,
        )

    def _method(self, survey: VolumeSurvey) -> str:
        """Return how a file's noise is removed, in words."""
        facts, axis = survey.facts, survey.facts.thick_axis
        if not survey.noisy:
            return ""
        if patches := self._patches(facts.shape):
            return patches.description
        across = "" if axis == 2 else f", across the {_AXES[axis]} axis, the thickest"
        lacks = not has_dipy() and self.settings.model is None and SeriesPatches.of(facts.shape)
        hint = f"; MP-PCA of the series needs dipy: {install_extra('mri')}" if lacks else ""
        return f"each slice by itself through the network{across}{hint}"

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

    def find_noise(self, item: JobItem, planned: PlannedImage) -> ImageNoise:
        """Survey an item, and return the noise of its median volume in the network's units."""
        facts = inspect_volume(item.source)
        gradients = find_gradients(item.source, facts.shape[3])
        gradients.require_free(item.target)
        path = self.settings.mask
        mask = None if path is None else VolumeMask(Path(path), facts)
        survey = survey_volume(
            facts, self.settings.sigma, self.settings.chosen_noise, self._config.max_sigma
        )
        unit = np.zeros(facts.plane_info.shape, np.float32)
        self._series[item.index] = _Series(survey, gradients, mask, unit)
        known = [scale.sigma for scale in survey.scales if scale is not None]
        return self._network_noise(float(np.median(known)) if known else None, survey)

    def _network_noise(self, sigma: float | None, survey: VolumeSurvey) -> ImageNoise:
        if sigma is None:
            return ImageNoise(None, (0.0,) * self._config.noise_parameters, survey.source)
        return ImageNoise(*network_terms(GaussianNoise(std=sigma), self._config), survey.source)

    def level_notes(self, item: JobItem) -> list[str]:
        """Return notes of the survey, of gradient tables, and of a mask."""
        series = self._series[item.index]
        notes = [*series.survey.notes, *series.gradients.notes]
        if series.mask is not None and series.mask.outside:
            notes.append(
                f"{series.mask.outside:,} voxels of a volume are outside of the mask, and copied"
            )
        return notes

    def _execute(self, run: ItemRun, source: ImageRowReader, sink: RowSink) -> TileRunOutcome:
        """Denoise a series, or slice after slice, and write the slices."""
        item, planned, pipeline = run.item, run.planned, run.pipeline
        series, outcome = self._series[item.index], TileRunOutcome()
        survey, facts, mask = series.survey, series.survey.facts, series.mask
        blend = BlendSettings(self.settings.strength)
        scores, everywhere = SeriesScorer(mask), np.ones((1, 1))
        on_steps = pipeline.report_rows(item, self.budget, self._steps(item, survey))
        on_steps = on_steps or (lambda steps: None)
        with (
            VolumeSource(facts) as volumes,
            self._unchanged(item),
            nullcontext() if mask is None else closing(mask),
            closing(self._denoised(run, outcome, on_steps)) as denoised,
        ):
            for place in range(facts.slices):
                raise_if_cancelled(pipeline.cancel)
                volume, number = divmod(place, facts.shape[2])
                values = survey.ranges[volume]
                stored = volumes.read(place, place + 1)
                before = values.known(facts.to_units(stored)[0])
                labels = everywhere if mask is None else mask.labels(number)
                after = blend.rows(before, denoised.slice(place, before))
                after = np.where(labels[..., None] > 0, after, before)
                stored, clipped = facts.to_stored(stored, finite_difference(before, after)[None])
                series.clipped += clipped
                scores.add(labels, before[..., 0], after[..., 0], values.threshold)
                sink.write(place, stored)
                if number == facts.shape[2] - 1:
                    scores.end_volume()
                on_steps(1)
        series.found = {"residual": scores.structure.result(), "mask_scores": scores.of_mask()}
        # Slices repeat what they note.
        planned.notes[:] = dict.fromkeys([*planned.notes, *series.clipping_notes()])
        return outcome

    def _steps(self, item: JobItem, survey: VolumeSurvey) -> int:
        """Return the slices that are written, and what is computed before."""
        facts = survey.facts
        if patches := self._patches(facts.shape):
            lines = patches.lines(self._block_rows(item, patches)) if survey.noisy else 0
            return facts.slices + lines
        turned = facts.thick_axis != 2
        return facts.slices + turned * survey.noisy * facts.shape[facts.thick_axis]

    def _denoised(
        self, run: ItemRun, outcome: TileRunOutcome, on_steps: Callable[[int], None]
    ) -> DenoisedSeriesSlices | NetworkDenoisedSlices:
        """Return what makes each slice of a file: of a series, all of them are computed first."""
        series, pipeline = self._series[run.item.index], run.pipeline
        patches = self._patches(series.survey.facts.shape)
        own: dict[str, Any] = dict(scratch=pipeline.scratch, cancel=pipeline.cancel)
        if patches is not None and series.survey.noisy:
            found = series.survey, patches, self._block_rows(run.item, patches), series.mask
            with pipeline.meter.excluding():
                load_dipy()
            return DenoisedSeriesSlices(*found, **own, on_steps=on_steps)
        quiet = copy(pipeline)
        quiet.progress = None  # slices are reported here, not the rows of each
        network = partial(self._run_slice, replace(run, pipeline=quiet), outcome)
        return NetworkDenoisedSlices(series.survey, network, **own, on_steps=on_steps)

    def _run_slice(
        self,
        run: ItemRun,
        outcome: TileRunOutcome,
        place: int,
        scale: VolumeScale,
        unit: np.ndarray,
    ) -> np.ndarray:
        """Return what the network makes of a slice, in its own units; ``place`` numbers it."""
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
    def _unchanged(self, item: JobItem) -> Iterator[None]:
        """Restore what is set for each slice: the settings, and the noise of the report."""
        settings, noise = self.settings, self._noise[item.index]
        self._series[item.index].seed = settings.seed
        try:
            yield
        finally:
            self.settings, self._noise[item.index] = settings, noise
