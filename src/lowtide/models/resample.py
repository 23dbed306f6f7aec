"""Cubic resampling as MATLAB's ``imresize``, the standard of SR benchmarks.

The kernel is that of Keys, "Cubic convolution interpolation for digital image processing" (1981),
with a = -1/2. Super-resolution data sets are made with MATLAB's ``imresize``: the same kernel,
stretched by the factor when it shrinks (antialiasing), pixel centers at half integers, borders
mirrored, rounded to 8 bits after each axis. PIL, OpenCV and PyTorch all differ from it, by up to 15
levels, so it is implemented here; it reproduces Set5's published low-resolution files bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np


CUBIC_REACH = 2  # pixels to each side that cubic upsampling reads


def keys_cubic(distance: np.ndarray) -> np.ndarray:
    """Keys' cubic kernel (a = -1/2) at the given distances, in pixels; zero from 2 on.

    ``distance`` and the result have the same shape.
    """
    import numpy as np

    t = np.abs(distance)
    near = (1.5 * t - 2.5) * t * t + 1.0
    far = ((-0.5 * t + 2.5) * t - 4.0) * t + 2.0
    return np.where(t <= 1.0, near, np.where(t < 2.0, far, 0.0))


def polyphase_taps(scale: int) -> np.ndarray:
    """Return the taps of cubic upsampling by an integer factor, float64 (scale, 5).

    Row ``p`` makes the output samples ``p, p + scale, p + 2 * scale, ...``: it weighs the five
    input samples around the one at the same index, and sums to 1.
    """
    import numpy as np

    centers = (np.arange(scale) + 0.5) / scale - 0.5
    taps = keys_cubic(centers[:, None] - np.arange(-2, 3)[None, :])
    return taps / taps.sum(axis=1, keepdims=True)


def cubic_kernel(scale: int, channels: int) -> np.ndarray:
    """Return `polyphase_taps` as the kernel of a convolution before a pixel shuffle.

    float32 (C·s², C, 5, 5). Dense rather than grouped: about as fast on a CPU, and no special case
    for exporters and runtimes.
    """
    import numpy as np

    taps = polyphase_taps(scale)
    phases = np.einsum("iy,jx->ijyx", taps, taps).reshape(scale * scale, 5, 5)
    kernel = np.zeros((channels, scale * scale, channels, 5, 5), np.float32)
    for channel in range(channels):
        kernel[channel, :, channel] = phases
    return kernel.reshape(-1, channels, 5, 5)


def resize_cubic(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize as MATLAB's ``imresize(image, [height width], 'bicubic')`` does.

    ``image`` has shape (H, W) or (H, W, C). uint8 comes back rounded and clipped to uint8; other
    types come back as float64, unclipped. Raises ValueError for an empty size.
    """
    import numpy as np

    if min(height, width, *image.shape[:2]) < 1:
        raise ValueError(f"cannot resize {image.shape[:2]} to {(height, width)}")
    result = image.astype(np.float64)
    factors = (height / image.shape[0], width / image.shape[1])
    # MATLAB filters the axis that shrinks most first, and rounds uint8 after each axis. Half
    # goes up there; numpy's rint would send it to the even neighbor.
    for axis in sorted((0, 1), key=lambda axis: factors[axis]):
        result = _resize_axis(result, axis, (height, width)[axis])
        if image.dtype == np.uint8:
            result = np.clip(np.floor(result + 0.5), 0, 255)
    return result.astype(np.uint8) if image.dtype == np.uint8 else result


def _resize_axis(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Resize one axis for `resize_cubic`, without rounding."""
    return CubicReads.of(image.shape[axis], size, 0, size).along(image, axis)


@dataclass(frozen=True)
class CubicReads:
    """What samples of a resized axis read of the original: ``count`` samples from ``first`` on.

    ``index`` (samples, taps) counts from ``first``, and ``weights`` are those of each tap.
    """

    first: int
    count: int
    index: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, length: int, size: int, first: int, count: int) -> Self:
        """Return it for ``count`` samples from ``first`` on of ``size`` made of ``length``."""
        import numpy as np

        factor = size / length
        stretch = max(1.0, 1.0 / factor)
        centers = (np.arange(first, first + count) + 0.5) / factor - 0.5
        taps = math.ceil(4.0 * stretch) + 2
        low = np.floor(centers - 2.0 * stretch).astype(np.int64)
        index = low[:, None] + np.arange(taps)[None, :]
        weights = keys_cubic((centers[:, None] - index) / stretch)
        weights /= weights.sum(axis=1, keepdims=True)
        mirrored = np.mod(index, 2 * length)
        mirrored = np.where(mirrored < length, mirrored, 2 * length - 1 - mirrored)
        start = int(mirrored.min())
        return cls(start, int(mirrored.max()) + 1 - start, mirrored - start, weights)

    def along(self, image: np.ndarray, axis: int) -> np.ndarray:
        """Resize an axis of ``image``, float64, which holds the samples that are read."""
        import numpy as np

        moved = np.moveaxis(image, axis, 0)
        result = np.zeros((len(self.index), *moved.shape[1:]))
        for tap in range(self.index.shape[1]):
            weight = self.weights[:, tap].reshape(-1, *(1,) * (moved.ndim - 1))
            result += weight * moved[self.index[:, tap]]
        return np.moveaxis(result, 0, axis)
