"""A loss of the picture's Fourier transform."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.training.losses.pixel import common_dtype


class FFTLoss(nn.Module):
    """Mean absolute difference of the spectra, real and imaginary parts taken apart.

    mean(|Re D|, |Im D|), where D is the two-dimensional transform of prediction minus target over
    whole pictures, scaled so that it keeps the sum of squares (``norm="ortho"``). Only the half
    that a real picture's spectrum needs is looked at, and each of its coefficients counts once.
    The form is that of MIMO-UNet's frequency loss (arXiv 2108.05054), which is not scaled. In the
    pictures' own unit.
    """

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Two (B, 3, H, W) of any range to a scalar; UsageError as for `common_dtype`.

        Computed in fp32 under autocast too: half types have too few bits for the strong low
        frequencies, and no transform at all of most sizes.
        """
        prediction, target = common_dtype(prediction, target)
        # The transform is linear, so that one of the difference is the difference of two.
        spectrum = torch.fft.rfft2(prediction - target, norm="ortho")
        return torch.view_as_real(spectrum).abs().mean()
