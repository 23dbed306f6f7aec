"""Mask of a volume: a label for each voxel, read slice by slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lowtide.core.errors import InputError
from lowtide.media.volume_file import VolumeSource
from lowtide.media.volume_header import VolumeFacts, inspect_volume

SIGNAL, BACKGROUND = 1, 2  # labels that scores are of


class VolumeMask:
    """Labels of the voxels of each volume of a file; those without a label above 0 are copied.

    ``signal`` and ``background`` count the voxels of these labels, and ``outside`` those without.

    Raises:
        InputError: The file is not of the volumes' shape, or has no label above 0.
    """

    def __init__(self, path: Path, volume: VolumeFacts) -> None:
        self._facts = inspect_volume(path)
        expected = (*volume.shape[:3], 1)
        if self._facts.shape != expected:
            raise InputError(
                f"{path}: a mask of {_shown(self._facts.shape)}, and {volume.path} is"
                f" {_shown(volume.shape)}",
                hint="one label for each voxel of a volume: 0 where it is to be copied",
            )
        self._source, self._next = VolumeSource(self._facts), 0
        self.signal = self.background = self.outside = 0
        for place in range(self._facts.slices):
            labels = self.labels(place)
            self.signal += int((labels == SIGNAL).sum())
            self.background += int((labels == BACKGROUND).sum())
            self.outside += labels.size - int((labels > 0).sum())
        self.close()
        if self.outside == np.prod(expected):
            raise InputError(
                f"{path}: no voxel has a label above 0, so that all would be copied",
                hint="labels are 1 for signal and 2 for background, or 1 for all of a head",
            )

    def labels(self, place: int) -> np.ndarray:
        """Return the labels of slice ``place`` of each volume, (H, W)."""
        if place < self._next:
            self.close()
        self._next = place + 1
        return self._facts.to_units(self._source.read(place, place + 1))[0, ..., 0]

    def close(self) -> None:
        """Close the file, which `labels` opens again."""
        self._source.close()
        self._source, self._next = VolumeSource(self._facts), 0


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
