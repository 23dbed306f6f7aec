"""Linear layers over many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.attention.products import linear_in_any_order
from lowtide.models.fast.part import FastPart


class FastLinear(FastPart):
    """``torch.nn.Linear``, with the same numbers but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., channels) to (..., other channels)."""
        if torch.compiler.is_compiling():
            return self.plain(x)
        return linear_in_any_order(x, self.plain.weight, self.plain.bias)
