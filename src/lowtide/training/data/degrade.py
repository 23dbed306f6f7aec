"""Degradations that make low-resolution images from high-resolution ones.

`bicubic_downscale` is that of the common benchmarks. `PhotoDegradation` is what happens to an
ordinary photograph: resized, perhaps twice, a little soft and noisy, and JPEG. `RealDegradation` is
Real-ESRGAN's random second-order model (arXiv 2107.10833), far stronger: its blur kernels (section
3) are isotropic and anisotropic Gaussian, generalized Gaussian and plateau-shaped, and the sinc
filter that makes ringing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import pyvips
import torch

from lowtide.models.resample import keys_cubic, resize_cubic

Shape = Literal["gaussian", "generalized", "plateau"]
Range = tuple[float, float]
# Shares of the shapes among kernels other than sinc; True is anisotropic.
_SHAPE_PROBABILITIES: dict[tuple[Shape, bool], float] = {
    ("gaussian", False): 0.45,
    ("gaussian", True): 0.25,
    ("generalized", False): 0.12,
    ("generalized", True): 0.03,
    ("plateau", False): 0.12,
    ("plateau", True): 0.03,
}
# Odd sizes from 7 to 21; small kernels have no room for low cutoffs.
_SIZES = np.arange(7, 22, 2)
_SMALL_SIZE, _CUTOFF_SMALL, _CUTOFF = 13, math.pi / 3, math.pi / 5


@dataclass(frozen=True)
class BlurKernelConfig:
    """Distribution of random blur kernels; the defaults are the paper's first stage.

    ``share`` of the images are blurred, ``sinc_share`` of these by a sinc filter. ``sigma`` is
    the range of the width along each axis in pixels, ``generalized`` and ``plateau`` are those of
    the exponents.
    """

    share: float = 1.0
    sinc_share: float = 0.1
    sigma: Range = (0.2, 3.0)
    generalized: Range = (0.5, 4.0)
    plateau: Range = (1.0, 2.0)


def gaussian_kernel(
    size: int, sigma: Range, angle: float, shape: Shape = "gaussian", exponent: float = 1.0
) -> np.ndarray:
    """Return a Gaussian, generalized Gaussian or plateau kernel (size, size).

    It is float64 and sums to 1. ``sigma`` are the widths in pixels along two axes, the first of
    which is rotated by ``angle`` (radians) from the rows' direction. With q the squared distance
    in units of ``sigma``, the kernel is exp(-q/2), generalized exp(-q**exponent / 2), and with a
    plateau 1 / (1 + q**exponent).
    """
    across = np.arange(size) - (size - 1) / 2
    y, x = np.meshgrid(across, across, indexing="ij")
    along = (x * math.cos(angle) + y * math.sin(angle)) / sigma[0]
    perpendicular = (y * math.cos(angle) - x * math.sin(angle)) / sigma[1]
    power = (along**2 + perpendicular**2) ** (exponent if shape != "gaussian" else 1.0)
    kernel = 1 / (1 + power) if shape == "plateau" else np.exp(-power / 2)
    return kernel / kernel.sum()


def sinc_kernel(size: int, cutoff: float) -> np.ndarray:
    """Return a circular sinc low-pass kernel (size, size), which makes ringing.

    It is float64 and sums to 1. ``cutoff`` is in radians per pixel, up to pi. The kernel is
    J1(cutoff r) / r, the Fourier transform of a disk.
    """
    across = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    radius = torch.hypot(across[:, None], across[None, :])
    rings = torch.special.bessel_j1(cutoff * radius) / radius
    kernel = torch.where(radius == 0, cutoff / 2, rings).numpy()
    return kernel / kernel.sum()


def draw_kernel(config: BlurKernelConfig, generator: np.random.Generator) -> np.ndarray:
    """Draw a random kernel (size, size) from the distribution of ``config``."""
    if generator.random() < config.sinc_share:
        return draw_sinc(generator)
    size = int(generator.choice(_SIZES))
    shape, anisotropic = list(_SHAPE_PROBABILITIES)[
        int(generator.choice(len(_SHAPE_PROBABILITIES), p=list(_SHAPE_PROBABILITIES.values())))
    ]
    first, second = generator.uniform(*config.sigma, 2)
    angle = generator.uniform(-math.pi, math.pi) if anisotropic else 0.0
    sigma = (first, second) if anisotropic else (first, first)
    return gaussian_kernel(size, sigma, angle, shape, _draw_exponent(config, shape, generator))


def _draw_exponent(config: BlurKernelConfig, shape: Shape, generator: np.random.Generator) -> float:
    """Draw an exponent, below and above 1 equally often whatever the range."""
    low, high = config.plateau if shape == "plateau" else config.generalized
    middle = min(max(low, 1.0), high)
    part = (low, middle) if generator.random() < 0.5 else (middle, high)
    return float(generator.uniform(*part))


def draw_sinc(generator: np.random.Generator) -> np.ndarray:
    """Draw a random sinc kernel (size, size), also for the final filter of the model."""
    size = int(generator.choice(_SIZES))
    lowest = _CUTOFF_SMALL if size < _SMALL_SIZE else _CUTOFF
    return sinc_kernel(size, float(generator.uniform(lowest, math.pi)))


def apply_kernel(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Filter a float32 (H, W, C) by a kernel of odd size with reflected borders.

    Uses NumPy's FFT, whose result does not depend on the number of threads.
    """
    radius = kernel.shape[0] // 2
    around = np.pad(image, ((radius, radius), (radius, radius), (0, 0)), "reflect")
    size = around.shape[:2]
    spectrum = np.fft.rfft2(around, axes=(0, 1)) * np.fft.rfft2(kernel, size)[..., None]
    whole = np.fft.irfft2(spectrum, size, axes=(0, 1))
    # The convolution is circular: earlier pixels wrap around from the other end.
    return whole[2 * radius :, 2 * radius :].astype(np.float32)


