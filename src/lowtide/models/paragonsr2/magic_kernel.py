"""Upsampling with the Magic Kernel Sharp, the fixed path of ParagonSR2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# J. Costella, "The magic kernel": the smallest spline of the family and its sharpening filter.
BLUR = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
SHARP = (-1 / 32, 0.0, 9 / 32, 16 / 32, 9 / 32, 0.0, -1 / 32)


class MagicKernelUpsample(nn.Module):
    """Magic Kernel upsampling by an integer factor, with optional sharpening.

    Maps (B, C, H, W) to (B, C, H * scale, W * scale): sharpened by a share ``alpha``, upsampled by
    pixel repetition, blurred. Borders are zero-padded, before the blur as before the sharpening.
    The blur of repeated pixels is computed as one small filter of the input for each of the
    ``scale ** 2`` phases, so that nothing runs at the output size. Kernels are non-persistent
    buffers, not in checkpoints.
    """

    keeps_fp32 = True  # where the networks around it are trained in low precision

    def __init__(self, channels: int, scale: int, alpha: float) -> None:
        super().__init__()
        self.channels, self.scale, self.alpha = channels, scale, alpha
        sharp, phases = torch.tensor(SHARP), self._phases(scale)
        self.sharp: Tensor
        self.places: Tensor
        self.register_buffer(
            "sharp", torch.outer(sharp, sharp).expand(channels, 1, -1, -1).clone(), persistent=False
        )
        places = torch.einsum("iy,jx->ijyx", phases, phases).flatten(0, 1)[:, None]
        self.register_buffer("places", places.repeat(channels, 1, 1, 1), persistent=False)

    @staticmethod
    def _phases(scale: int) -> Tensor:
        """Return the filter taps of each phase of an upsampled pixel, (scale, taps)."""
        far = len(BLUR) // 2
        reach = -(-far // scale)
        phases = torch.zeros(scale, 2 * reach + 1)
        for place in range(scale):
            for tap, weight in enumerate(BLUR):
                phases[place, reach + (place + tap - far) // scale] += weight
        return phases

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H * scale, W * scale)."""
        if self.alpha:
            sharp = F.conv2d(x, self.sharp, padding=len(SHARP) // 2, groups=self.channels)
            # Not torch.lerp, which needs one dtype: under autocast there are two.
            x = x + self.alpha * (sharp - x)
        places = F.conv2d(x, self.places, padding=self.places.shape[-1] // 2, groups=self.channels)
        return F.pixel_shuffle(places, self.scale)
