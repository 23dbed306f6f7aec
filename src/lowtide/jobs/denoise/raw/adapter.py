"""Conversion between planes of a camera RAW file and what a denoiser gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.media.raw_file import RawPlanesInfo
from lowtide.models.denoiser.variance import VarianceStabilizer

_LARGEST = 65_535


@dataclass(frozen=True)
class RawScale:
    """Values of a file's planes: 0 at ``black``, of each plane or of all, and 1 at ``white``.

    ``stabilizer`` is applied to them for networks that know noise of one strength only.
    """

    black: np.ndarray
    white: float
    stabilizer: VarianceStabilizer | None = None

    @property
    def range(self) -> float:
        """Levels from the mean black to the white level."""
        return self.white - float(self.black.mean())

    def values_of(self, levels: np.ndarray) -> np.ndarray:
        """Return values (..., C), float32, of levels of the file."""
        linear = (levels - self.black.astype(np.float32)) * np.float32(1 / self.range)
        return linear if self.stabilizer is None else self.stabilizer.forward(linear)

    def levels_of(self, values: np.ndarray) -> np.ndarray:
        """Return levels of the file, uint16, of values (..., C)."""
        linear = values if self.stabilizer is None else self.stabilizer.inverse(values)
        levels = linear * np.float32(self.range) + self.black.astype(np.float32)
        return np.rint(levels).clip(0, _LARGEST).astype(np.uint16)


class RawAdapter(NoisyImageAdapter):
    """`NoisyImageAdapter` of the planes of a RAW file.

    Three colors of each pixel run through a color network as one image. Planes of a mosaic are gray
    images, since their pixels lie in different places: as colors of one image their edges would be
    shifted.
    """

    def __init__(self, info: RawPlanesInfo, network_channels: int, scale: RawScale) -> None:
        super().__init__(info, network_channels)
        self._scale = scale
        self._as_color = info.channels == network_channels
        self.inputs = 1 if self._as_color else info.channels
        self.context = None

    def to_network(self, values: np.ndarray) -> np.ndarray:
        """Convert levels (B, H, W, C) to inputs (B·inputs, channels, H, W)."""
        return self.color_to_inputs(np.moveaxis(self._scale.values_of(values), -1, 1))

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Convert a network's results to values (B, H, W, C), unclamped."""
        return np.moveaxis(self.color_from_outputs(results), 1, -1)

    def to_sink(self, floats: np.ndarray) -> np.ndarray:
        """Convert values (..., C) to levels of the file, rounded."""
        return self._scale.levels_of(floats)

    def color(self, values: np.ndarray) -> np.ndarray:
        """Return the values (H, W, C) of levels (H, W, C)."""
        return self._scale.values_of(values)

    def color_to_inputs(self, color: np.ndarray) -> np.ndarray:
        """Convert values (B, C, H, W) to inputs (B·inputs, channels, H, W)."""
        if self._as_color:
            return np.ascontiguousarray(color)
        gray = color.reshape(-1, 1, *color.shape[2:])
        return gray.repeat(self._network_channels, axis=1)

    def color_from_outputs(self, color: np.ndarray) -> np.ndarray:
        """Convert a network's results (B·inputs, channels, H, W) to values (B, C, H, W)."""
        if self._as_color:
            return color
        return color.mean(1).reshape(-1, self.inputs, *color.shape[2:])