Filter = Literal["area", "bilinear", "bicubic"]
_FILTERS: tuple[Filter, ...] = get_args(Filter)
# Photons of a white pixel, for Poisson noise of strength 1.
_PHOTONS = 256


@dataclass(frozen=True)
class DegradationStageConfig:
    """Parameters of one stage of blur, resize, noise and JPEG.

    The defaults are the paper's for the first stage. Shares are probabilities in 0..1.
    ``resize_shares`` are those of enlarging, shrinking and keeping the size, by a factor in
    ``resize``. ``gaussian_share`` is that of Gaussian noise, with a standard deviation in
    ``gaussian`` (of 255); the others have Poisson noise with a strength in ``poisson``.
    ``gray_share`` is that of noise equal in all three channels. ``jpeg`` is the range of
    qualities.
    """

    blur: BlurKernelConfig = field(default_factory=BlurKernelConfig)
    resize_shares: tuple[float, float, float] = (0.2, 0.7, 0.1)
    resize: Range = (0.15, 1.5)
    gaussian_share: float = 0.5
    gaussian: Range = (1.0, 30.0)
    poisson: Range = (0.05, 3.0)
    gray_share: float = 0.4
    jpeg: tuple[int, int] = (30, 95)


def _second_stage() -> DegradationStageConfig:
    """Return the paper's parameters of the second, weaker stage."""
    return DegradationStageConfig(
        BlurKernelConfig(share=0.8, sigma=(0.2, 1.5)),
        (0.3, 0.4, 0.3),
        (0.3, 1.2),
        gaussian=(1.0, 25.0),
        poisson=(0.05, 2.5),
    )


@dataclass(frozen=True)
class RealDegradationConfig:
    """Parameters of both stages, and the share of images with a final sinc filter."""

    first: DegradationStageConfig = field(default_factory=DegradationStageConfig)
    second: DegradationStageConfig = field(default_factory=_second_stage)
    final_sinc_share: float = 0.8


@dataclass(frozen=True)
class PhotoDegradationConfig:
    """Parameters of `PhotoDegradation`; shares are probabilities in 0..1.

    ``blur`` is the width of a round Gaussian in LQ pixels and ``noise`` the standard deviation of
    Gaussian noise (of 255). ``resize`` is the size of the picture between two resizings, relative
    to LQ; half of these are saved as JPEG in between, of a quality in ``earlier_jpeg``.
    ``full_color_share`` of the final JPEGs, of a quality in ``jpeg``, do not subsample chroma.
    """

    blur_share: float = 0.25
    blur: Range = (0.2, 0.8)
    twice_share: float = 0.3
    resize: Range = (1.0, 2.0)
    earlier_jpeg: tuple[int, int] = (60, 95)
    noise_share: float = 0.4
    noise: Range = (0.3, 4.0)
    gray_share: float = 0.5
    jpeg_share: float = 0.85
    jpeg: tuple[int, int] = (30, 95)
    full_color_share: float = 0.2


