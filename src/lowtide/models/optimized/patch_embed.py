"""Images as tokens and back, of which each has its channels side by side.

A convolution leaves the pixels of a channel side by side. SwinIR and its kin call that tokens whose
channels lie as far apart as the image is large, and sums keep the layout of what they are of: all
layers of a group read and write such tokens then, and norms copy each of them into order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.attention.memory_format import to_contiguous
from lowtide.models.optimized.optimized_module import OptimizedModule, is_recorded


class OptimizedFirstConv(OptimizedModule):
    """The ``torch.nn.Conv2d`` that makes tokens of a picture, with their channels side by side, so
    that they need not be held in both layouts."""

    @staticmethod
    def fits(part: object) -> bool:
        """Whether ``part`` is a convolution."""
        return type(part) is nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, height, width) to as many of other channels."""
        found = self.plain(x)
        if not _arranges(x):
            return found
        tokens = to_contiguous(found.flatten(2).transpose(1, 2))
        return tokens.unflatten(1, found.shape[2:]).movedim(-1, 1)


class OptimizedPatchEmbed(OptimizedModule):
    """``PatchEmbed(x)`` of SwinIR and its kin."""

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, height, width) to (images, pixels, channels)."""
        found = self.plain(x)
        return to_contiguous(found) if _arranges(x) else found


class OptimizedPatchUnembed(OptimizedModule):
    """``PatchUnEmbed(x, x_size)`` of SwinIR and its kin, to an image whose convolution rounds as
    little as it does in the model: over pixels with their channels side by side more is added up
    in one go."""

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        """(images, pixels, channels) to (images, channels, height, width)."""
        if not _arranges(x):
            return self.plain(x, x_size)
        return to_contiguous(x.transpose(1, 2)).unflatten(2, tuple(x_size))


def _arranges(x: Tensor) -> bool:
    """Whether it is chosen here how tensors lie in memory: on a card this was not measured, and
    what is written down is arranged elsewhere."""
    return x.device.type == "cpu" and not (is_recorded() or torch.compiler.is_exporting())
