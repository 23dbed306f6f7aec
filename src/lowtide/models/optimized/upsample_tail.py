"""Last layers of pixel-shuffle upscalers, run in strips of rows.

At scale 4, maps of 64 channels are the memory peak of many window transformers: twice what their
attention needs. Their result has three channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.models.optimized.narrow_conv import keeps_size, narrow_conv2d
from lowtide.models.optimized.optimized_module import OptimizedModule

# Peak bytes of a strip.
_STRIP_BYTES = 128 << 20


class DeferredLayers(OptimizedModule):
    """Identity that holds the layers which an `OptimizedTail` runs."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (B, C, H, W) itself."""
        return x


class OptimizedTail(OptimizedModule):
    """Last convolution plus the convolutions and pixel shuffles before it, in strips.

    Each strip has a halo as large as the layers' receptive field, so that results differ only by
    how convolutions of other heights round. ``before`` keeps its place in the model, as
    `DeferredLayers`.
    """

    before: Any

    def __init__(self, plain: nn.Conv2d, before: nn.Sequential) -> None:
        super().__init__(plain)
        self.__dict__["before"] = before
        scale, reach = 1, 0.0
        for layer in (*before, plain):
            if isinstance(layer, nn.Conv2d):
                reach += layer.kernel_size[0] // 2 / scale
            elif isinstance(layer, nn.PixelShuffle):
                scale *= layer.upscale_factor
        self._radius, self._scale = math.ceil(reach), scale

    @staticmethod
    def fits(before: object, plain: object) -> bool:
        """Return whether these are convolutions that keep sizes, and pixel shuffles."""
        if type(plain) is not nn.Conv2d or not isinstance(before, nn.Sequential):
            return False
        convolutions = [layer for layer in before if not isinstance(layer, nn.PixelShuffle)]
        return len(convolutions) < len(before) and all(map(keeps_size, (*convolutions, plain)))

    def replace_last(self, plain: nn.Module) -> None:
        """Replace the last convolution by ``plain``, which has other weights."""
        self._parameters, self._buffers = plain._parameters, plain._buffers
        self.__dict__["plain"] = plain

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W), the first layer's input, to (B, C', H * scale, W * scale)."""
        height, rows = x.shape[2], self._rows(x)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or rows >= height:
            return narrow_conv2d(self.plain, self.before(x))
        return self.in_strips(x, rows)

    def in_strips(self, x: Tensor, rows: int) -> Tensor:
        """Compute `forward` of (B, C, H, W) with ``rows`` rows of ``x`` at a time."""
        height, scale, result = x.shape[2], self._scale, None
        for first in range(0, height, rows):
            low = max(0, first - self._radius)
            high = min(height, first + rows + self._radius)
            strip = narrow_conv2d(self.plain, self.before(x[:, :, low:high]))
            if result is None:
                sides = height * scale, strip.shape[3]
                result = strip.new_empty(*strip.shape[:2], *sides)
            own = strip[:, :, (first - low) * scale :][:, :, : rows * scale]
            result[:, :, first * scale : first * scale + own.shape[2]] = own
        assert result is not None
        return result

    def _rows(self, x: Tensor) -> int:
        """Return the rows of a strip that fit in the strip's bytes.

        Input and output of the last shuffle are held at the same time.
        """
        channels = self.plain.in_channels * self._scale**2
        row = 2 * x.shape[0] * channels * x.shape[3] * x.element_size()
        return max(4 * self._radius, _STRIP_BYTES // row)
