"""Layers that fold their weights anew in every call, folded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FoldedConv(nn.Module):
    """A convolution, and the leaky ReLU that may belong to it."""

    def __init__(self, conv: nn.Conv2d, slope: float | None) -> None:
        super().__init__()
        self.conv = conv
        self._slope = slope

    def forward(self, image: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H, W)."""
        result = self.conv(image)
        return result if self._slope is None else F.leaky_relu(result, self._slope)


# What spandrel's SPAN puts behind such a layer.
_SLOPE = 0.05


@torch.no_grad()
def fold_convs(module: nn.Module) -> nn.Module:
    """Replace layers in which several convolutions stand for one (SPAN's Conv3XC) by that one.

    In eval mode such a layer computes its one convolution from the others in every call, and
    writes it to itself. Results in fp32 are the same to the bit; in lower precision they are
    those of weights that were folded in fp32.
    """
    for name, child in module.named_children():
        one = getattr(child, "eval_conv", None)
        update = getattr(child, "update_params", None)
        if isinstance(one, nn.Conv2d) and callable(update):
            update()
            slope = _SLOPE if getattr(child, "has_relu", False) else None
            setattr(module, name, FoldedConv(one, slope))
        else:
            fold_convs(child)
    return module
