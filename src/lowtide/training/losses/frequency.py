"""FFT loss: L1 distance of the images' Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.training.losses.pixel import common_dtype


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
