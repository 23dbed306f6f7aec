"""Faster last layers of upscalers: convolutions with few output channels, in strips of rows.

At scale 4, maps of 64 channels are the memory peak of many window transformers: twice what their
attention needs. Their result has three channels.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lowtide.models.optimized.token_linear import OptimizedModule, is_recorded

# CPU kernels compute 8 or 16 output channels at once, however few are needed.
_MAX_OUT_CHANNELS, _LEAST_GIVEN = 4, 16
# Below this the overhead exceeds the gain.
_LEAST_PIXELS = 1 << 14
# Bytes of products held at once, so that some are still in a cache when they are summed.
_PRODUCT_BYTES = 8 << 20

# Peak bytes of a strip.
_STRIP_BYTES = 128 << 20


class OptimizedNarrowConv(OptimizedModule):
    """Replacement for ``torch.nn.Conv2d`` with at most 4 output channels."""

    @staticmethod
    def fits(part: nn.Module) -> bool:
        """Return whether ``part`` is a size-preserving convolution to few channels.

        Its kernel must be odd and not 1×1, with one group, at most 4 output channels and at least
        16 input channels.
        """
        if not keeps_size(part) or part.groups > 1:
            return False
        odd = all(side % 2 for side in part.kernel_size) and part.kernel_size != (1, 1)
        return odd and part.out_channels <= _MAX_OUT_CHANNELS and part.in_channels >= _LEAST_GIVEN

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        return narrow_conv2d(self.plain, x)


def keeps_size(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether ``layer`` is a zero-padded "same" Conv2d, stride and dilation 1."""
    if type(layer) is not nn.Conv2d or layer.stride != (1, 1) or layer.dilation != (1, 1):
        return False
    half = tuple(side // 2 for side in layer.kernel_size)
    return layer.padding == half and layer.padding_mode == "zeros"


def narrow_conv2d(conv: nn.Module, x: Tensor) -> Tensor:
    """Compute ``conv(x)``, faster in fp32 on a CPU where `OptimizedNarrowConv` fits.

    Maps (B, C, H, W) to (B, C', H', W') as ``conv`` does. One matrix product gives all that each
    pixel adds to its neighbors: as many channels as outputs times kernel taps, 27 for 3×3 to three
    channels. A convolution computes 16 for each of the nine taps. Sums are in another order and
    round less. Falls back to ``conv(x)`` elsewhere.
    """
    if not (
        isinstance(conv, nn.Conv2d) and OptimizedNarrowConv.fits(conv) and _is_plain(x, conv.weight)
    ):
        return conv(x)
    weight, bias = conv.weight, conv.bias
    (images, channels, height, width), few = x.shape, conv.out_channels
    taps = weight.permute(2, 3, 0, 1).reshape(-1, channels)
    result = x.new_zeros(images, few, height, width)
    if bias is not None:
        result += bias.view(-1, 1, 1)
    rows = max(1, _PRODUCT_BYTES // (len(taps) * width * x.element_size()))
    for image, found in zip(x, result, strict=True):
        for top in range(0, height, rows):
            strip = image[:, top : top + rows].flatten(1)
            # The product has no name, so that it is freed before the next strip's is computed.
            _add_around(found, (taps @ strip).view(*weight.shape[2:], few, -1, width), top)
    return result


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    on_cpu = x.device.type == weight.device.type == "cpu"
    enough = x.dim() == 4 and x.shape[2] * x.shape[3] >= _LEAST_PIXELS
    return on_cpu and enough and x.dtype == weight.dtype == torch.float32 and not is_recorded()


def _add_around(found: Tensor, products: Tensor, top: int) -> None:
    """Scatter-add products of the rows from ``top`` on into ``found`` (C, H, W).

    ``products`` is (kernel rows, kernel columns, C, rows, W).
    """
    down, across, _, rows, width = products.shape
    height = found.shape[1]
    for row in range(down):
        by = down // 2 - row
        low, high = max(0, top + by), min(height, top + rows + by)
        if low >= high:
            continue  # beyond the image
        for column in range(across):
            to = across // 2 - column
            left, right = max(0, to), min(width, width + to)
            if left >= right:
                continue
            rows_given = slice(low - by - top, high - by - top)
            given = products[row, column, :, rows_given, left - to : right - to]
            # `found[...] += given` would write the sum to its place once more
            found[:, low:high, left:right].add_(given)


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
