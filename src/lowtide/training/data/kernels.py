"""Random blur kernels of the second-order degradation model.

The shapes and parameters are those of Real-ESRGAN (arXiv 2107.10833, section 3): isotropic and
anisotropic Gaussian, generalized Gaussian and plateau-shaped kernels, and the sinc filter that
makes ringing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

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
