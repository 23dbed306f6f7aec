"""Slices of a volume as images that a denoiser runs on, in float32 and clamped nowhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.core.signal import ClosedOnExit
from lowtide.jobs.denoise.states import ScratchImage
from lowtide.jobs.denoise.volumes.scale import VolumeScale
from lowtide.jobs.denoise.volumes.survey import VolumeSurvey
from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.media.image_info import ImageInfo
from lowtide.media.volume_file import VolumeSource


class SliceArray(ClosedOnExit):
    """One slice in memory, (H, W, 1) in the network's units: a source and a sink of rows."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype
        height, width, channels = values.shape
        self.info = ImageInfo(width, height, channels, "float32")

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``, (N, W, 1); none below the slice."""
        return self.values[first:last]

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows (N, W, 1) from row ``first`` on."""
        self.values[first : first + len(values)] = values

    def close(self) -> None:
        """Do nothing: the values stay."""


class SliceAdapter(NoisyImageAdapter):
    """Conversion of slices, whose values beyond 0..1 are neither cut off nor rounded."""

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Convert a network's results to (B, H, W, 1)."""
        return np.moveaxis(self.color_from_outputs(results), 1, -1)

    def to_sink(self, floats: np.ndarray) -> np.ndarray:
        """Return the values as they are."""
        return floats

    def _color_to_unit(self, values: np.ndarray) -> np.ndarray:
        return np.array(np.moveaxis(values, -1, 1), order="C")


class NetworkDenoisedSlices:
    """Slices of a file as a network makes them, across the thick axis of its volumes.

    Where that is not the third, a volume is turned in a scratch file, slice by slice.

    Args:
        network: Runs a slice (H, W, 1) in the network's units, given a number that no other slice
            of the file has and the conversion of its volume.
        on_steps: Called with 1 for each slice across another axis.
    """

    def __init__(
        self,
        survey: VolumeSurvey,
        network: Callable[[int, VolumeScale, np.ndarray], np.ndarray],
        *,
        scratch: Path | None = None,
        cancel: Cancel = None,
        on_steps: Callable[[int], None] | None = None,
    ) -> None:
        self._survey, self._facts, self._network = survey, survey.facts, network
        self._cancel, self._on_steps = cancel, on_steps
        self._source, self._turned = VolumeSource(self._facts), None
        if self._facts.thick_axis != 2:
            height, width, _ = self._facts.plane_info.shape
            planes = self._facts.shape[self._facts.thick_axis]
            self._turned = ScratchImage((planes * height, width, 1), scratch)

    def slice(self, place: int, before: np.ndarray) -> np.ndarray:
        """Return slice ``place`` of the file, (H, W, 1) in data units, of which this is made."""
        volume, number = divmod(place, self._facts.shape[2])
        scale = self._survey.scales[volume]
        if scale is None or not scale.has_noise:
            return before
        if self._turned is None:
            return scale.denoise(before, partial(self._network, place, scale))
        if number == 0:
            self._run_turned(self._turned, volume, scale)
        rows = range(number, self._turned.shape[0], self._facts.shape[2])
        made = np.concatenate([self._turned.read(row, row + 1) for row in rows])
        return self._swapped(made)

    def close(self) -> None:
        """Release the files."""
        self._source.close()
        if self._turned is not None:
            self._turned.close()

    def _run_turned(self, turned: ScratchImage, volume: int, scale: VolumeScale) -> None:
        facts, depth = self._facts, self._facts.shape[2]
        for number in range(depth):
            raise_if_cancelled(self._cancel)
            place = volume * depth + number
            image = facts.to_units(self._source.read(place, place + 1))[0]
            for plane, row in enumerate(self._swapped(self._survey.ranges[volume].known(image))):
                turned.write(plane * depth + number, row[None])
        planes = facts.shape[facts.thick_axis]
        for plane in range(planes):
            raise_if_cancelled(self._cancel)
            rows = turned.read(plane * depth, (plane + 1) * depth)
            network = partial(self._network, volume * planes + plane, scale)
            turned.write(plane * depth, scale.denoise(rows, network))
            if self._on_steps is not None:
                self._on_steps(1)

    def _swapped(self, image: np.ndarray) -> np.ndarray:
        """Return a slice with the thick axis first, or back again."""
        return image.swapaxes(0, 1) if self._facts.thick_axis == 0 else image
