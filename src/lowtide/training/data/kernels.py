"""Blur kernels of the second-order degradation model, and how they are applied.

The shapes and their parameters are those of Real-ESRGAN (arXiv 2107.10833, section 3): Gaussian
kernels with an exponent (generalized, or with a flat top), round or not, and the sinc filter that
makes ringing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from lowtide.core.errors import UsageError

Shape = Literal["gaussian", "generalized", "plateau"]
Range = tuple[float, float]
# Shares of the shapes among kernels that are no sinc: a round and a stretched one of each.
_SHARES: dict[tuple[Shape, bool], float] = {
    ("gaussian", False): 0.45,
    ("gaussian", True): 0.25,
    ("generalized", False): 0.12,
    ("generalized", True): 0.03,
    ("plateau", False): 0.12,
    ("plateau", True): 0.03,
}
# Kernels are of odd sizes from 7 to 21; a small one has no room for slow ringing.
_SIZES = np.arange(7, 22, 2)
_SMALL, _CUTOFF_SMALL, _CUTOFF = 13, math.pi / 3, math.pi / 5


@dataclass(frozen=True)
class BlurConfig:
    """How kernels are drawn; the defaults are the paper's for the first of the two blurs.

    ``share`` of the pictures are blurred, ``sinc_share`` of these by a sinc filter. ``sigma`` is
    the range of the width along each axis in pixels, ``generalized`` and ``plateau`` those of the
    exponents. Raises `UsageError` for what is not possible.
    """

    share: float = 1.0
    sinc_share: float = 0.1
    sigma: Range = (0.2, 3.0)
    generalized: Range = (0.5, 4.0)
    plateau: Range = (1.0, 2.0)

    def __post_init__(self) -> None:
        check_shares(self, "share", "sinc_share")
        check_ranges(self, math.inf, "sigma", "generalized", "plateau")


def check_shares(config: object, *names: str) -> None:
    """Raise `UsageError` for fields that are not in 0..1."""
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise UsageError(f"{name} must be from 0 to 1: {getattr(config, name)}")


def check_ranges(config: object, highest: float, *names: str) -> None:
    """Raise `UsageError` for fields that are no range above 0 up to ``highest``."""
    for name in names:
        low, high = getattr(config, name)
        if not 0 < low <= high <= highest:
            most = f" and at most {highest:g}" if math.isfinite(highest) else ""
            raise UsageError(f"{name} must be a range above 0{most}: {low} to {high}")


def gaussian_kernel(
    size: int, sigma: Range, angle: float, shape: Shape = "gaussian", exponent: float = 1.0
) -> np.ndarray:
    """A kernel (size, size) in float64 that sums to 1.

    ``sigma`` are the widths in pixels along two axes, the first of which is turned by ``angle``
    (radians) from the rows' direction. With q the squared distance in such units, a kernel is
    exp(-q/2), generalized exp(-q**exponent / 2), and with a plateau 1 / (1 + q**exponent).
    """
    across = np.arange(size) - (size - 1) / 2
    y, x = np.meshgrid(across, across, indexing="ij")
    along = (x * math.cos(angle) + y * math.sin(angle)) / sigma[0]
    beside = (y * math.cos(angle) - x * math.sin(angle)) / sigma[1]
    power = (along**2 + beside**2) ** (exponent if shape != "gaussian" else 1.0)
    kernel = 1 / (1 + power) if shape == "plateau" else np.exp(-power / 2)
    return kernel / kernel.sum()


def sinc_kernel(size: int, cutoff: float) -> np.ndarray:
    """A round low-pass filter (size, size) in float64 that sums to 1, with rings around edges.

    ``cutoff`` is in radians per pixel, up to pi. It is J1(cutoff r) / r, the transform of a disk.
    """
    across = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    radius = torch.hypot(across[:, None], across[None, :])
    rings = torch.special.bessel_j1(cutoff * radius) / radius
    kernel = torch.where(radius == 0, cutoff / 2, rings).numpy()
    return kernel / kernel.sum()


def draw_kernel(config: BlurConfig, generator: np.random.Generator) -> np.ndarray:
    """A random kernel (size, size) with the shapes, widths and exponents of ``config``."""
    if generator.random() < config.sinc_share:
        return draw_sinc(generator)
    size = int(generator.choice(_SIZES))
    shape, stretched = list(_SHARES)[int(generator.choice(len(_SHARES), p=list(_SHARES.values())))]
    first, second = generator.uniform(*config.sigma, 2)
    angle = generator.uniform(-math.pi, math.pi) if stretched else 0.0
    sigma = (first, second) if stretched else (first, first)
    return gaussian_kernel(size, sigma, angle, shape, _exponent(config, shape, generator))


def _exponent(config: BlurConfig, shape: Shape, generator: np.random.Generator) -> float:
    """Below and above 1 equally often, however far the range goes."""
    low, high = config.plateau if shape == "plateau" else config.generalized
    middle = min(max(low, 1.0), high)
    part = (low, middle) if generator.random() < 0.5 else (middle, high)
    return float(generator.uniform(*part))


def draw_sinc(generator: np.random.Generator) -> np.ndarray:
    """A random sinc filter (size, size), as at the end of the model too."""
    size = int(generator.choice(_SIZES))
    lowest = _CUTOFF_SMALL if size < _SMALL else _CUTOFF
    return sinc_kernel(size, float(generator.uniform(lowest, math.pi)))


def apply_kernel(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """float32 (H, W, C) filtered by a kernel of odd size; mirrored around its last pixels.

    Done by Fourier transforms in NumPy, whose result does not depend on the number of threads.
    """
    radius = kernel.shape[0] // 2
    around = np.pad(image, ((radius, radius), (radius, radius), (0, 0)), "reflect")
    size = around.shape[:2]
    spectrum = np.fft.rfft2(around, axes=(0, 1)) * np.fft.rfft2(kernel, size)[..., None]
    whole = np.fft.irfft2(spectrum, size, axes=(0, 1))
    # A circular product: only from there on nothing comes around from the other end.
    return whole[2 * radius :, 2 * radius :].astype(np.float32)
