"""The published ParagonSR2 tiers, realtime, stream, photo and pro, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lowtide.models.paragonsr2.magic_kernel import MagicKernelUpsample
from lowtide.models.paragonsr2.tier_blocks import NanoBlock, PhotoBlock, ProBlock, StreamBlock

Tier = Literal["realtime", "stream", "photo", "pro"]


@dataclass(frozen=True)
class TierConfig:
    """Tier, scale and size of a `ParagonTier`.

    ``features`` channels in ``groups`` of ``blocks`` each; ``alpha`` is how much the fixed path
    sharpens. ``window`` is the side of attention windows, in pixels; without ``attention`` the
    blocks of `photo` and `pro` leave it out.
    """

    tier: Tier
    scale: int
    channels: int = 3
    features: int = 64
    groups: int = 4
    blocks: int = 4
    alpha: float = 0.4
    window: int = 16
    attention: bool = True

    @classmethod
    def of(cls, tier: Tier, scale: int) -> TierConfig:
        """Return the configuration that the tier's author trains."""
        features, groups, blocks, alpha = _SHAPES[tier]
        return cls(
            tier,
            scale,
            features=features,
            groups=groups,
            blocks=blocks,
            alpha=alpha,
            attention=tier in ("photo", "pro"),
        )


# Features, groups, blocks per group, alpha: the public repository Phhofm/ParagonSR2.
_SHAPES: dict[Tier, tuple[int, int, int, float]] = {
    "realtime": (16, 1, 3, 0.3),
    "stream": (32, 2, 3, 0.0),
    "photo": (64, 4, 4, 0.4),
    "pro": (64, 6, 6, 0.4),
}


class _Group(nn.Module):
    """Sequence of blocks, named as in the checkpoints."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ParagonTier(nn.Module):
    """Magic Kernel upsampling plus a learned detail path, in one of four tiers.

    Maps (B, C, H, W) in 0..1 to (B, C, H * scale, W * scale), unclamped. In `pro` every pixel
    depends on the whole image, by channel attention; in `photo` pixels of opposite borders depend
    on each other (`ShiftedWindowAttention`).
    """

    def __init__(self, config: TierConfig) -> None:
        super().__init__()
        self.config = config
        width, scale = config.features, config.scale
        self.base = MagicKernelUpsample(config.channels, scale, config.alpha)
        self.conv_in = nn.Conv2d(config.channels, width, 3, padding=1)
        self.body = nn.Sequential(
            *(
                _Group(
                    [
                        _block(config, group * config.blocks + place)
                        for place in range(config.blocks)
                    ]
                )
                for group in range(config.groups)
            )
        )
        self.conv_mid = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Sequential(
            nn.Conv2d(width, width * scale**2, 3, padding=1), nn.PixelShuffle(scale)
        )
        self.conv_out = nn.Conv2d(width, config.channels, 3, padding=1)
        self.detail_gain = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) in 0..1 to (B, C, H * scale, W * scale), unclamped."""
        detail = self.conv_out(self.up(self.conv_mid(self.body(self.conv_in(x)))))
        return self.base(x) + detail * self.detail_gain


def _block(config: TierConfig, index: int) -> nn.Module:
    shift = config.window // 2 * (index % 2)
    match config.tier:
        case "realtime":
            return NanoBlock(config.features)
        case "stream":
            return StreamBlock(config.features)
        case "photo":
            return PhotoBlock(config.features, config.window, shift, config.attention)
        case "pro":
            return ProBlock(config.features, config.window, shift, config.attention)
