"""A moving average of a network's weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


class MovingAverage:
    """``module`` is a twin of a network, its weights the average of those that it had.

    Buffers, of which there is nothing to average, are copied.
    """

    def __init__(self, network: nn.Module) -> None:
        self.module = copy.deepcopy(network).requires_grad_(False).eval()

    @torch.no_grad()
    def follow(self, network: nn.Module, decay: float) -> None:
        """Keep ``decay`` of the average, and take the rest from the network."""
        for mean, weight in zip(self.module.parameters(), network.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - decay)
        for mean, buffer in zip(self.module.buffers(), network.buffers(), strict=True):
            mean.copy_(buffer)
