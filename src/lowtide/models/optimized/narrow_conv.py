"""Convolutions that leave few channels, as most models end with one."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from lowtide.models.optimized.optimized_module import OptimizedModule, is_recorded

# A kernel on a CPU computes 8 or 16 channels at once, however few are wanted.
_FEW, _LEAST_GIVEN = 4, 16
# An image with fewer pixels is done before its products have begun.
_LEAST_PIXELS = 1 << 14
# Of products that are held at once: so that some of them are in a cache while they are added up.
_HELD_BYTES = 8 << 20


class OptimizedNarrowConv(OptimizedModule):
    """A ``torch.nn.Conv2d`` to few channels."""

    @staticmethod
    def fits(part: nn.Module) -> bool:
        """Whether ``part`` is such a convolution, and keeps the image's size."""
        if not keeps_size(part) or part.groups > 1:
            return False
        odd = all(side % 2 for side in part.kernel_size) and part.kernel_size != (1, 1)
        return odd and part.out_channels <= _FEW and part.in_channels >= _LEAST_GIVEN

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) to (B, C, H, W)."""
        return narrow_conv2d(self.plain, x)


def keeps_size(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is a convolution with zeros around it, of pixels side by side."""
    if type(layer) is not nn.Conv2d or layer.stride != (1, 1) or layer.dilation != (1, 1):
        return False
    half = tuple(side // 2 for side in layer.kernel_size)
    return layer.padding == half and layer.padding_mode == "zeros"


def narrow_conv2d(conv: nn.Module, x: Tensor) -> Tensor:
    """``conv(x)``, faster on a CPU in fp32 where `OptimizedNarrowConv` fits it.

    All that one pixel adds to those around it is one product with the weights, of as many channels
    as results times places of the kernel: 27 where 3×3 pixels give three. A convolution computes 16
    for each of the nine places. Sums are in another order, and round less.
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
    rows = max(1, _HELD_BYTES // (len(taps) * width * x.element_size()))
    for image, found in zip(x, result, strict=True):
        for top in range(0, height, rows):
            strip = image[:, top : top + rows].flatten(1)
            # Not named, or there would be those of two strips.
            _add_around(found, (taps @ strip).view(*weight.shape[2:], few, -1, width), top)
    return result


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    on_cpu = x.device.type == weight.device.type == "cpu"
    enough = x.dim() == 4 and x.shape[2] * x.shape[3] >= _LEAST_PIXELS
    return on_cpu and enough and x.dtype == weight.dtype == torch.float32 and not is_recorded()


def _add_around(found: Tensor, products: Tensor, top: int) -> None:
    """Add to ``found`` (C, H, W) what pixels of the rows from ``top`` on give it: ``products``
    (kernel's rows, kernel's columns, C, rows, W)."""
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
            given = products[row, column, :, low - by - top : high - by - top]
            found[:, low:high, left:right] += given[..., left - to : right - to]
