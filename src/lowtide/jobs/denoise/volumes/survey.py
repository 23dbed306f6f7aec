"""Ranges and noise levels of the volumes of a NIfTI file, with what a user has to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.errors import InputError, UsageError
from lowtide.core.progress import Cancel
from lowtide.jobs.denoise.volumes.levels import brightest_maximum, estimate_levels, iterate_volumes
from lowtide.jobs.denoise.volumes.scale import VolumeScale
from lowtide.jobs.images.chosen_noise import ChosenNoise, NoiseSource
from lowtide.media.volume_header import VolumeFacts
from lowtide.models.denoiser.noise_models import GaussianNoise, RicianNoise
from lowtide.models.denoiser.volume_level import VolumeRange, VolumeRangeEstimator

# Most by which a table's level and what a file shows may differ: structure only adds to the latter.
_MOST_BETWEEN = 3.0
# Squares of smaller values are no numbers of 32 bits.
_LEAST_VALUE = 1e-18


@dataclass(frozen=True)
class VolumeSurvey:
    """What a file's voxels tell, volume by volume.

    Attributes:
        levels: Noise levels in data units, None where no voxel tells it.
        scales: Conversions to the network's values, None where there is no level above 0.
        rician: Whether the noise is Rician, rather than Gaussian.
        source: Where the levels are from, and ``noise`` in words.
        notes: What a user has to know of them.
    """

    facts: VolumeFacts
    ranges: tuple[VolumeRange, ...]
    levels: tuple[float | None, ...]
    scales: tuple[VolumeScale | None, ...]
    rician: bool
    source: NoiseSource
    noise: str
    notes: tuple[str, ...]

    @property
    def median_level(self) -> float | None:
        """Noise level of the median volume, None where none is known."""
        known = [level for level in self.levels if level is not None]
        return float(np.median(known)) if known else None

    @property
    def noisy(self) -> int:
        """Number of volumes with noise to remove, as far as is known."""
        return sum(scale is not None and scale.has_noise for scale in self.scales)


def survey_volume(
    facts: VolumeFacts,
    sigma: float | None,
    chosen: ChosenNoise | None,
    max_sigma: float,
    cancel: Cancel = None,
) -> VolumeSurvey:
    """Return the survey of a file.

    Args:
        sigma: Level in data units; None takes that of ``chosen``, or estimates each volume's.
        chosen: Rician or Gaussian noise, or a table of such in units of the file's scale.
        max_sigma: Largest level of the network, of values in 0..1.

    Raises:
        InputError: The file is damaged, or no voxel is finite.
        UsageError: The table's noise is not in the file, nor can ``sigma`` be.
    """
    ranges, notes = survey_ranges(facts, cancel), []
    count, source = len(ranges), "estimated"
    noise = GaussianNoise.name if chosen is None else chosen.name
    rician = noise == RicianNoise.name
    if chosen is not None and chosen.table is not None:
        source, noise = "table", chosen.describe()
        sigma = chosen.at().level * brightest_maximum(ranges)
        notes += _compare_noise(facts, ranges, chosen, sigma, cancel)
    elif sigma is not None:
        source = "given"
        widest = max(one.span for one in ranges)
        if 0 < widest < sigma:
            raise UsageError(
                f"--sigma {sigma:g} is more than all values of {facts.path} span: {widest:.4g}",
                hint="give it in data units, or drop it: it is estimated",
            )
    levels: tuple[float | None, ...] = (sigma,) * count
    if sigma is None:
        estimate = estimate_levels(facts, ranges, cancel)
        levels, notes = estimate.levels, [*notes, *estimate.notes]
    scales = [
        VolumeScale.of(one, level, max_sigma, rician=rician) if level and one.span > 0 else None
        for one, level in zip(ranges, levels, strict=True)
    ]
    notes += _notes(ranges, levels, scales)
    facts_of_volumes = tuple(ranges), levels, tuple(scales)
    return VolumeSurvey(facts, *facts_of_volumes, rician, source, noise, tuple(notes))


def _compare_noise(
    facts: VolumeFacts,
    ranges: Sequence[VolumeRange],
    chosen: ChosenNoise,
    sigma: float,
    cancel: Cancel,
) -> list[str]:
    """Return notes on a table with far less noise than a file; raises `UsageError` for far more."""
    known = [one for one in estimate_levels(facts, ranges, cancel).levels if one is not None]
    least, most = min(known, default=sigma), max(known, default=sigma)
    if sigma > _MOST_BETWEEN * most:
        raise UsageError(
            f"{chosen.path}: its noise is {sigma:.4g} in the data units of {facts.path}, and that"
            f" has at most {most:.4g}",
            hint=f"lowtide train noise --volumes {facts.path} -o scanner.json, or --sigma"
            f" {most:.4g}",
        )
    if sigma * _MOST_BETWEEN >= least:
        return []
    return [
        f"{chosen.path}: its noise is {sigma:.4g} in data units, and the volumes look like"
        f" {least:.4g} or more: if that is noise, most of it stays"
    ]


def _notes(
    ranges: Sequence[VolumeRange],
    levels: Sequence[float | None],
    scales: Sequence[VolumeScale | None],
) -> list[str]:
    notes = []
    if missing := sum(one.not_finite for one in ranges):
        notes.append(f"{missing:,} voxels are NaN, infinite or far beyond all others, and kept")
    unknown = sum(level is None for level in levels)
    if unknown:
        notes.append(
            f"no voxel tells the noise level of {unknown} of {len(levels)} volumes, which are"
            " copied; --sigma sets it"
        )
    silent = sum(scale is None or not scale.has_noise for scale in scales) - unknown
    if silent:
        notes.append(f"{silent} of {len(levels)} volumes are without noise, and copied")
    return notes


def survey_ranges(facts: VolumeFacts, cancel: Cancel = None) -> list[VolumeRange]:
    """Return the range of each volume.

    Raises:
        InputError: The file is damaged, no voxel is finite, or all are too small to compute with.
    """
    found = []
    for slices in iterate_volumes(facts, cancel=cancel):
        statistics = VolumeRangeEstimator()
        for image in slices:
            statistics.add(image)
        found.append(statistics.result())
    if sum(one.not_finite for one in found) == facts.slices * facts.shape[0] * facts.shape[1]:
        raise InputError(f"{facts.path}: no voxel is finite: all are NaN or infinite")
    largest = max(max(one.high, -one.low) for one in found)
    if 0 < largest < _LEAST_VALUE:
        raise InputError(
            f"{facts.path}: values up to {largest:.3g} are too small to compute with",
            hint="store it in another unit, or with a larger scl_slope",
        )
    return found
