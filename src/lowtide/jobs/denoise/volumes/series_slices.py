"""Slices of the volumes of a NIfTI file in data units, read in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from lowtide.core.progress import Cancel, check_cancel
from lowtide.media.volume_file import VolumeSource
from lowtide.media.volume_header import VolumeFacts
from lowtide.models.denoiser.volume_level import VolumeRange


def volumes_of(
    facts: VolumeFacts, ranges: Sequence[VolumeRange] | None = None, cancel: Cancel = None
) -> Iterator[Iterator[np.ndarray]]:
    """Iterate over volumes, each as its slices (H, W), all of which have to be taken.

    Voxels beyond their ``ranges`` are infinite.
    """
    for slices in neighbors_of(facts, ranges, 0, cancel):
        yield (image for (image,) in slices)


def neighbors_of(
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
                check_cancel(cancel)
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
