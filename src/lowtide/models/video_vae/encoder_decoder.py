"""Encoder and decoder of a VideoVAE, slice by slice of a clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.video_vae.causal_conv import CausalConv3d, FrameCache
from lowtide.models.video_vae.frame_blocks import (
    DownBlock,
    FrameDownsample,
    FrameGroupNorm,
    FrameUpsample,
    MidBlock,
    UpBlock,
)
from lowtide.models.video_vae.video_vae_config import VideoVAEConfig

_COLORS = 3


class _Part(nn.Module):
    """A part that maps slices of a clip, each by the state that the one before left."""

    def run_slice(
        self, given: Tensor, state: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the result of a slice and the state after it; ``state`` is None at first."""
        cache = FrameCache(state)
        return self(given, cache), cache.after


class Encoder(_Part):
    """Frames to the mean and log variance of latents.

    The first slice of a clip is 4n + 1 frames, a later one is 4n.
    """

    def __init__(self, config: VideoVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels, config.norm_num_groups
        last = len(widths) - 1
        self.conv_in = CausalConv3d(_COLORS, widths[0], 3)
        self.down_blocks = nn.ModuleList(
            DownBlock(
                widths[max(0, level - 1)],
                width,
                config.layers_per_block,
                groups,
                FrameDownsample(width, halves_time=level > 0) if level < last else None,
            )
            for level, width in enumerate(widths)
        )
        self.mid_block = MidBlock(widths[-1], groups)
        self.conv_norm_out = FrameGroupNorm(groups, widths[-1])
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels, 3)

    def forward(self, frames: Tensor, cache: FrameCache) -> Tensor:
        """Return (B, 2 C, n, H / 8, W / 8) of frames (B, 3, T, H, W) in -1..1."""
        hidden = self.conv_in(frames, cache)
        for block in self.down_blocks:
            hidden = block(hidden, cache)
        hidden = self.mid_block(hidden, cache)
        return self.conv_out(F.silu(self.conv_norm_out(hidden)), cache)


class Decoder(_Part):
    """Latents to frames: 4n - 3 of the n latents of a clip's first slice, 4n of a later one."""

    def __init__(self, config: VideoVAEConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels[::-1], config.norm_num_groups
        last = len(widths) - 1
        self.conv_in = CausalConv3d(config.latent_channels, widths[0], 3)
        self.mid_block = MidBlock(widths[0], groups)
        self.up_blocks = nn.ModuleList(
            UpBlock(
                widths[max(0, level - 1)],
                width,
                config.layers_per_block + 1,
                groups,
                FrameUpsample(width, doubles_time=level < last - 1) if level < last else None,
            )
            for level, width in enumerate(widths)
        )
        self.conv_norm_out = FrameGroupNorm(groups, widths[-1])
        self.conv_out = CausalConv3d(widths[-1], _COLORS, 3)

    def forward(self, latents: Tensor, cache: FrameCache) -> Tensor:
        """Return frames (B, 3, T, 8 h, 8 w), about -1..1, of latents (B, C, n, h, w)."""
        hidden = self.mid_block(self.conv_in(latents, cache), cache)
        for block in self.up_blocks:
            hidden = block(hidden, cache)
        return self.conv_out(F.silu(self.conv_norm_out(hidden)), cache)
