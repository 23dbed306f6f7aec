"""ParagonConv, the purely convolutional ParagonSR2: a finite receptive field.

No attention and no pooling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.paragonsr2.config import LEAKY_SLOPE, ParagonConvConfig
from lowtide.models.resample import CUBIC_REACH, cubic_kernel


class CubicUpsample(nn.Module):
    """Cubic upsampling by an integer factor as a convolution before a pixel shuffle.

    Maps (B, C, H, W) to (B, C * scale**2, H, W); `F.pixel_shuffle` of that is the image. As a
    convolution with one constant kernel per phase, it weighs the same pixels the same wherever a
    crop of the image lies; `F.interpolate` derives its weights from float coordinates, which drift
    as the image grows. Borders are replicated. The kernel is a non-persistent buffer, never in the
    file.
    """

    keeps_fp32 = True  # where the networks around it are trained in low precision

    def __init__(self, scale: int, channels: int) -> None:
        super().__init__()
        kernel = torch.from_numpy(cubic_kernel(scale, channels))
        self.kernel: Tensor
        self.register_buffer("kernel", kernel, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C * scale**2, H, W), before the pixel shuffle."""
        reach = CUBIC_REACH
        return F.conv2d(F.pad(x, (reach, reach, reach, reach), mode="replicate"), self.kernel)


class ParagonConv(nn.Module):
    """Fixed cubic upsampling plus a learned convolutional residual.

    Maps (B, 3, H, W) in 0..1 to (B, 3, H * scale, W * scale), unclamped. Detail path: a 3×3
    convolution to ``features`` channels, ``blocks`` of 3×3 convolution and leaky ReLU, a 3×3
    convolution to 3 * scale**2 channels, pixel shuffle. Nothing in it is global, so an output pixel
    depends on ``config.reach`` = ``blocks`` + 2 input pixels to each side and on no others. The
    last convolution starts at zero: an untrained network is cubic interpolation.
    """

    CHANNELS = 3

    def __init__(self, config: ParagonConvConfig) -> None:
        super().__init__()
        self.config = config
        width, outputs = config.features, self.CHANNELS * config.scale**2
        self.base = CubicUpsample(config.scale, self.CHANNELS)
        self.conv_in = nn.Conv2d(self.CHANNELS, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(config.blocks)
        )
        self.conv_up = nn.Conv2d(width, outputs, 3, padding=1)
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name.startswith("conv_up"):
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, a=LEAKY_SLOPE)

    def detail(self, x: Tensor) -> Tensor:
        """Compute the learned path before the pixel shuffle, (B, 3 * scale**2, H, W)."""
        x = F.leaky_relu(self.conv_in(x), LEAKY_SLOPE)
        for conv in self.body:
            x = F.leaky_relu(conv(x), LEAKY_SLOPE)
        return self.conv_up(x)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) in 0..1 to (B, 3, H * scale, W * scale), unclamped."""
        # Summed first, so that one pixel shuffle serves both paths.
        return F.pixel_shuffle(self.detail(x) + self.base(x), self.config.scale)
