"""How far one image is from another, in the figures the field compares.

PSNR = 10 log10(peak**2 / mean squared error), in decibels; identical images give infinity.
The super-resolution protocol (`psnr_y`) is that of the NTIRE challenges and of the papers
since SRCNN: 8-bit pictures, luma only, a border left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SSIM_WINDOW = 11  # pixels on a side, of which a picture must have one at least


def max_error(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference, in the samples' own unit; NaN where either has a NaN.

    Raises ValueError for different shapes or empty arrays.
    """
    import numpy as np

    _require_alike(a, b)
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def psnr(a: np.ndarray, b: np.ndarray, peak: float = 1.0) -> float:
    """PSNR in dB over all samples, computed in float64.

    ``peak`` is the value of white: 1 for floats in 0..1, 255 for 8 bits. Neither image is
    rounded or clipped here. Raises ValueError for different shapes, empty arrays or a peak
    that is not above 0.
    """
    import numpy as np

    _require_alike(a, b)
    if not peak > 0:
        raise ValueError(f"peak must be above 0, not {peak}")
    error = float(np.mean(np.square(a.astype(np.float64) - b.astype(np.float64))))
    return math.inf if error == 0 else 10.0 * math.log10(peak**2 / error)


def luma_bt601(rgb: np.ndarray) -> np.ndarray:
    """BT.601 studio-range luma of 8-bit RGB, as MATLAB's ``rgb2ycbcr`` has it.

    (..., 3) in 0..255 becomes float64 (...) in 16..235. It is not rounded: the papers' figures
    are made that way.
    """
    import numpy as np

    if rgb.shape[-1] != 3:
        raise ValueError(f"expected RGB in the last axis, got shape {rgb.shape}")
    weights = np.array([65.481, 128.553, 24.966]) / 255.0
    return rgb.astype(np.float64) @ weights + 16.0


def psnr_y(sr: np.ndarray, hr: np.ndarray, crop: int) -> float:
    """PSNR-Y in dB of an upscaled image against its original, both uint8 of shape (H, W, 3).

    Protocol: luma by `luma_bt601`, ``crop`` pixels left out on all four sides (by convention
    the enlargement factor), peak 255. Raises ValueError for other types or shapes, and where
    the crop leaves nothing.
    """
    return psnr(*_lumas(sr, hr, crop), peak=255.0)


def _lumas(sr: np.ndarray, hr: np.ndarray, crop: int) -> tuple[np.ndarray, np.ndarray]:
    """The luma of both, without their borders."""
    import numpy as np

    for name, image in (("sr", sr), ("hr", hr)):
        if image.dtype != np.uint8 or image.ndim != 3:
            raise ValueError(f"{name} must be uint8 (H, W, 3), not {image.dtype} {image.shape}")
    height, width = hr.shape[:2]
    if crop < 0 or 2 * crop >= min(height, width):
        raise ValueError(f"a crop of {crop} does not suit an image of {width}x{height}")
    _require_alike(sr, hr)
    inner = (slice(crop, height - crop), slice(crop, width - crop))
    return luma_bt601(sr[inner]), luma_bt601(hr[inner])


def ssim(a: np.ndarray, b: np.ndarray, peak: float = 1.0) -> float:
    """Structural similarity, 1 for equal images, computed in float64 (Wang et al., 2004).

    Protocol: windows of 11x11 pixels with Gaussian weights of 1.5, only those that lie wholly in
    the image; K1 = 0.01, K2 = 0.03; of color images the mean over the channels, which are last.
    ``peak`` is the value of white. Raises ValueError for different shapes, and for images smaller
    than a window.
    """
    import numpy as np

    _require_alike(a, b)
    if min(a.shape[:2]) < SSIM_WINDOW:
        raise ValueError(f"an image of {a.shape[1]}x{a.shape[0]} is smaller than a window of 11")
    a, b = a.astype(np.float64), b.astype(np.float64)
    first, second = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    mean_a, mean_b = _windowed(a), _windowed(b)
    variance_a = _windowed(a * a) - mean_a**2
    variance_b = _windowed(b * b) - mean_b**2
    shared = _windowed(a * b) - mean_a * mean_b
    alike = (2 * mean_a * mean_b + first) * (2 * shared + second)
    apart = (mean_a**2 + mean_b**2 + first) * (variance_a + variance_b + second)
    return float(np.mean(alike / apart))


def ssim_y(sr: np.ndarray, hr: np.ndarray, crop: int) -> float:
    """SSIM of the luma of an upscaled image and its original, both uint8 of shape (H, W, 3), by
    the protocol of `psnr_y`. Raises ValueError as that does, and as `ssim` does."""
    pair = _lumas(sr, hr, crop)
    return ssim(*pair, peak=255.0)


def _windowed(image: np.ndarray) -> np.ndarray:
    """Gaussian means of all windows in an image: down, then across."""
    import numpy as np

    places = np.arange(SSIM_WINDOW) - SSIM_WINDOW // 2
    weights = np.exp(-(places**2) / (2 * 1.5**2))
    weights /= weights.sum()
    for axis in (0, 1):
        length = image.shape[axis] - SSIM_WINDOW + 1
        parts = [np.take(image, range(at, at + length), axis) for at in range(SSIM_WINDOW)]
        image = np.tensordot(weights, np.stack(parts), 1)
    return image


def _require_alike(a: np.ndarray, b: np.ndarray) -> None:
    """Broadcasting would compare what was never meant to be compared."""
    if a.shape != b.shape:
        raise ValueError(f"images differ in shape: {a.shape} and {b.shape}")
    if a.size == 0:
        raise ValueError("images are empty")
