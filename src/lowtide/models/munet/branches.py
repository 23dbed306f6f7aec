"""Feature branches of MUNet: edges, windowed spectra and patches, at image size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

# Rec. 601, of RGB.
_LUMA = (0.299, 0.587, 0.114)
# Window and hop of the short-time Fourier transform, in pixels.
_SPECTRUM, _HOP = 16, 8
# Added to squared magnitudes, so that the logarithm's gradients are at most 1/2 over its root.
_LOG_EPS = 1e-4


def luma(image: Tensor) -> Tensor:
    """Compute Rec. 601 luma in fp32: (B, 3, H, W) to (B, 1, H, W), differentiable."""
    weights = image.new_tensor(_LUMA, dtype=torch.float32).view(1, 3, 1, 1)
    return (image.float() * weights).sum(1, keepdim=True)


def conv(in_channels: int, out_channels: int, kernel: int, *, bias: bool = False) -> nn.Module:
    """Build a "same" convolution with spectral norm 1 (arXiv 1802.05957)."""
    made_of = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(made_of.weight, a=0.2)
    return spectral_norm(made_of)


def convs(in_channels: int, out_channels: int, slope: float) -> nn.Sequential:
    """Build two 3×3 convolutions with spectral norm, each followed by a leaky ReLU."""
    between = max(out_channels // 2, 1) if in_channels < out_channels else out_channels
    return nn.Sequential(
        conv(in_channels, between, 3),
        nn.LeakyReLU(slope),
        conv(between, out_channels, 3),
        nn.LeakyReLU(slope),
    )


class EdgeBranch(nn.Module):
    """Luma differences to the right and lower neighbor pixel, then convolutions.

    The last column and row have a difference of 0.
    """

    def __init__(self, features: int, slope: float) -> None:
        super().__init__()
        self.refine = convs(2, features, slope)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, features, H, W)."""
        gray = luma(image)
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
            conv(_SPECTRUM * (_SPECTRUM // 2 + 1), features, 1), nn.LeakyReLU(slope)
        )
        self.refine = convs(features, features, slope)

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, 3, H, W), sides multiples of 8, to (B, features, H, W)."""
        height, width = image.shape[2:]
        around = (_SPECTRUM - _HOP) // 2
        gray = F.pad(luma(image), (around,) * 4, mode="replicate")
        windows = gray[:, 0].unfold(1, _SPECTRUM, _HOP).unfold(2, _SPECTRUM, _HOP)
        spectrum = torch.fft.rfft2(windows * self.fade, norm="ortho")
        strength = torch.log(spectrum.real.square() + spectrum.imag.square() + _LOG_EPS) / 2
        found = self.read(strength.flatten(3).permute(0, 3, 1, 2).to(image.dtype))
        return self.refine(F.interpolate(found, (height, width), mode="nearest"))


class PatchBranch(nn.Module):
    """Features of the bottleneck, upsampled (nearest) to the image's size."""

    def __init__(self, channels: int, features: int, slope: float) -> None:
        super().__init__()
        self.read = nn.Sequential(conv(channels, features, 1), nn.LeakyReLU(slope))
        self.refine = convs(features, features, slope)

    def forward(self, smallest: Tensor, size: tuple[int, int]) -> Tensor:
        """Map (B, C, h, w) to (B, features, H, W), ``size`` being (H, W)."""
        return self.refine(F.interpolate(self.read(smallest), size, mode="nearest"))


class BranchFusion(nn.Module):
    """Weighted mean of the branches, with softmax weights per pixel."""

    def __init__(self, branches: int, features: int, slope: float) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            conv(branches * features, features, 1, bias=True),
            nn.LeakyReLU(slope),
            conv(features, branches, 1, bias=True),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        """Map a list of (B, features, H, W) to one such map."""
        weights = self.weigh(torch.cat(features, 1)).softmax(1).unsqueeze(2)
        return (torch.stack(features, 1) * weights).sum(1)
