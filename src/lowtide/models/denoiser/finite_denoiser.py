"""Denoiser of pictures that looks a finite way: a U-Net of gated convolutions.

It is given how strong the noise is by octaves, of brightness and of color, so that it knows white
noise from what demosaicing, JPEG and resizing leave. Nothing in it looks at the map as a whole:
tiles and bands of rows give what the whole picture gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.denoiser.config import LEVELS, FiniteDenoiserConfig
from lowtide.models.denoiser.denoiser import LeveledDenoiser, require_denoiser_level

_MIDDLE, _GAIN = 0.5, 4.0  # of the picture's values, and of levels, on their way in
_FIRST_STEP = 0.1  # of the residual steps, untrained


class FiniteDenoiser(LeveledDenoiser):
    """A `FiniteUNet` at one noise level.

    Maps noisy (B, 3, H, W) in 0..1 to the expected clean picture, unclamped, once `set_level` was
    called. At level 0 it is the identity. Levels lie in buffers: they can be changed without
    building, capturing or compiling anything again.
    """

    levels: Tensor
    strongest: Tensor
    config: FiniteDenoiserConfig

    def __init__(self, config: FiniteDenoiserConfig) -> None:
        super().__init__(config)
        self.unet = FiniteUNet(config)
        self.register_buffer("levels", torch.zeros(1, LEVELS, 1, 1), persistent=False)
        self.register_buffer("strongest", torch.zeros(1), persistent=False)

    @torch.no_grad()
    def set_level(self, sigma: float, parameters: Sequence[float] | None = None) -> None:
        """Set the noise level.

        Args:
            sigma: Standard deviation of white noise, of values in 0..1, as strong as the noise.
            parameters: Shares of that level which the noise has in the diagonal Haar bands of 1, 2
                and 4 pixels, of brightness and then of color. Default: all 1, white noise.

        Raises:
            UsageError: A value is not a finite number, or there are not six.
        """
        parameters = self.config.white_parameters if parameters is None else parameters
        require_denoiser_level(self.config, sigma, parameters)
        levels = self.levels.new_tensor(list(parameters)) * sigma
        self.levels.copy_(levels[None, :, None, None])
        self.strongest.copy_(levels.max())
        self.sigma = sigma

    def forward(self, image: Tensor) -> Tensor:
        """Map (B, 3, H, W) in 0..1 to (B, 3, H, W); sides are multiples of the size rule's."""
        self.require_level()
        return image - self.strongest * self.unet(image - _MIDDLE, self.levels)

    def forward_at(self, image: Tensor, sigma: Tensor) -> Tensor:
        """Map (B, 3, H, W) with white noise of ``sigma`` (1,) to (B, 3, H, W)."""
        levels = image.new_tensor(self.config.white_parameters) * sigma
        return image - levels.max() * self.unet(image - _MIDDLE, levels[None, :, None, None])


class FiniteUNet(nn.Module):
    """U-Net of gated convolutions, at half the picture's size and below.

    Maps noisy (B, 3, H, W) in -0.5..0.5 and levels (B, 6, 1, 1) to the noise in shares of the
    strongest level, (B, 3, H, W). Details of full size go past it.
    """

    def __init__(self, config: FiniteDenoiserConfig) -> None:
        super().__init__()
        widths, fine = config.widths, config.fine
        self.full_in = nn.Conv2d(3, fine, 3, padding=1)
        self.head = nn.Conv2d(4 * 3 + LEVELS, widths[0], 3, padding=1)
        sizes = list(zip(widths, config.blocks, strict=True))
        self.encoder = nn.ModuleList(_blocks(*size) for size in sizes)
        self.down = nn.ModuleList(nn.Conv2d(c, below, 2, 2) for c, below in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(below, 4 * c, 1) for c, below in pairwise(widths))
        self.decoder = nn.ModuleList(_blocks(*size) for size in sizes[:-1])
        self.leave = nn.Conv2d(widths[0], 4 * fine, 1)
        self.tail = nn.Conv2d(2 * fine, 3, 3, padding=1)

    def forward(self, image: Tensor, levels: Tensor) -> Tensor:
        """Map (B, 3, H, W) and (B, 6, 1, 1) to (B, 3, H, W)."""
        halves = F.pixel_unshuffle(image, 2)
        planes = torch.zeros_like(halves[:, :1]) + _GAIN * levels
        y = self.head(torch.cat([halves, planes], 1))
        passed: list[Tensor] = []
        for blocks, down in zip(self.encoder[:-1], self.down, strict=True):
            y = blocks(y)
            passed.append(y)
            y = down(y)
        y = self.encoder[-1](y)
        for blocks, up in zip(self.decoder[::-1], self.up[::-1], strict=True):
            y = blocks(F.pixel_shuffle(up(y), 2) + passed.pop())
        y = F.pixel_shuffle(self.leave(y), 2)
        return self.tail(torch.cat([y, self.full_in(image)], 1))


class GatedBlock(nn.Module):
    """Two residual steps: over the 3×3 neighbors, and over channels.

    That of NAFNet (arXiv 2204.04676) without its pooling over the map. Maps (B, ``channels``, H, W)
    to the same shape.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.norm1, self.norm2 = PixelLayerNorm(c), PixelLayerNorm(c)
        self.expand1, self.expand2 = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, 2 * c, 1)
        self.depthwise = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.project1, self.project2 = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.scale1 = nn.Parameter(torch.full((1, c, 1, 1), _FIRST_STEP))
        self.scale2 = nn.Parameter(torch.full((1, c, 1, 1), _FIRST_STEP))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        y = self.project1(_gated(self.depthwise(self.expand1(self.norm1(x)))))
        x = torch.addcmul(x, self.scale1, y)
        y = self.project2(_gated(self.expand2(self.norm2(x))))
        return torch.addcmul(x, self.scale2, y)


class PixelLayerNorm(nn.Module):
    """Layer norm over the channels of each pixel: (B, C, H, W) to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6)
        return y.permute(0, 3, 1, 2)


def _blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(GatedBlock(channels) for _ in range(count)))


def _gated(x: Tensor) -> Tensor:
    """Return the product of both halves of the channels."""
    one, other = x.chunk(2, 1)
    return one * other


def haar_levels(noise: Tensor) -> Tensor:
    """Return the standard deviations (B, 6) of noise (B, 3, H, W), as the network is given them.

    Those of the diagonal Haar bands of 1, 2 and 4 pixels, of brightness and then of color.
    """
    red, green, blue = noise.unbind(1)
    brightness = ((red + green + blue) / 3**0.5)[:, None]
    colors = torch.stack([(red - blue) / 2**0.5, (red - 2 * green + blue) / 6**0.5], 1)
    found = []
    for part in (brightness, colors):
        for _ in range(LEVELS // 2):
            height, width = (side // 2 * 2 for side in part.shape[-2:])
            top, bottom = part[..., :height:2, :], part[..., 1:height:2, :]
            corners = [row[..., at:width:2] for row in (top, bottom) for at in (0, 1)]
            diagonal = (corners[0] - corners[1] - corners[2] + corners[3]) / 2
            found.append(diagonal.square().mean((1, 2, 3)).sqrt())
            part = torch.stack(corners).sum(0) / 2
    return torch.stack(found, 1)
