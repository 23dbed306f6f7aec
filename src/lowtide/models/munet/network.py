"""MUNet, a U-Net discriminator with logits per pixel."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lowtide.attention.spatial import LocalWindowAttention
from lowtide.core.errors import UsageError
from lowtide.models.munet.branches import (
    BranchFusion,
    EdgeBranch,
    PatchBranch,
    SpectrumBranch,
    conv,
)
from lowtide.models.munet.munet_config import MUNetConfig
from lowtide.models.paragonsr2.magic_kernel import MagicKernelUpsample

BRANCHES = "spatial", "edges", "spectra", "patches"
# Initial scale of the attention branch.
_INITIAL_SCALE = 0.1


class Downsample(nn.Sequential):
    """Spectrally normed 4×4 convolution with stride 2, which halves the size."""

    def __init__(self, in_channels: int, out_channels: int, slope: float) -> None:
        halve = nn.Conv2d(in_channels, out_channels, 4, 2, 1, bias=False)
        super().__init__(spectral_norm(halve), nn.LeakyReLU(slope))


class MagicUpsample(nn.Module):
    """Upsampling by 2 with the Magic Kernel, concatenated with a skip connection."""

    def __init__(
        self, in_channels: int, skip_channels: int, out_channels: int, slope: float
    ) -> None:
        super().__init__()
        self.enlarge = MagicKernelUpsample(in_channels, 2, 0.0)
        self.soften = nn.Sequential(conv(in_channels, out_channels, 3), nn.LeakyReLU(slope))
        self.merge = nn.Sequential(
            conv(out_channels + skip_channels, out_channels, 3), nn.LeakyReLU(slope)
        )

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map (B, C, h, w) and the skip (B, skip channels, 2h, 2w) to (B, C', 2h, 2w)."""
        return self.merge(torch.cat([self.soften(self.enlarge(x)), skip], 1))


class Bottleneck(nn.Module):
    """Two convolutions at the smallest size and a residual window attention."""

    def __init__(self, channels: int, config: MUNetConfig) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            conv(channels, channels, 3),
            nn.LeakyReLU(config.slope),
            conv(channels, channels, 3),
            nn.LeakyReLU(config.slope),
        )
        self.attention = None
        if config.attention:
            attention = LocalWindowAttention(channels, window=config.window, shared=config.shared)
            for layer in (attention.qkv, attention.out):
                spectral_norm(layer)
            self.attention = attention
            self.share = nn.Parameter(torch.full((1, channels, 1, 1), _INITIAL_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = self.convs(x)
        return x if self.attention is None else x + self.share * self.attention(x)


class MUNet(nn.Module):
    """U-Net discriminator with four feature branches and logits per pixel.

    Maps (B, 3, H, W) in 0..1, of any size, to logits (B, 1, H, W), higher for what looks real. All
    learned layers have spectral norm 1. Gradients reach the image through every branch. Inside,
    sides are padded by replication to multiples of ``config.multiple_of``.
    """

    def __init__(self, config: MUNetConfig) -> None:
        super().__init__()
        self.config = config
        features, slope = config.features, config.slope
        sizes = [features, *(features * width for width in config.widths)]
        self.conv_in = nn.Sequential(conv(3, features, 3, bias=True), nn.LeakyReLU(slope))
        self.down = nn.ModuleList(Downsample(given, made, slope) for given, made in pairwise(sizes))
        self.middle = Bottleneck(sizes[-1], config)
        self.up = nn.ModuleList(
            MagicUpsample(given, beside, beside, slope)
            for given, beside in zip(sizes[:0:-1], sizes[-2::-1], strict=True)
        )
        self.edges, self.spectra = EdgeBranch(features, slope), SpectrumBranch(features, slope)
        self.patches = PatchBranch(sizes[-1], features, slope)
        self.fusion = BranchFusion(len(BRANCHES), features, slope)
        # Without a bias: relativistic losses, which compare images, give it no gradient.
        self.conv_out = conv(features, 1, 3)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, 3, H, W) in 0..1 to logits (B, 1, H, W)."""
        return self.fuse(self.branches(image), image)

    def branches(self, image: Tensor) -> dict[str, Tensor]:
        """Map (B, 3, H, W) to features (B, features, H', W') of all `BRANCHES`.

        H' and W' are the padded sides.
        """
        if image.dim() != 4 or image.shape[1] != 3:
            raise UsageError(f"MUNet takes (B, 3, H, W), not {tuple(image.shape)}")
        step = self.config.multiple_of
        pad = 0, -image.shape[3] % step, 0, -image.shape[2] % step
        # contiguous(): the compiled backward of the padding assumes contiguous gradients.
        filled = F.pad(image.contiguous(), pad, mode="replicate") if any(pad) else image
        x = self.conv_in(filled)
        passed = [x]
        for down in self.down:
            x = down(x)
            passed.append(x)
        smallest = x = self.middle(passed.pop())
        for up in self.up:
            x = up(x, passed.pop())
        size = filled.shape[2], filled.shape[3]
        found = x, self.edges(filled), self.spectra(filled), self.patches(smallest, size)
        return dict(zip(BRANCHES, found, strict=True))

    def fuse(self, features: dict[str, Tensor], image: Tensor) -> Tensor:
        """Fuse the features of `branches` to logits (B, 1, H, W), as large as ``image``."""
        logits = self.conv_out(self.fusion([features[name] for name in BRANCHES]))
        return logits[:, :, : image.shape[2], : image.shape[3]]
