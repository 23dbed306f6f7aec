"""The ParagonSR2 variants from nano to xl, with a content-dependent detail gain."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.paragonsr2.magic_kernel import MagicKernelUpsample
from lowtide.models.paragonsr2.variant_blocks import SLOPE, ContentGain, ResidualGroup
from lowtide.models.paragonsr2.variant_config import VariantConfig


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
