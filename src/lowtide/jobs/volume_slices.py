"""Slices of a volume as images that a denoiser runs on, in float32 and clamped nowhere."""

from __future__ import annotations

import numpy as np

from lowtide.jobs.image_adapter import NoisyImageAdapter
from lowtide.media.image_info import ImageInfo


class SliceArray:
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

    def __enter__(self) -> SliceArray:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


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
