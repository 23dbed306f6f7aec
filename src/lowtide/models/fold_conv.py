"""Folding of reparameterized convolutions (SPAN's Conv3XC) into one Conv2d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FoldedConv(nn.Module):
    """Folded convolution with an optional leaky ReLU."""

    def __init__(self, conv: nn.Conv2d, slope: float | None) -> None:
        super().__init__()
        self.conv = conv
        self._slope = slope

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H, W)."""
        result = self.conv(image)
        return result if self._slope is None else F.leaky_relu(result, self._slope)


# Negative slope of the leaky ReLU in spandrel's SPAN.
_SLOPE = 0.05


@torch.no_grad()
def fold_convs(module: nn.Module) -> nn.Module:
    """Replace reparameterized layers (SPAN's Conv3XC) by their folded convolution.

    In eval mode such a layer folds its convolutions in every call, and writes the result to itself.
    Results in fp32 are bit-identical; in lower precision they are those of weights that were folded
    in fp32. Returns ``module``, changed in place.
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
