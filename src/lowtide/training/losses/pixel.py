"""Losses of pixels (L1, MSE, Charbonnier, FFT) and of structure, and checks shared by all losses.

Below, d is prediction minus target, and the mean is over all images, channels and pixels. The FFT
loss is the L1 distance of the images' Fourier transforms.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.errors import UsageError

# The paper's weights of five scales, finest first.
_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
# Gaussian window, in pixels.
_TAPS, _SIGMA = 11, 1.5
# (0.01 * white)**2 and (0.03 * white)**2, for white at 1.
_C1, _C2 = 0.01**2, 0.03**2
# Similarities are clamped to it: a negative one has no fractional power, and at 0 the slope is
# infinite.
_MIN_SIMILARITY = 1e-4


class L1Loss(nn.Module):
    """L1 loss: mean(|d|), in the images' own unit."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two (B, 3, H, W) of any range; raises as `to_common_dtype`."""
        prediction, target = to_common_dtype(prediction, target)
        return (prediction - target).abs().mean()


class MSELoss(nn.Module):
    """Mean squared error: mean(d**2), in the images' own unit squared."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two (B, 3, H, W) of any range; raises as `to_common_dtype`."""
        prediction, target = to_common_dtype(prediction, target)
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
        """Return the loss of two (B, 3, H, W) of any range; raises as `to_common_dtype`."""
        prediction, target = to_common_dtype(prediction, target)
        return ((prediction - target).square() + self.eps**2).sqrt().mean()


def to_common_dtype(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
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


def to_full_precision(tensor: Tensor) -> Tensor:
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
        """Return the loss of two (B, 3, H, W) of any range; raises as `to_common_dtype`.

        Computed in fp32 under autocast too: half types have too few bits for the strong low
        frequencies, and no FFT of most sizes.
        """
        prediction, target = to_common_dtype(prediction, target)
        # The FFT is linear: one of the difference replaces the difference of two.
        spectrum = torch.fft.rfft2(prediction - target, norm="ortho")
        return torch.view_as_real(spectrum).abs().mean()


class MSSSIMLoss(nn.Module):
    """MS-SSIM loss, 1 - MS-SSIM: from 0 for equal images to 1.

    Z. Wang, E. P. Simoncelli and A. C. Bovik, Multi-scale structural similarity for image quality
    assessment, Asilomar 2003. Each scale has

        luminance  l  = (2 m_x m_y + C1) / (m_x**2 + m_y**2 + C1)
        structure  cs = (2 s_xy + C2) / (s_x**2 + s_y**2 + C2)

    of means m, variances s**2 and covariance s_xy in Gaussian windows that lie inside the image.
    Between scales the image is averaged over 2x2 pixels; an odd last row or column is left out.
    MS-SSIM is the product of the scales' mean cs, the last scale's of l * cs, each to the power of
    the scale's weight.

    The similarity is computed for each channel of each image; the loss is 1 minus the mean. Five
    scales need sides of 176 pixels. Smaller patches have fewer scales, as many as leave 11 pixels
    (a window) of the shorter side, with their weights scaled to a sum of 1; one scale alone is
    SSIM.
    """

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the scalar loss of two (B, 3, H, W) with white at 1.

        Computed in fp32 under autocast too. A channel whose similarity on some scale is zero or
        negative has no gradient from that scale. Raises UsageError for a side below 11, and as
        `to_common_dtype`.
        """
        x, y = to_common_dtype(prediction, target)
        weights = scale_weights(x.shape[2], x.shape[3])
        # Variances are small differences of large values; bf16 has no digits left for them.
        with torch.autocast(x.device.type, enabled=False):
            similarity = x.new_ones(x.shape[:2])
            for scale, weight in enumerate(weights):
                if scale:
                    x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
                luminance, structure = _similarities(x, y)
                last = scale == len(weights) - 1
                mean = (luminance * structure if last else structure).mean((2, 3))
                similarity = similarity * mean.clamp(min=_MIN_SIMILARITY).pow(weight)
            return 1 - similarity.mean()


def scale_weights(height: int, width: int) -> tuple[float, ...]:
    """Return the MS-SSIM weights of the scales that fit an image, finest first.

    ``height`` and ``width`` are in pixels. Raises UsageError for a side smaller than the window.
    """
    shorter = min(height, width)
    weights = tuple(weight for scale, weight in enumerate(_WEIGHTS) if shorter >> scale >= _TAPS)
    if not weights:
        raise UsageError(
            f"MS-SSIM needs sides of at least {_TAPS} pixels, not an image of {width}x{height}",
            hint=f"train on larger patches; all {len(_WEIGHTS)} scales need "
            f"{_TAPS << len(_WEIGHTS) - 1} pixels",
        )
    if len(weights) == len(_WEIGHTS):
        # The paper's weights sum to 1.0001; scores are comparable only with these.
        return weights
    return tuple(weight / sum(weights) for weight in weights)


def _similarities(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return luminance and structure of two (B, 3, H, W), each (B, 3, H - 10, W - 10)."""
    moments = _blur(torch.stack([x, y, x * x, y * y, x * y]))
    mean_x, mean_y, square_x, square_y, product = moments
    both, squares = mean_x * mean_y, mean_x * mean_x + mean_y * mean_y
    luminance = (2 * both + _C1) / (squares + _C1)
    structure = (2 * (product - both) + _C2) / (square_x + square_y - squares + _C2)
    return luminance, structure


def _blur(maps: Tensor) -> Tensor:
    """Return means in Gaussian windows, (..., H - 10, W - 10), of (..., H, W)."""
    offsets = torch.arange(_TAPS, dtype=maps.dtype, device=maps.device) - _TAPS // 2
    taps = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    taps = taps / taps.sum()
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    flat = F.conv2d(F.conv2d(flat, taps.view(1, 1, -1, 1)), taps.view(1, 1, 1, -1))
    return flat.view(*maps.shape[:-2], *flat.shape[-2:])
