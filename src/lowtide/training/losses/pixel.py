"""Pixel losses (L1, MSE, Charbonnier, FFT) and input checks shared by all losses.

Below, d is prediction minus target, and the mean is over all images, channels and pixels. The FFT
loss is the L1 distance of the images' Fourier transforms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError


class L1Loss(nn.Module):
    """L1 loss: mean(|d|), in the images' own unit."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two (B, 3, H, W) of any range; raises as `common_dtype`."""
        prediction, target = common_dtype(prediction, target)
        return (prediction - target).abs().mean()


class MSELoss(nn.Module):
    """Mean squared error: mean(d**2), in the images' own unit squared."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two (B, 3, H, W) of any range; raises as `common_dtype`."""
        prediction, target = common_dtype(prediction, target)
        return (prediction - target).square().mean()


class CharbonnierLoss(nn.Module):
    """Charbonnier loss: mean(sqrt(d**2 + eps**2)), an L1 that is smooth below ``eps``.

    Charbonnier et al., 1994; in super-resolution since LapSRN, arXiv 1704.03915. ``eps`` is in the
    images' own unit; UsageError unless it is above 0. The loss of equal images is ``eps``: nothing
    is subtracted.
    """

    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = require_positive("the Charbonnier loss's eps", eps)

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two (B, 3, H, W) of any range; raises as `common_dtype`."""
        prediction, target = common_dtype(prediction, target)
        return ((prediction - target).square() + self.eps**2).sqrt().mean()


def common_dtype(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both images to fp32, or to fp64 if one of them has it; gradients pass.

    Raises UsageError unless both are floats of the same shape (B, 3, H, W) and not empty.
    """
    shapes = f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)}"
    # Broadcasting would silently compare mismatched images.
    if prediction.shape != target.shape:
        raise UsageError(
            f"a loss compares images of the same shape, not {shapes}",
            hint="check that the model's scale matches that of the image pairs",
        )
    if prediction.ndim != 4 or prediction.shape[1] != 3:
        raise UsageError(f"a loss takes (B, 3, H, W), not {shapes}")
    if not prediction.numel():
        raise UsageError(f"a loss takes images that are not empty, not {shapes}")
    if not (prediction.is_floating_point() and target.is_floating_point()):
        raise UsageError(
            f"a loss takes floats, not prediction {prediction.dtype} and target {target.dtype}",
            hint="divide 8-bit images by 255",
        )
    wide = torch.promote_types(prediction.dtype, target.dtype)
    wide = torch.promote_types(wide, torch.float32)
    return prediction.to(wide), target.to(wide)


def full_precision(tensor: Tensor) -> Tensor:
    """Cast a float tensor of any shape to fp32 unless it is wider; gradients pass."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def require_positive(what: str, value: object) -> float:
    """Return ``value`` as a float; UsageError unless finite and above 0.

    ``what`` names the value in the message.
    """
    # A configuration file may bring 1e-3 as a string, as YAML 1.1 reads it.
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{what} must be a finite number above 0, not {value!r}")
    return float(value)


class FFTLoss(nn.Module):
    """L1 distance of the 2-D Fourier transforms, over real and imaginary parts.

    mean(|Re D|, |Im D|), where D is the `torch.fft.rfft2` of prediction minus target over whole
    images with ``norm="ortho"``, which keeps the sum of squares. Each coefficient of the half
    spectrum counts once. The form is that of MIMO-UNet's frequency loss (arXiv 2108.05054), which
    is not scaled. The loss is in the images' own unit.
    """

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two (B, 3, H, W) of any range; raises as `common_dtype`.

        Computed in fp32 under autocast too: half types have too few bits for the strong low
        frequencies, and no FFT of most sizes.
        """
        prediction, target = common_dtype(prediction, target)
        # The FFT is linear: one of the difference replaces the difference of two.
        spectrum = torch.fft.rfft2(prediction - target, norm="ortho")
        return torch.view_as_real(spectrum).abs().mean()
