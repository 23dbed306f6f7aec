"""Noise of pictures as people have them, for `train_photo_denoiser.py`: of mosaics, blurred, coded.

Images are (3, H, W) in 0..1, and noise is drawn by a function of the values that it falls on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.models.resample import resize_cubic
from lowtide.training.data.degrade import jpeg_roundtrip

Noise = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]  # with noise, and without
_BILINEAR = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1.0]]) / 4
_GREEN = torch.tensor([[0, 1, 0], [1, 4, 1], [0, 1, 0.0]]) / 4
# Malvar's green: the mean of four greens, and the Laplacian of the color that is there.
_DIRECTED_GREEN = (
    torch.tensor(
        [[0, 0, -1, 0, 0], [0, 0, 2, 0, 0], [-1, 2, 4, 2, -1], [0, 0, 2, 0, 0], [0, 0, -1, 0, 0.0]]
    )
    / 8
)


def normal(draw: np.random.Generator, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.from_numpy(draw.standard_normal(shape, dtype=np.float32))


def bilinear(image: Tensor, noise: Noise, corner: tuple[int, int]) -> Pair:
    """Mosaic, add noise, and demosaic each color from its own neighbors.

    ``corner`` are the row and column in the filter array of the first pixel.
    """
    masks = _masks(image, corner)
    raw = (image * masks).sum(0)
    both = torch.stack([raw + noise(raw), raw])[:, None] * masks
    kernels = torch.stack([_BILINEAR, _GREEN, _BILINEAR])[:, None]
    made = F.conv2d(F.pad(both, (1, 1, 1, 1), mode="reflect"), kernels, groups=3)
    return made[0], made[1]


def directed(image: Tensor, noise: Noise, corner: tuple[int, int]) -> Pair:
    """As `bilinear`, by a demosaicing that adds the green's detail to red and blue."""
    masks = _masks(image, corner)
    raw = (image * masks).sum(0)
    both = torch.stack([raw + noise(raw), raw])[:, None]
    around = F.pad(both, (2, 2, 2, 2), mode="reflect")
    green = torch.where(masks[1] > 0, both, F.conv2d(around, _DIRECTED_GREEN[None, None]))
    colors = []
    for color in (0, 2):
        difference = F.pad((both - green) * masks[color], (1, 1, 1, 1), mode="reflect")
        colors.append(green + F.conv2d(difference, _BILINEAR[None, None]))
    made = torch.cat([colors[0], green, colors[1]], 1)
    return made[0], made[1]


def _masks(image: Tensor, corner: tuple[int, int]) -> Tensor:
    """The color filter array (3, H, W), RGGB from the corner on."""
    height, width = image.shape[1:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y, x = (y + corner[0]) % 2, (x + corner[1]) % 2
    return torch.stack([(y == 0) & (x == 0), y != x, (y == 1) & (x == 1)]).float()


def developed(image: Tensor, sigma: float, draw: np.random.Generator) -> Pair:
    """What a camera makes of a scene: its mosaic demosaiced, smoothed or sharpened at times.

    Noise is white on the mosaic of the picture, or shot and read noise of the linear values.
    """
    corner = int(draw.integers(2)), int(draw.integers(2))
    demosaic = bilinear if draw.random() < 0.6 else directed
    if draw.random() < 0.3:
        pair = demosaic(image, lambda raw: sigma * normal(draw, *raw.shape), corner)
    else:
        gamma = draw.uniform(1.8, 2.4)
        gains = torch.tensor([draw.uniform(1.2, 2.4), 1.0, draw.uniform(1.2, 2.2)])[:, None, None]
        most = 0.02 * draw.uniform(0, 1) ** 1.5
        shot, read = most * draw.uniform(0.3, 1), most * draw.uniform(0, 1)

        def noise(raw: Tensor) -> Tensor:
            return (shot * raw.clamp_min(0) + read**2).sqrt() * normal(draw, *raw.shape)

        linear = demosaic(image.clamp_min(0) ** gamma / gains, noise, corner)
        noisy, clean = ((one * gains).clamp(0, 1) ** (1 / gamma) for one in linear)
        pair = noisy, clean
    if draw.random() < 0.2:
        width, amount = draw.uniform(0.4, 0.8), draw.choice([1.0, -0.5])
        noisy, clean = (one + amount * (blurred(one, width) - one) for one in pair)
        pair = noisy, clean
    return pair


def shared(image: Tensor, sigma: float, draw: np.random.Generator) -> Tensor:
    """The image with noise in blotches at times, and at times stronger in color."""
    noise = normal(draw, *image.shape)
    if draw.random() < 0.5:
        noise = blurred(noise, draw.uniform(0.4, 2.2))
        noise = noise / noise.std()
    if draw.random() < 0.6:
        brightness = noise.mean(0, keepdim=True)
        noise = brightness * draw.uniform(0.2, 1.2) + (noise - brightness) * draw.uniform(0.5, 1.6)
    return image + sigma * noise


def blurred(image: Tensor, width: float) -> Tensor:
    """A Gaussian blur of a standard deviation in pixels."""
    reach = max(1, math.ceil(3 * width))
    kernel = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * width**2))
    kernel = (kernel / kernel.sum()).view(1, 1, -1, 1).expand(3, 1, -1, 1)
    around = F.pad(image[None], (reach,) * 4, mode="reflect")
    along = F.conv2d(around, kernel, groups=3)
    return F.conv2d(along, kernel.transpose(2, 3), groups=3)[0]


def resized(image: Tensor, side: int) -> Tensor:
    """A square image at another size."""
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    return torch.from_numpy(resize_cubic(pixels, side, side).astype(np.float32)).permute(2, 0, 1)


def as_jpeg(image: Tensor, quality: int, *, full_color: bool) -> Tensor:
    """An image after a JPEG, with chroma at half the resolution unless ``full_color``."""
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    coded = jpeg_roundtrip(pixels, quality, subsample=not full_color)
    return torch.from_numpy(np.ascontiguousarray(coded)).permute(2, 0, 1)


def as_8_bits(image: Tensor) -> Tensor:
    """An image clipped and rounded."""
    return (image.clamp(0, 1) * 255).round() / 255