def bicubic_downscale(gt: np.ndarray, scale: int, generator: np.random.Generator) -> np.ndarray:
    """Downscale by ``scale`` as MATLAB's ``imresize`` does for 8-bit images.

    ``gt`` is float32 (H, W, 3) in 0..1 with sides that are multiples of ``scale``. It is rounded
    to 8 bits, and so is the float32 result, as in published LQ files. ``generator`` is unused.
    """
    levels = np.rint(gt * 255).astype(np.uint8)
    low = resize_cubic(levels, gt.shape[0] // scale, gt.shape[1] // scale)
    return low.astype(np.float32) / np.float32(255)


class PhotoDegradation:
    """What happens to an ordinary photograph on its way to the person who enlarges it.

    It is made smaller by an antialiased filter, perhaps in two steps with a JPEG between them, is a
    little soft, has a little noise, and is a JPEG, most often with chroma at half the resolution.
    """

    def __init__(self, config: PhotoDegradationConfig | None = None) -> None:
        self.config = config or PhotoDegradationConfig()

    def __call__(self, gt: np.ndarray, scale: int, generator: np.random.Generator) -> np.ndarray:
        """Return the degraded LQ of ``gt``, ``scale`` times smaller.

        Both are float32 (H, W, 3) in 0..1; LQ is rounded to 8-bit steps.
        """
        config, size = self.config, (gt.shape[0] // scale, gt.shape[1] // scale)
        image = gt
        if generator.random() < config.blur_share:
            width = float(generator.uniform(*config.blur)) * scale
            radius = math.ceil(3 * width)
            image = apply_kernel(image, gaussian_kernel(2 * radius + 1, (width, width), 0.0))
        if generator.random() < config.twice_share:
            factor = min(float(generator.uniform(*config.resize)), scale)
            between = (round(size[0] * factor), round(size[1] * factor))
            image = _shrink(image, between, generator)
            if generator.integers(2):
                image = jpeg_roundtrip(image, _draw_quality(config.earlier_jpeg, generator))
        image = _shrink(image, size, generator)
        if generator.random() < config.noise_share:
            channels = 1 if generator.random() < config.gray_share else 3
            sigma = np.float32(generator.uniform(*config.noise) / 255)
            image = image + generator.standard_normal((*size, channels), np.float32) * sigma
        if generator.random() < config.jpeg_share:
            full = generator.random() < config.full_color_share
            quality = _draw_quality(config.jpeg, generator)
            return jpeg_roundtrip(image, quality, subsample=not full)
        return np.rint(np.clip(image, 0, 1) * 255) / np.float32(255)


def _shrink(image: np.ndarray, size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Resize by one of the antialiased filters, mostly the cubic one; in 0..1."""
    if generator.random() < 0.7:
        image = resize_cubic(image, *size).astype(np.float32)
    else:
        image = resize_image(image, size, "area")
    return np.clip(image, 0, 1)


class RealDegradation:
    """Real-ESRGAN's random second-order degradation (arXiv 2107.10833, figure 2).

    Two stages of random blur, resize, noise and JPEG. In the second, JPEG comes randomly before or
    after the final resize with a sinc filter.
    """

    def __init__(self, config: RealDegradationConfig | None = None) -> None:
        self.config = config or RealDegradationConfig()

    def __call__(self, gt: np.ndarray, scale: int, generator: np.random.Generator) -> np.ndarray:
        """Return the degraded LQ of ``gt``, ``scale`` times smaller.

        Both are float32 (H, W, 3) in 0..1; LQ is rounded to 8-bit steps.
        """
        size = (gt.shape[0] // scale, gt.shape[1] // scale)
        first, second = self.config.first, self.config.second
        image = _degrade_stage(gt, gt.shape[:2], first, generator)
        image = jpeg_roundtrip(image, _draw_quality(first.jpeg, generator))
        image = _degrade_stage(image, size, second, generator)
        if generator.integers(2):
            image = jpeg_roundtrip(
                self._final_resize(image, size, generator), _draw_quality(second.jpeg, generator)
            )
        else:
            image = self._final_resize(
                jpeg_roundtrip(image, _draw_quality(second.jpeg, generator)), size, generator
            )
        return np.rint(np.clip(image, 0, 1) * 255) / np.float32(255)

    def _final_resize(
        self, image: np.ndarray, size: tuple[int, int], generator: np.random.Generator
    ) -> np.ndarray:
        image = resize_image(image, size, _draw_filter(generator))
        if generator.random() < self.config.final_sinc_share:
            image = apply_kernel(image, draw_sinc(generator))
        return image


def _degrade_stage(
    image: np.ndarray,
    size: tuple[int, int],
    config: DegradationStageConfig,
    generator: np.random.Generator,
) -> np.ndarray:
    """Blur, resize to ``size`` times a random factor, and add noise; in 0..1."""
    if generator.random() < config.blur.share:
        image = apply_kernel(image, draw_kernel(config.blur, generator))
    low, high = config.resize
    kind = int(generator.choice(3, p=config.resize_shares))
    factor = float(generator.uniform(*((1.0, high), (low, 1.0), (1.0, 1.0))[kind]))
    target = (max(1, round(size[0] * factor)), max(1, round(size[1] * factor)))
    image = np.clip(resize_image(image, target, _draw_filter(generator)), 0, 1)
    return np.clip(image + _draw_noise(image, config, generator), 0, 1)


def _draw_noise(
    image: np.ndarray, config: DegradationStageConfig, generator: np.random.Generator
) -> np.ndarray:
    """Draw noise for an image in 0..1: float32 (H, W, 3), or (H, W, 1) if gray."""
    gray = generator.random() < config.gray_share
    if generator.random() < config.gaussian_share:
        shape = (*image.shape[:2], 1 if gray else 3)
        sigma = np.float32(generator.uniform(*config.gaussian) / 255)
        return generator.standard_normal(shape, np.float32) * sigma
    light = image.mean(2, keepdims=True) if gray else image
    strength = generator.uniform(*config.poisson)
    caught = generator.poisson(light * _PHOTONS) / _PHOTONS
    return ((caught - light) * strength).astype(np.float32)


def _draw_filter(generator: np.random.Generator) -> Filter:
    return _FILTERS[int(generator.integers(len(_FILTERS)))]


def _draw_quality(qualities: tuple[int, int], generator: np.random.Generator) -> int:
    return int(generator.integers(*qualities, endpoint=True))


def jpeg_roundtrip(image: np.ndarray, quality: int, *, subsample: bool = True) -> np.ndarray:
    """Encode and decode a float32 (H, W, 3) in 0..1 as JPEG of ``quality`` 1 to 100.

    ``subsample`` halves the resolution of chroma, as most programs do.
    """
    levels = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    file = pyvips.Image.new_from_array(levels).jpegsave_buffer(
        Q=quality, subsample_mode="on" if subsample else "off"
    )
    return pyvips.Image.jpegload_buffer(file).numpy().astype(np.float32) / np.float32(255)


def resize_image(image: np.ndarray, size: tuple[int, int], kind: Filter) -> np.ndarray:
    """Resize a float32 (H, W, C) to ``size`` (height, width) with replicated borders.

    ``area`` is the mean over the pixel's area. ``bilinear`` and ``bicubic`` read 2 or 4 pixels per
    axis without antialiasing when they shrink: aliasing is part of the degradation model.
    """
    for axis in (0, 1):
        index, weights = _taps(image.shape[axis], size[axis], kind)
        moved = np.moveaxis(image, axis, 0)
        shares = weights.astype(np.float32)[..., None, None]
        result = np.zeros((size[axis], *moved.shape[1:]), np.float32)
        for tap in range(index.shape[1]):
            result += shares[:, tap] * moved[index[:, tap]]
        image = np.moveaxis(result, 0, axis)
    return image


def _taps(length: int, size: int, kind: Filter) -> tuple[np.ndarray, np.ndarray]:
    """Return the input indices and weights of each output pixel, each (size, taps)."""
    step = length / size
    left = np.arange(size) * step
    if kind == "area":
        index = np.floor(left).astype(np.int64)[:, None] + np.arange(math.ceil(step) + 1)
        edges = left[:, None]
        weights = np.minimum(edges + step, index + 1) - np.maximum(edges, index)
        weights = np.clip(weights, 0, None)
    else:
        centers = (left + step / 2 - 0.5)[:, None]
        radius = 1 if kind == "bilinear" else 2
        index = np.floor(centers).astype(np.int64) + np.arange(1 - radius, 1 + radius)
        distance = centers - index
        weights = keys_cubic(distance) if radius == 2 else np.maximum(0, 1 - np.abs(distance))
    return np.clip(index, 0, length - 1), weights / weights.sum(1, keepdims=True)
