"""Image quality metrics: PSNR, SSIM, PSNR-Y, SSIM-Y and maximum error.

PSNR = 10 log10(peak**2 / mean squared error), in decibels; identical images give infinity. The
super-resolution protocol (`psnr_y`) is that of the NTIRE challenges and of the papers since SRCNN:
8-bit images, luma only, without a border.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SSIM_WINDOW = 11  # side in pixels; images must be at least this large


def max_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest absolute difference; NaN where either array has a NaN.

    Both have the same shape, whatever it is. In the samples' own unit.

    Raises:
        ValueError: for different shapes or empty arrays.
    """
    import numpy as np

    _require_same_shape(a, b)
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def psnr(a: np.ndarray, b: np.ndarray, peak: float = 1.0) -> float:
    """Return the PSNR in dB over all samples, computed in float64.

    Both arrays have the same shape, whatever it is. ``peak`` is the value of white: 1 for floats in
    0..1, 255 for 8 bits. Neither image is rounded or clipped here.

    Raises:
        ValueError: for different shapes, empty arrays or a peak that is not above 0.
    """
    import numpy as np

    _require_same_shape(a, b)
    if not peak > 0:
        raise ValueError(f"peak must be above 0, not {peak}")
    error = float(np.mean(np.square(a.astype(np.float64) - b.astype(np.float64))))
    return math.inf if error == 0 else 10.0 * math.log10(peak**2 / error)


def luma_bt601(rgb: np.ndarray) -> np.ndarray:
    """Convert 8-bit RGB to BT.601 studio-range luma, as MATLAB's ``rgb2ycbcr``.

    (..., 3) in 0..255 becomes float64 (...) in 16..235. It is not rounded: the papers' figures are
    computed that way.

    Raises:
        ValueError: if the last axis does not have 3 elements.
    """
    import numpy as np

    if rgb.shape[-1] != 3:
        raise ValueError(f"expected RGB in the last axis, got shape {rgb.shape}")
    weights = np.array([65.481, 128.553, 24.966]) / 255.0
    return rgb.astype(np.float64) @ weights + 16.0


def psnr_y(sr: np.ndarray, hr: np.ndarray, crop: int) -> float:
    """Return the PSNR-Y in dB of an upscaled image ``sr`` and its original ``hr``.

    Both are uint8 (H, W, 3). Protocol: luma by `luma_bt601`, ``crop`` pixels removed on all four
    sides (by convention the enlargement factor), peak 255.

    Raises:
        ValueError: for other dtypes or shapes, and where the crop leaves nothing.
    """
    return psnr(*_lumas(sr, hr, crop), peak=255.0)


def _lumas(sr: np.ndarray, hr: np.ndarray, crop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the luma of both images, without their borders."""
    import numpy as np

    for name, image in (("sr", sr), ("hr", hr)):
        if image.dtype != np.uint8 or image.ndim != 3:
            raise ValueError(f"{name} must be uint8 (H, W, 3), not {image.dtype} {image.shape}")
    height, width = hr.shape[:2]
    if crop < 0 or 2 * crop >= min(height, width):
        raise ValueError(
            f"a crop of {crop} is negative or leaves nothing of an image of {width}x{height}"
        )
    _require_same_shape(sr, hr)
    inner = (slice(crop, height - crop), slice(crop, width - crop))
    return luma_bt601(sr[inner]), luma_bt601(hr[inner])


def ssim(a: np.ndarray, b: np.ndarray, peak: float = 1.0) -> float:
    """Return the structural similarity (Wang et al., 2004), 1 for equal images.

    Both are (H, W) or (H, W, C). Computed in float64. Protocol: windows of 11x11 pixels with
    Gaussian weights of sigma 1.5, only those that lie wholly in the image; K1 = 0.01, K2 = 0.03;
    for color images the mean over the channels, which are last. ``peak`` is the value of white.

    Raises:
        ValueError: for different shapes, and for images smaller than a window.
    """
    import numpy as np

    _require_same_shape(a, b)
    if min(a.shape[:2]) < SSIM_WINDOW:
        raise ValueError(
            f"an image of {a.shape[1]}x{a.shape[0]} is smaller than the SSIM window of 11x11"
        )
    a, b = a.astype(np.float64), b.astype(np.float64)
    first, second = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    mean_a, mean_b = _windowed(a), _windowed(b)
    variance_a = _windowed(a * a) - mean_a**2
    variance_b = _windowed(b * b) - mean_b**2
    covariance = _windowed(a * b) - mean_a * mean_b
    numerator = (2 * mean_a * mean_b + first) * (2 * covariance + second)
    denominator = (mean_a**2 + mean_b**2 + first) * (variance_a + variance_b + second)
    return float(np.mean(numerator / denominator))


def ssim_y(sr: np.ndarray, hr: np.ndarray, crop: int) -> float:
    """Return the SSIM of the luma of an upscaled image ``sr`` and its original ``hr``.

    Both are uint8 (H, W, 3), by the protocol of `psnr_y`.

    Raises:
        ValueError: as `psnr_y`, and as `ssim`.
    """
    pair = _lumas(sr, hr, crop)
    return ssim(*pair, peak=255.0)


def _windowed(image: np.ndarray) -> np.ndarray:
    """Return Gaussian-weighted means of all windows in an image (separable filter)."""
    import numpy as np

    places = np.arange(SSIM_WINDOW) - SSIM_WINDOW // 2
    weights = np.exp(-(places**2) / (2 * 1.5**2))
    weights /= weights.sum()
    for axis in (0, 1):
        length = image.shape[axis] - SSIM_WINDOW + 1
        at = [slice(None)] * image.ndim
        mean = 0.0
        for start, weight in enumerate(weights):
            at[axis] = slice(start, start + length)
            mean = mean + weight * image[tuple(at)]
        image = np.asarray(mean)
    return image


def _require_same_shape(a: np.ndarray, b: np.ndarray) -> None:
    """Raise ValueError for images of different shapes or without samples.

    Broadcasting would accept some different shapes.
    """
    if a.shape != b.shape:
        raise ValueError(f"images differ in shape: {a.shape} and {b.shape}")
    if a.size == 0:
        raise ValueError("images are empty")
