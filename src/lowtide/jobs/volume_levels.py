"""Noise levels of the volumes of a NIfTI file, from the file itself.

Volumes of a series have the same structure and other noise, so that each is measured against its
neighbors, in the foreground. A single volume is as noisy as its background shows, if that is left.
Without either the structure of slices counts as noise where it is as fine, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.progress import Cancel
from lowtide.jobs.series_slices import neighbors_of, volumes_of
from lowtide.media.volume_header import VolumeFacts
from lowtide.models.denoiser.neighbor_noise import NeighborNoise, NeighborStatistics
from lowtide.models.denoiser.slice_noise import SliceNoiseStatistics
from lowtide.models.denoiser.volume_level import VolumeRange

_VOXELS = 10_000  # of a volume, which are enough for an error of 2 %
LEAST_SHARE = 1e-4  # of a file's scale: less is that of rounding
# Estimates that differ by more have a note: both cannot be noise alone.
_MOST_APART = 1.5


@dataclass(frozen=True)
class VolumeLevels:
    """Level of each volume in data units, None where no voxel tells it.

    ``notes`` say what else the file shows, and where structure may be part of a level.
    """

    levels: tuple[float | None, ...]
    notes: tuple[str, ...]


def estimate_levels(
    facts: VolumeFacts, ranges: Sequence[VolumeRange], cancel: Cancel = None
) -> VolumeLevels:
    """Return the noise level of each volume.

    Structure only adds to an estimate, and the volumes of a series come from one scanner: none gets
    more than the median of all.
    """
    rounding = LEAST_SHARE * file_scale(ranges)
    near = [one and one.std for one in neighbor_noise(facts, ranges, _VOXELS, cancel)]
    # Volumes that are copies of each other do not tell their noise.
    told = [one for one in near if one is not None and one > rounding]
    series = float(np.median(told)) if told else None
    found, foregrounds, witnesses = [], [], set()
    for values, slices, own in zip(ranges, volumes_of(facts, cancel), near, strict=True):
        statistics = SliceNoiseStatistics(values)
        for image in slices:
            statistics.add(image)
        one = statistics.result()
        if one.foreground is None:
            found.append(None)
            continue
        level, witness = one.background, "the background"
        if series is not None:
            level, witness = (own if own in told else series), "volumes next to each other"
        witnesses.add(witness if level is not None else None)
        foregrounds.append(one.foreground)
        found.append(one.foreground if level is None else min(level, one.foreground))
    known = [level for level in found if level is not None]
    most = sorted(known)[(len(known) - 1) // 2] if known else 0.0
    levels = tuple(None if level is None else min(level, most) for level in found)
    return VolumeLevels(levels, _notes(most, foregrounds, witnesses, rounding))


def _notes(
    level: float, foregrounds: Sequence[float], witnesses: set[str | None], rounding: float
) -> tuple[str, ...]:
    """Return notes on levels of which slices tell something else, or which nothing else tells."""
    if level <= rounding or not foregrounds:
        return ()
    if None in witnesses:
        return (
            f"slices alone tell the noise level of {level:.4g}, without a background of noise or"
            " a second volume: structure as fine as voxels counts too. If details are lost, set a"
            " lower --sigma",
        )
    seen = float(np.median(foregrounds))
    if seen <= _MOST_APART * level:
        return ()
    (witness,) = witnesses
    return (
        f"slices look like a noise level of {seen:.4g}, and {witness} like {level:.4g}: that is"
        " used, and the rest taken for structure",
    )


def neighbor_noise(
    facts: VolumeFacts, ranges: Sequence[VolumeRange], voxels: int, cancel: Cancel = None
) -> list[NeighborNoise | None]:
    """Return the noise of each volume against its neighbors in the series.

    ``voxels`` is how many of a volume are used. None is of a single volume, and of volumes with too
    few voxels of foreground.
    """
    width, height, slices, count = facts.shape
    if count < 2:
        return [None]
    stride = max(1, width * height * slices // voxels)
    found = []
    for volume, images in enumerate(neighbors_of(facts, 1, cancel)):
        near = [one for one in (volume - 1, volume + 1) if 0 <= one < count]
        threshold = np.mean([ranges[one].threshold for one in near])
        statistics = NeighborStatistics(float(threshold), stride)
        for target, *others in images:
            statistics.add(target, others)
        found.append(statistics.result())
    return found


def file_scale(ranges: Sequence[VolumeRange]) -> float:
    """Return the value that is 1 in noise tables: the robust maximum of the brightest volume."""
    return max(one.high for one in ranges)
