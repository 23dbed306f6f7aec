"""MUNet, the U-Net discriminator for GAN training of ParagonSR2, with logits per pixel.

Its feature branches are edges, windowed spectra and patches, at image size. After Philip Hofmann's
MUNet (traiNNer-redux in delafer's fork, commit 069b6d59, MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lowtide.attention.spatial import LocalWindowAttention
from lowtide.core.errors import ModelError, UsageError
from lowtide.models.paragonsr2.tier_blocks import MagicKernelUpsample

BRANCHES = "spatial", "edges", "spectra", "patches"
# Initial scale of the attention branch.
_INITIAL_SCALE = 0.1

# Rec. 601, of RGB.
_LUMA = (0.299, 0.587, 0.114)
# Window and hop of the short-time Fourier transform, in pixels.
_SPECTRUM, _HOP = 16, 8
# Added to squared magnitudes, so that the logarithm's gradients are at most 1/2 over its root.
_LOG_EPS = 1e-4


@dataclass(frozen=True)
class MUNetConfig:
    """Channels, depth and attention of a `lowtide.models.paragonsr2.munet.MUNet`.

    ``features`` is the number of channels at full size, ``widths`` the multiples of it after each
    halving. ``slope`` is that of the leaky ReLUs, ``window`` and ``shared`` are pixels of the
    attention at the smallest size. Raises ModelError for values that make no network.
    """

    features: int = 64
    widths: tuple[int, ...] = (1, 2, 4, 8)
    slope: float = 0.2
    attention: bool = True
    window: int = 32
    shared: int = 8

    def __post_init__(self) -> None:
        if type(self.features) is not int or self.features < 8:
            raise ModelError(
                f"MUNet's features must be an integer of at least 8, not {self.features}"
            )
        whole = all(type(width) is int and width >= 1 for width in self.widths)
        if not self.widths or not whole:
            raise ModelError(f"MUNet's widths must be integers of at least 1, not {self.widths}")
        if not 0 <= self.slope < 1:
            raise ModelError(f"MUNet's slope must be at least 0 and below 1, not {self.slope}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MUNetConfig:
        """Build from plain values; raises ModelError with the names of unknown entries."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise ModelError(
                f"MUNet's configuration has unknown entries: {', '.join(sorted(unknown))}"
            )
        given = dict(values)
        if "widths" in given:
            given["widths"] = tuple(given["widths"])
        return cls(**given)

    @property
    def multiple_of(self) -> int:
        """Multiple that sides are padded to inside, so that the halvings divide them."""
        return 2 ** len(self.widths)


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
        self.soften = nn.Sequential(
            spectral_norm_conv(in_channels, out_channels, 3), nn.LeakyReLU(slope)
        )
        self.merge = nn.Sequential(
            spectral_norm_conv(out_channels + skip_channels, out_channels, 3), nn.LeakyReLU(slope)
        )

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map (B, C, h, w) and the skip (B, skip channels, 2h, 2w) to (B, C', 2h, 2w)."""
        return self.merge(torch.cat([self.soften(self.enlarge(x)), skip], 1))


class MUNetBottleneck(nn.Module):
    """Two convolutions at the smallest size and a residual window attention."""

    def __init__(self, channels: int, config: MUNetConfig) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            spectral_norm_conv(channels, channels, 3),
            nn.LeakyReLU(config.slope),
            spectral_norm_conv(channels, channels, 3),
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
        self.conv_in = nn.Sequential(
            spectral_norm_conv(3, features, 3, bias=True), nn.LeakyReLU(slope)
        )
        self.down = nn.ModuleList(Downsample(given, made, slope) for given, made in pairwise(sizes))
        self.middle = MUNetBottleneck(sizes[-1], config)
        self.up = nn.ModuleList(
            MagicUpsample(given, beside, beside, slope)
            for given, beside in zip(sizes[:0:-1], sizes[-2::-1], strict=True)
        )
        self.edges, self.spectra = EdgeBranch(features, slope), SpectrumBranch(features, slope)
        self.patches = PatchBranch(sizes[-1], features, slope)
        self.fusion = BranchFusion(len(BRANCHES), features, slope)
        # Without a bias: relativistic losses, which compare images, give it no gradient.
        self.conv_out = spectral_norm_conv(features, 1, 3)

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


def rec601_luma(image: Tensor) -> Tensor:
    """Compute Rec. 601 luma in fp32: (B, 3, H, W) to (B, 1, H, W), differentiable."""
    weights = image.new_tensor(_LUMA, dtype=torch.float32).view(1, 3, 1, 1)
    return (image.float() * weights).sum(1, keepdim=True)


def spectral_norm_conv(
    in_channels: int, out_channels: int, kernel: int, *, bias: bool = False
) -> nn.Module:
    """Build a "same" convolution with spectral norm 1 (arXiv 1802.05957)."""
    made_of = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(made_of.weight, a=0.2)
    return spectral_norm(made_of)


def spectral_norm_conv_pair(in_channels: int, out_channels: int, slope: float) -> nn.Sequential:
    """Build two 3×3 convolutions with spectral norm, each followed by a leaky ReLU."""
    between = max(out_channels // 2, 1) if in_channels < out_channels else out_channels
    return nn.Sequential(
        spectral_norm_conv(in_channels, between, 3),
        nn.LeakyReLU(slope),
        spectral_norm_conv(between, out_channels, 3),
        nn.LeakyReLU(slope),
    )


class EdgeBranch(nn.Module):
    """Luma differences to the right and lower neighbor pixel, then convolutions.

    The last column and row have a difference of 0.
    """

    def __init__(self, features: int, slope: float) -> None:
        super().__init__()
        self.refine = spectral_norm_conv_pair(2, features, slope)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, features, H, W)."""
        gray = rec601_luma(image)
        right = F.pad(gray[..., 1:] - gray[..., :-1], (0, 1))
        down = F.pad(gray[..., 1:, :] - gray[..., :-1, :], (0, 0, 0, 1))
        return self.refine(torch.cat([right, down], 1).to(image.dtype))


class SpectrumBranch(nn.Module):
    """Log-magnitudes of a short-time Fourier transform of the luma.

    Windows are 16×16 pixels with a hop of 8. A spectrum of the whole image is not local; with
    windows each pixel has that of its own neighborhood. The transform is in fp32 and
    differentiable.
    """

    def __init__(self, features: int, slope: float) -> None:
        super().__init__()
        fade = torch.hann_window(_SPECTRUM, periodic=False)
        self.fade: Tensor
        self.register_buffer("fade", torch.outer(fade, fade), persistent=False)
        self.read = nn.Sequential(
            spectral_norm_conv(_SPECTRUM * (_SPECTRUM // 2 + 1), features, 1), nn.LeakyReLU(slope)
        )
        self.refine = spectral_norm_conv_pair(features, features, slope)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, 3, H, W), sides multiples of 8, to (B, features, H, W)."""
        height, width = image.shape[2:]
        around = (_SPECTRUM - _HOP) // 2
        gray = F.pad(rec601_luma(image), (around,) * 4, mode="replicate")
        windows = gray[:, 0].unfold(1, _SPECTRUM, _HOP).unfold(2, _SPECTRUM, _HOP)
        spectrum = torch.fft.rfft2(windows * self.fade, norm="ortho")
        strength = torch.log(spectrum.real.square() + spectrum.imag.square() + _LOG_EPS) / 2
        found = self.read(strength.flatten(3).permute(0, 3, 1, 2).to(image.dtype))
        return self.refine(F.interpolate(found, (height, width), mode="nearest"))


class PatchBranch(nn.Module):
    """Features of the bottleneck, upsampled (nearest) to the image's size."""

    def __init__(self, channels: int, features: int, slope: float) -> None:
        super().__init__()
        self.read = nn.Sequential(spectral_norm_conv(channels, features, 1), nn.LeakyReLU(slope))
        self.refine = spectral_norm_conv_pair(features, features, slope)

    def forward(self, smallest: Tensor, size: tuple[int, int]) -> Tensor:
        """Map (B, C, h, w) to (B, features, H, W), ``size`` being (H, W)."""
        return self.refine(F.interpolate(self.read(smallest), size, mode="nearest"))


class BranchFusion(nn.Module):
    """Weighted mean of the branches, with softmax weights per pixel."""

    def __init__(self, branches: int, features: int, slope: float) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            spectral_norm_conv(branches * features, features, 1, bias=True),
            nn.LeakyReLU(slope),
            spectral_norm_conv(features, branches, 1, bias=True),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        """Map a list of (B, features, H, W) to one such map."""
        weights = self.weigh(torch.cat(features, 1)).softmax(1).unsqueeze(2)
        return (torch.stack(features, 1) * weights).sum(1)
