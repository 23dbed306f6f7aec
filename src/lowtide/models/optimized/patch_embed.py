"""Conversions between images and tokens that keep tokens contiguous.

A convolution returns NCHW. SwinIR-like models view that as tokens whose channels have a stride of
the image's size, and residual sums keep the layout of their operands: all layers of a group then
read and write strided tokens, and every norm copies them to contiguous ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.attention.memory_format import to_contiguous
from lowtide.models.optimized.optimized_module import OptimizedModule, is_recorded


class OptimizedFirstConv(OptimizedModule):
    """Replacement for the first ``torch.nn.Conv2d``, with channels-last output.

    Its output becomes the model's tokens, which then need not be held in both layouts.
    """

    @staticmethod
    def fits(part: object) -> bool:
        """Return whether ``part`` is a ``torch.nn.Conv2d``."""
        return type(part) is nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        found = self.plain(x)
        if not _arranges(x):
            return found
        tokens = to_contiguous(found.flatten(2).transpose(1, 2))
        return tokens.unflatten(1, found.shape[2:]).movedim(-1, 1)


class OptimizedPatchEmbed(OptimizedModule):
    """Replacement for ``PatchEmbed(x)`` of SwinIR-like models: contiguous tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, N, C)."""
        found = self.plain(x)
        return to_contiguous(found) if _arranges(x) else found


class OptimizedPatchUnembed(OptimizedModule):
    """Replacement for ``PatchUnEmbed(x, x_size)`` of SwinIR-like models: NCHW images.

    The next convolution then rounds as little as it does in the model: over channels-last pixels it
    adds up more values in one go.
    """

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        """Map (B, N, C) to (B, C, H, W)."""
        if not _arranges(x):
            return self.plain(x, x_size)
        return to_contiguous(x.transpose(1, 2)).unflatten(2, tuple(x_size))


def _arranges(x: Tensor) -> bool:
    """Return whether this module chooses the memory layout of its output.

    Only on a CPU: on a GPU it was not measured, and recorded or exported graphs choose layouts
    elsewhere.
    """
    return x.device.type == "cpu" and not (is_recorded() or torch.compiler.is_exporting())
