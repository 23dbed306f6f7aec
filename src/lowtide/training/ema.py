"""Exponential moving average (EMA) of a network's weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


class MovingAverage:
    """Exponential moving average of a network's parameters, kept as a module.

    ``module`` is a frozen deep copy in eval mode. Parameters are averaged, buffers are copied.
    """

    def __init__(self, network: nn.Module) -> None:
        self.module = copy.deepcopy(network).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, network: nn.Module, decay: float) -> None:
        """Update the average in place: ``decay * average + (1 - decay) * network``."""
        for mean, weight in zip(self.module.parameters(), network.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - decay)
        for mean, buffer in zip(self.module.buffers(), network.buffers(), strict=True):
            mean.copy_(buffer)
