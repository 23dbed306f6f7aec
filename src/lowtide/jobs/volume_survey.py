"""Ranges and noise levels of the volumes of a NIfTI file, each from one pass over the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lowtide.core.errors import InputError
from lowtide.core.progress import Cancel, check_cancel
from lowtide.media.volume_file import VolumeSource
from lowtide.media.volume_header import VolumeFacts
from lowtide.models.denoiser.volume_level import LevelStatistics, RangeStatistics, VolumeRange


def survey_ranges(facts: VolumeFacts, cancel: Cancel = None) -> list[VolumeRange]:
    """Return the range of each volume.

    Raises:
        InputError: The file is damaged, or no voxel is finite.
    """
    found = []
    for slices in _volumes(facts, cancel):
        statistics = RangeStatistics()
        for image in slices:
            statistics.add(image)
        found.append(statistics.result())
    if sum(one.not_finite for one in found) == facts.slices * facts.shape[0] * facts.shape[1]:
        raise InputError(f"{facts.path}: no voxel is finite: all are NaN or infinite")
    return found


def survey_levels(
    facts: VolumeFacts, ranges: Sequence[VolumeRange], cancel: Cancel = None
) -> list[float | None]:
    """Return the noise level of each volume in data units, None where no voxel tells it.

    Structure only adds to an estimate, and the volumes of a series come from one scanner: none gets
    more than the median of all.
    """
    found = []
    for one, slices in zip(ranges, _volumes(facts, cancel), strict=True):
        statistics = LevelStatistics(one.threshold)
        for image in slices:
            statistics.add(image)
        found.append(statistics.sigma())
    known = [level for level in found if level is not None]
    most = sorted(known)[(len(known) - 1) // 2] if known else 0.0
    return [None if level is None else min(level, most) for level in found]


def file_scale(ranges: Sequence[VolumeRange]) -> float:
    """Return the value that is 1 in noise tables: the robust maximum of the brightest volume."""
    return max(one.high for one in ranges)


def _volumes(facts: VolumeFacts, cancel: Cancel) -> Iterator[Iterator[np.ndarray]]:
    """Iterate over volumes, each as its slices (H, W) in data units, to be read in order."""
    _, _, slices, volumes = facts.shape
    with VolumeSource(facts) as source:

        def of_volume(volume: int) -> Iterator[np.ndarray]:
            for place in range(volume * slices, (volume + 1) * slices):
                check_cancel(cancel)
                yield facts.to_units(source.read(place, place + 1))[0, ..., 0]

        for volume in range(volumes):
            yield of_volume(volume)
