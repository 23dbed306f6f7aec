"""What MUNet looks at: edges, spectra, and patches, as maps of the picture's size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

# Rec. 601, of RGB.
_LUMA = (0.299, 0.587, 0.114)
# Windows of the short-time Fourier transform, and how far apart they are.
_SPECTRUM, _HOP = 16, 8
# Below it a magnitude counts as none; its logarithm has gradients of at most 1/2 over its root.
_FLOOR = 1e-4


def luma(image: Tensor) -> Tensor:
    """(B, 3, H, W) to (B, 1, H, W), in fp32; gradients pass."""
    weights = image.new_tensor(_LUMA, dtype=torch.float32).view(1, 3, 1, 1)
    return (image.float() * weights).sum(1, keepdim=True)


def conv(given: int, made: int, kernel: int, *, bias: bool = False) -> nn.Module:
    """A convolution of spectral norm 1 (arXiv 1802.05957) that keeps the size."""
    made_of = nn.Conv2d(given, made, kernel, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(made_of.weight, a=0.2)
    return spectral_norm(made_of)


def convs(given: int, made: int, slope: float) -> nn.Sequential:
    """Two 3×3 convolutions, each with a leaky ReLU."""
    between = max(made // 2, 1) if given < made else made
    return nn.Sequential(
        conv(given, between, 3), nn.LeakyReLU(slope), conv(between, made, 3), nn.LeakyReLU(slope)
    )


class EdgeBranch(nn.Module):
    """Differences of neighboring pixels' luma, to the right and down; 0 at the last of them."""

    def __init__(self, features: int, slope: float) -> None:
        super().__init__()
        self.refine = convs(2, features, slope)

    def forward(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, features, H, W)."""
        gray = luma(image)
        right = F.pad(gray[..., 1:] - gray[..., :-1], (0, 1))
        down = F.pad(gray[..., 1:, :] - gray[..., :-1, :], (0, 0, 0, 1))
        return self.refine(torch.cat([right, down], 1).to(image.dtype))


class SpectrumBranch(nn.Module):
    """Log-magnitudes of the luma's Fourier transform in windows of 16×16 pixels, 8 apart.

    A spectrum of the whole picture says nothing of where; of windows each pixel has that of its
    own neighborhood. The transform is in fp32, and gradients pass through it.
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
        """(B, 3, H, W), sides multiples of 8, to (B, features, H, W)."""
        height, width = image.shape[2:]
        around = (_SPECTRUM - _HOP) // 2
        gray = F.pad(luma(image), (around,) * 4, mode="replicate")
        windows = gray[:, 0].unfold(1, _SPECTRUM, _HOP).unfold(2, _SPECTRUM, _HOP)
        spectrum = torch.fft.rfft2(windows * self.fade, norm="ortho")
        strength = torch.log(spectrum.real.square() + spectrum.imag.square() + _FLOOR) / 2
        found = self.read(strength.flatten(3).permute(0, 3, 1, 2).to(image.dtype))
        return self.refine(F.interpolate(found, (height, width), mode="nearest"))


class PatchBranch(nn.Module):
    """What the smallest map says of each patch of the picture, laid over it."""

    def __init__(self, channels: int, features: int, slope: float) -> None:
        super().__init__()
        self.read = nn.Sequential(conv(channels, features, 1), nn.LeakyReLU(slope))
        self.refine = convs(features, features, slope)

    def forward(self, smallest: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, channels, h, w) to (B, features, *size)."""
        return self.refine(F.interpolate(self.read(smallest), size, mode="nearest"))


class BranchFusion(nn.Module):
    """A mean of the branches, with weights for each pixel that sum to 1."""

    def __init__(self, branches: int, features: int, slope: float) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            conv(branches * features, features, 1, bias=True),
            nn.LeakyReLU(slope),
            conv(features, branches, 1, bias=True),
        )

    def forward(self, found: list[Tensor]) -> Tensor:
        """Maps (B, features, H, W) to one of them."""
        weights = self.weigh(torch.cat(found, 1)).softmax(1).unsqueeze(2)
        return (torch.stack(found, 1) * weights).sum(1)
