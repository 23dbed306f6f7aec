"""Noise levels of the volumes of a NIfTI file, from the file itself.

Volumes of a series have the same structure and other noise, so that each is measured against its
neighbors, in the foreground. A single volume is as noisy as its background shows, if that is left.
Without either the structure of slices counts as noise where it is as fine, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.media.volume_file import VolumeSource
from lowtide.media.volume_header import VolumeFacts
from lowtide.models.denoiser.noise_statistics import NeighborNoiseEstimate, NeighborNoiseEstimator
from lowtide.models.denoiser.volume_level import (
    SliceNoiseEstimate,
    SliceNoiseEstimator,
    VolumeRange,
)

_VOXELS = 10_000  # of a volume, which are enough for an error of 2 %
LEAST_SHARE = 1e-4  # of a file's scale: less is that of rounding
# Estimates that differ by more have a note: both cannot be noise alone.
_MOST_APART = 1.5


@dataclass(frozen=True)
class VolumeNoiseLevels:
    """Level of each volume in data units, None where no voxel tells it.

    ``notes`` say what else the file shows, and where structure may be part of a level.
    """

    levels: tuple[float | None, ...]
    notes: tuple[str, ...]


def estimate_levels(
    facts: VolumeFacts, ranges: Sequence[VolumeRange], cancel: Cancel = None
) -> VolumeNoiseLevels:
    """Return the noise level of each volume.

    Structure only adds to an estimate, and the volumes of a series come from one scanner: none gets
    more than the median of all.
    """
    rounding = LEAST_SHARE * brightest_maximum(ranges)
    near = [one and one.std for one in neighbor_noise(facts, ranges, _VOXELS, cancel)]
    # Volumes that are copies of each other do not tell their noise.
    told = [one for one in near if one is not None and one > rounding]
    series = float(np.median(told)) if told else None
    shown = [
        _slice_noise(*one)
        for one in zip(ranges, iterate_volumes(facts, ranges, cancel), strict=True)
    ]
    found = []
    for own, slices in zip(near, shown, strict=True):
        known = slices.background if series is None else own if own in told else series
        bounds = [one for one in (slices.foreground, known) if one is not None]
        found.append(None if slices.foreground is None else min(bounds))
    most = sorted(one for one in found if one is not None)
    most = most[(len(most) - 1) // 2] if most else 0.0
    levels = tuple(None if level is None else min(level, most) for level in found)
    notes = _notes(most, shown, of_series=series is not None) if most > rounding else ()
    return VolumeNoiseLevels(levels, notes)


def _slice_noise(values: VolumeRange, slices: Iterator[np.ndarray]) -> SliceNoiseEstimate:
    statistics = SliceNoiseEstimator(values)
    for image in slices:
        statistics.add(image)
    return statistics.result()


def _notes(
    level: float, shown: Sequence[SliceNoiseEstimate], *, of_series: bool
) -> tuple[str, ...]:
    """Return notes where nothing but slices tells the level, or what tells it differs."""
    foreground = [one.foreground for one in shown if one.foreground is not None]
    seen = float(np.median(foreground))
    background = [one.background for one in shown if one.background is not None]
    behind = float(np.median(background)) if background else None
    if not of_series and len(background) < len(foreground):
        return (
            f"slices alone tell the noise level of {level:.4g}, as neither a background nor other"
            " volumes do: structure as fine as voxels counts too. If details are lost, set a lower"
            " --sigma",
        )
    notes = []
    if seen > _MOST_APART * level:
        witness = "volumes next to each other" if of_series else "the background"
        notes.append(
            f"slices look like a noise level of {seen:.4g}, and {witness} like {level:.4g}: that is"
            " used, and the rest taken for structure"
        )
    if behind is not None and level > _MOST_APART * behind:
        notes.append(
            f"volumes next to each other differ like a noise level of {level:.4g}, which is used,"
            f" and the background is like {behind:.4g}: the rest is noise that only signal has, or"
            f" structure that they do not share. If details are lost, set --sigma {behind:.4g}"
        )
    return tuple(notes)


def neighbor_noise(
    facts: VolumeFacts, ranges: Sequence[VolumeRange], voxels: int, cancel: Cancel = None
) -> list[NeighborNoiseEstimate | None]:
    """Return the noise of each volume against its neighbors in the series.

    ``voxels`` is how many of a volume are used. None is of a single volume, and of volumes with too
    few voxels of foreground.
    """
    width, height, slices, count = facts.shape
    if count < 2:
        return [None]
    stride = max(1, width * height * slices // voxels)
    found = []
    for volume, images in enumerate(iterate_with_neighbors(facts, ranges, 1, cancel)):
        near = [one for one in (volume - 1, volume + 1) if 0 <= one < count]
        threshold = np.mean([ranges[one].threshold for one in near])
        statistics = NeighborNoiseEstimator(float(threshold), stride)
        for target, *others in images:
            statistics.add(target, others)
        found.append(statistics.result())
    return found


def brightest_maximum(ranges: Sequence[VolumeRange]) -> float:
    """Return the value that is 1 in noise tables: the robust maximum of the brightest volume."""
    return max(one.high for one in ranges)


def iterate_volumes(
    facts: VolumeFacts, ranges: Sequence[VolumeRange] | None = None, cancel: Cancel = None
) -> Iterator[Iterator[np.ndarray]]:
    """Iterate over volumes, each as its slices (H, W), all of which have to be taken.

    Voxels beyond their ``ranges`` are infinite.
    """
    for slices in iterate_with_neighbors(facts, ranges, 0, cancel):
        yield (image for (image,) in slices)


def iterate_with_neighbors(
    facts: VolumeFacts,
    ranges: Sequence[VolumeRange] | None,
    reach: int = 1,
    cancel: Cancel = None,
) -> Iterator[Iterator[list[np.ndarray]]]:
    """Iterate over volumes, each as its slices with the same ones of the volumes around it.

    A slice's list has its own image (H, W) first, and then those of the up to 2 · ``reach``
    volumes before and after. None is held: each is read again from the file. Voxels beyond their
    ``ranges`` are infinite.
    """
    slices, volumes = facts.shape[2:]
    with ExitStack() as stack:
        shifts = sorted(range(-reach, reach + 1), key=abs)
        sources = {shift: stack.enter_context(VolumeSource(facts)) for shift in shifts}

        def of_volume(volume: int) -> Iterator[list[np.ndarray]]:
            near = [shift for shift in shifts if 0 <= volume + shift < volumes]
            for place in range(slices):
                raise_if_cancelled(cancel)
                images = [
                    _slice(facts, sources[shift], (volume + shift) * slices + place)
                    for shift in near
                ]
                yield [
                    image if ranges is None else ranges[volume + shift].known(image)
                    for image, shift in zip(images, near, strict=True)
                ]

        for volume in range(volumes):
            yield of_volume(volume)


def _slice(facts: VolumeFacts, source: VolumeSource, place: int) -> np.ndarray:
    return facts.to_units(source.read(place, place + 1))[0, ..., 0]
