"""Calibrate Rician noise from a series of volumes: stage 1 for MRI."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.volume_survey import file_scale, survey_ranges
from lowtide.media.volume_file import VolumeSource
from lowtide.media.volume_header import VolumeFacts, inspect_volume
from lowtide.models.denoiser.neighbor_noise import NeighborNoise, NeighborStatistics
from lowtide.models.denoiser.noise_table import NoiseSetting
from lowtide.models.denoiser.volume_level import VolumeRange

# What 1 is in tables of volumes.
SCALE_NOTE = "1 is the 99.9th percentile of the file's brightest volume"
_VOXELS = 40_000  # of a volume, which are enough for an error of 1 %
_MOST_APART = 1.5
_LEAST_SNR = 3
_LEAST_STD = 1e-4  # of the scale: less is that of rounding


def calibrate_volumes(path: Path) -> tuple[NoiseSetting, list[str]]:
    """Return the noise of a 4-D NIfTI file as a setting of `RicianNoise`, and warnings.

    The standard deviation is that of the median volume, in units of the file's scale
    (`lowtide.jobs.volume_survey.file_scale`).

    Raises:
        InputError: The file cannot be read, has a single volume, or too few voxels, or no noise.
    """
    facts = inspect_volume(path)
    count = facts.shape[3]
    if count < 2:
        raise InputError(
            f"{path}: 1 volume, and its noise is measured against its neighbors in a series",
            hint="use a 4-D file of two or more volumes; lowtide denoise estimates that of one",
        )
    ranges = survey_ranges(facts)
    found = [one for one in _measure(facts, ranges) if one is not None]
    if not found:
        raise InputError(
            f"{path}: too few voxels of foreground in each of its {count} volumes of"
            f" {' × '.join(map(str, facts.shape[:3]))}",
            hint="use a larger part of the image",
        )
    levels = np.array([one.std for one in found])
    std = float(np.median(levels))
    scale = file_scale(ranges)
    if std <= _LEAST_STD * scale:
        raise InputError(f"{path}: no noise: volumes are the same, or multiples of each other")
    # A median of n values is 1.25 times less certain than their mean.
    spread = 1.25 * float(np.std(levels)) / math.sqrt(len(levels))
    error = math.hypot(spread, float(np.median([one.error for one in found])))
    setting = NoiseSetting(
        iso=None, parameters={"std": std / scale}, standard_errors={"std": error / scale}
    )
    return setting, _warnings(levels, std, ranges)


def _measure(facts: VolumeFacts, ranges: list[VolumeRange]) -> list[NeighborNoise | None]:
    """Return the noise of each volume; slices are read in order, so that none is held."""
    width, height, slices, count = facts.shape
    stride = max(1, width * height * slices // _VOXELS)
    found = []
    with ExitStack() as stack:
        # The volume, the one before and the one after, each read on its own.
        opened = [stack.enter_context(VolumeSource(facts)) for _ in range(3)]
        sources: dict[int, VolumeSource] = dict(zip((0, -1, 1), opened, strict=True))
        for volume in range(count):
            near = [shift for shift in (-1, 1) if 0 <= volume + shift < count]
            threshold = np.mean([ranges[volume + shift].threshold for shift in near])
            statistics = NeighborStatistics(float(threshold), stride)
            for place in range(slices):
                target, *others = (
                    _slice(facts, sources[shift], (volume + shift) * slices + place)
                    for shift in (0, *near)
                )
                statistics.add(target, others)
            found.append(statistics.result())
    return found


def _slice(facts: VolumeFacts, source: VolumeSource, place: int) -> np.ndarray:
    return facts.to_units(source.read(place, place + 1))[0, ..., 0]


def _warnings(levels: np.ndarray, std: float, ranges: list[VolumeRange]) -> list[str]:
    warnings = []
    low, high = np.quantile(levels, (0.1, 0.9))
    if high > _MOST_APART * low:
        warnings.append(
            f"volumes differ in their noise, or in more than noise: from {low:.4g} to {high:.4g}"
            f" in data units; the median {std:.4g} is used"
        )
    signal = float(np.median([one.threshold for one in ranges]))
    if signal < _LEAST_SNR * std:
        warnings.append(
            f"the noise of {std:.4g} is strong: foreground begins at {signal:.4g}, where magnitudes"
            " tell it less surely"
        )
    return warnings
