"""Calibrate Rician noise from a series of volumes: stage 1 for MRI."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from lowtide.core.errors import InputError
from lowtide.jobs.denoise.volumes.levels import LEAST_SHARE, brightest_maximum, neighbor_noise
from lowtide.jobs.denoise.volumes.survey import survey_ranges
from lowtide.media.volume_header import inspect_volume
from lowtide.models.denoiser.noise_table import NoiseSetting
from lowtide.models.denoiser.volume_level import VolumeRange

# What 1 is in tables of volumes.
SCALE_NOTE = "1 is the 99.9th percentile of the file's brightest volume"
_VOXELS = 40_000  # of a volume, which are enough for an error of 1 %
_MOST_APART = 1.5
_LEAST_SNR = 3


def calibrate_volumes(path: Path) -> tuple[NoiseSetting, list[str]]:
    """Return the noise of a 4-D NIfTI file as a setting of `RicianNoise`, and warnings.

    The standard deviation is that of the median volume, in units of the file's scale
    (`lowtide.jobs.denoise.volumes.levels.brightest_maximum`).

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
    found = [one for one in neighbor_noise(facts, ranges, _VOXELS) if one is not None]
    if not found:
        raise InputError(
            f"{path}: too few voxels of foreground in each of its {count} volumes of"
            f" {' × '.join(map(str, facts.shape[:3]))}",
            hint="use a larger part of the image",
        )
    levels = np.array([one.std for one in found])
    std = float(np.median(levels))
    scale = brightest_maximum(ranges)
    if std <= LEAST_SHARE * scale:
        raise InputError(f"{path}: no noise: volumes are the same, or multiples of each other")
    # A median of n values is 1.25 times less certain than their mean.
    spread = 1.25 * float(np.std(levels)) / math.sqrt(len(levels))
    error = math.hypot(spread, float(np.median([one.error for one in found])))
    setting = NoiseSetting(
        iso=None, parameters={"std": std / scale}, standard_errors={"std": error / scale}
    )
    return setting, _warnings(levels, std, ranges)


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
