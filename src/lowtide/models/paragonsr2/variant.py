"""The ParagonSR2 variants from nano to xl, with a content-dependent detail gain, and their blocks.

Blocks map (B, C, H, W) to (B, C, H, W). After traiNNer-redux in delafer's fork, commit 069b6d59
(MIT); attention is Lowtide's own.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.attention.spatial import ChannelAttention, HierarchicalAttention, LocalWindowAttention
from lowtide.models.paragonsr2.config import VariantConfig
from lowtide.models.paragonsr2.tier_blocks import LayerScale, MagicKernelUpsample, PixelRMSNorm

SLOPE = 0.1
_BRANCH, _REDUCTION = 8, 4
# Channels of a head, and the divisor of a block's channels that attend.
_HEAD, _ATTENTION_DIVISOR = 16, 4
# Detail gains, from the busiest to the plainest image.
_LEAST_GAIN, _MOST_GAIN = 0.05, 0.2


class ParagonVariant(nn.Module):
    """Magic Kernel upsampling plus learned detail, weighted by a `ContentGain`.

    Maps (B, 3, H, W) in 0..1 to (B, 3, H * scale, W * scale), unclamped; at scale 1 the fixed path
    is the identity. Everything but the last convolution runs at the input size. The content gain,
    and channel attention where the variant has it, depend on the whole image, so that tiles differ
    from it; `lowtide.stream` does not.
    """

    CHANNELS = 3

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        self.config = config
        width, scale = config.features, config.scale
        self.base = (
            MagicKernelUpsample(self.CHANNELS, scale, config.alpha) if scale > 1 else nn.Identity()
        )
        self.gain = ContentGain(self.CHANNELS, width)
        self.conv_in = nn.Conv2d(self.CHANNELS, width, 3, padding=1)
        self.body = nn.Sequential(*(ResidualGroup(config) for _ in range(config.groups)))
        self.conv_fuse = nn.Conv2d(width, width, 3, padding=1)
        self.conv_up = nn.Conv2d(width, width * scale**2, 3, padding=1)
        self.conv_out = nn.Conv2d(width, self.CHANNELS, 3, padding=1)
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, a=SLOPE)
                nn.init.zeros_(cast(Tensor, module.bias))
        places = self.config.scale**2
        with torch.no_grad():
            # All phases of a pixel shuffle start equal, without a checkerboard to unlearn
            # (ICNR, arXiv 1707.02937).
            weight = self.conv_up.weight
            weight.copy_(weight[::places].repeat_interleave(places, 0))
            self.conv_out.weight.mul_(self.config.gain)

    def detail(self, x: Tensor) -> Tensor:
        """Compute the learned path before its gain, (B, 3, H * scale, W * scale)."""
        x = self.conv_in(x)
        x = self.body(x)
        x = x + self.conv_fuse(x)
        return self.conv_out(F.pixel_shuffle(self.conv_up(x), self.config.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) in 0..1 to (B, 3, H * scale, W * scale), unclamped."""
        return self.base(x) + self.detail(x) * self.gain(x)


def initial_residual_scale(depth: int) -> float:
    """Return the initial scale of a residual branch by the network's depth.

    From CaiT (arXiv 2103.17239, table of LayerScale).
    """
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


class InceptionDepthwise(nn.Module):
    """Inception depthwise convolution (InceptionNeXt, arXiv 2303.16900).

    A 3×3, a 1×band and a band×1 kernel, on an eighth of the channels each; the rest passes.
    """

    def __init__(self, channels: int, band: int) -> None:
        super().__init__()
        few = max(1, channels // _BRANCH)
        self.parts = channels - 3 * few, few, few, few
        self.square = nn.Conv2d(few, few, 3, padding=1, groups=few)
        self.across = nn.Conv2d(few, few, (1, band), padding=(0, band // 2), groups=few)
        self.down = nn.Conv2d(few, few, (band, 1), padding=(band // 2, 0), groups=few)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        rest, square, across, down = x.split(self.parts, 1)
        return torch.cat([rest, self.square(square), self.across(across), self.down(down)], 1)


class ResidualAttention(nn.Module):
    """Residual attention branch with fewer channels than the block has."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        hidden = config.hidden
        width = -(-hidden // _ATTENTION_DIVISOR // _HEAD) * _HEAD
        kind = HierarchicalAttention if config.attention == "hierarchical" else LocalWindowAttention
        self.norm = PixelRMSNorm(hidden)
        self.narrow, self.widen = nn.Conv2d(hidden, width, 1), nn.Conv2d(width, hidden, 1)
        self.attention = kind(
            width,
            heads=width // _HEAD,
            window=config.window,
            shared=config.shared,
            form=config.form,
        )
        self.share = LayerScale(hidden, initial_residual_scale(config.depth))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return x + self.share(self.widen(self.attention(self.narrow(self.norm(x)))))


class ConvTransformer(nn.Module):
    """Inverted bottleneck with a depthwise 3×3 convolution and attention inside."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        features, hidden = config.features, config.hidden
        self.project_in = nn.Conv2d(features, hidden, 1)
        self.mix = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.blend = nn.Conv2d(hidden, hidden, 1)
        self.attend = ResidualAttention(config) if config.attention != "none" else nn.Identity()
        self.modulate = (
            ChannelAttention(hidden, reduction=_REDUCTION) if config.modulation else nn.Identity()
        )
        self.project_out = nn.Conv2d(hidden, features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        mixed = self.blend(F.leaky_relu(self.mix(self.project_in(x)), SLOPE))
        return self.project_out(self.modulate(self.attend(mixed)))


class VariantBlock(nn.Module):
    """Inception depthwise and transformer branches, each residual, then a norm if any."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        features, first = config.features, initial_residual_scale(config.depth)
        self.context = InceptionDepthwise(features, config.band)
        self.context_share = LayerScale(features, first)
        self.transformer = ConvTransformer(config)
        self.transformer_share = LayerScale(features, first)
        self.norm = PixelRMSNorm(features) if config.norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = x + self.context_share(self.context(x))
        return self.norm(x + self.transformer_share(self.transformer(x)))


class ResidualGroup(nn.Module):
    """Residual group: a sequence of blocks with a skip connection."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(VariantBlock(config) for _ in range(config.blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return x + self.blocks(x)


class ContentGain(nn.Module):
    """Gain of the detail path from global image content, larger for plain images.

    Maps (B, C, H, W) in 0..1 to (B, 1, 1, 1) from 0.05 to 0.2.
    """

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        quarter, half = features // 4, features // 2
        self.near = nn.Conv2d(channels, quarter, 3, padding=1)
        self.wider = nn.Conv2d(quarter, half, 5, padding=2)
        self.widest = nn.Conv2d(half, half, 7, padding=3)
        self.judge = nn.Conv2d(half, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return the gain of each image of (B, C, H, W): (B, 1, 1, 1), from 0.05 to 0.2."""
        x = image
        for conv in (self.near, self.wider, self.widest):
            x = F.leaky_relu(conv(x), SLOPE)
        busy = torch.sigmoid(self.judge(F.adaptive_avg_pool2d(x, 1)))
        return _LEAST_GAIN + (_MOST_GAIN - _LEAST_GAIN) * (1 - busy)
