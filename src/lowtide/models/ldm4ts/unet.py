"""U-Net of LDM4TS, which predicts the velocity of a noisy latent."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.models.ldm4ts.blocks import AttentionChoice, LatentBlock, group_norm

_WIDTHS = 1, 2, 2  # of the levels, in widths of the first
_LONGEST_WAVE = 10_000.0


class LatentUNet(nn.Module):
    """Velocity of a noisy latent, given features of the look-back.

    Three levels, each half as large as the one above, the lower two twice as wide; attention only
    where a level has few pixels. The output begins at zero.

    Args:
        latent_shape: Channels, height and width of the latent.
        width: Channels at latent resolution.
        map_channels: Channels of the feature map, M; it is concatenated to the latent.
        vector: Size of the feature vector, V.
        diffusion_steps: Number of times.
        choice: Attention backend.
        checkpointing: Recompute each block in the backward pass.
    """

    def __init__(
        self,
        latent_shape: tuple[int, int, int],
        width: int,
        map_channels: int,
        vector: int,
        diffusion_steps: int,
        choice: AttentionChoice,
        *,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        channels, height, spread = latent_shape
        self._steps, self._checkpointing = diffusion_steps, checkpointing
        widths = [width * factor for factor in _WIDTHS]
        levels = range(len(widths))
        sizes = [(-(-height >> level), -(-spread >> level)) for level in levels]

        def block(in_channels: int, level: int) -> LatentBlock:
            return LatentBlock(in_channels, widths[level], vector, sizes[level], choice)

        self.time = nn.Sequential(
            nn.Linear(vector, vector), nn.SiLU(), nn.Linear(vector, vector), nn.SiLU()
        )
        self.conv_in = nn.Conv2d(channels + map_channels, width, 3, padding=1)
        self.down = nn.ModuleList(block(widths[level], level) for level in levels)
        self.shrink = nn.ModuleList(
            nn.Conv2d(given, made, 3, stride=2, padding=1) for given, made in pairwise(widths)
        )
        self.up = nn.ModuleList(block(2 * widths[level], level) for level in levels[:-1])
        self.grow = nn.ModuleList(nn.Conv2d(made, given, 1) for given, made in pairwise(widths))
        self.norm_out = group_norm(width)
        self.conv_out = nn.Conv2d(width, channels, 3, padding=1)
        for one in self.conv_out.parameters():
            nn.init.zeros_(one)

    def forward(self, noisy: Tensor, time: Tensor, image: Tensor, vector: Tensor) -> Tensor:
        """Return velocities (B, C, h, w).

        Args:
            noisy: Noisy latents (B, C, h, w).
            time: Their times (B,), integers from 0 to ``diffusion_steps`` - 1.
            image: Feature map (B, M, h, w).
            vector: Feature vector (B, V).
        """
        vector = self.time(self._waves(time, vector)) + vector
        x = self.conv_in(torch.cat([noisy, image], dim=1))
        passed = []
        for level, block in enumerate(self.down):
            x = self._run(block, self.shrink[level - 1](x) if level else x, vector)
            passed.append(x)
        passed.pop()
        for grow, block in zip(reversed(self.grow), reversed(self.up), strict=True):
            skip = passed.pop()
            x = F.interpolate(grow(x), size=skip.shape[2:], mode="nearest")
            x = self._run(block, torch.cat([x, skip], dim=1), vector)
        return self.conv_out(F.silu(self.norm_out(x)))

    def _run(self, block: Callable[..., Tensor], x: Tensor, vector: Tensor) -> Tensor:
        if self._checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, x, vector, use_reentrant=False)
        return block(x, vector)

    def _waves(self, time: Tensor, vector: Tensor) -> Tensor:
        """Return sines and cosines (B, V) of times, whatever their number."""
        half = vector.shape[1] // 2
        rates = torch.arange(half, device=time.device) * (-math.log(_LONGEST_WAVE) / half)
        place = (time + 1) * (1000.0 / self._steps)
        angle = place[:, None] * rates.exp()
        return torch.cat([angle.sin(), angle.cos()], dim=1).to(vector.dtype)
