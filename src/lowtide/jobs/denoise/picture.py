"""Picture of a denoised detail: noisy, denoised, by non-local means, and the residual."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.core.figure_file import save_figure
from lowtide.core.install_hints import install_extra
from lowtide.core.metrics import psnr
from lowtide.jobs.denoise.report import DenoisedImageReport
from lowtide.jobs.images.detail_picture import PictureRows, drawn, most_detailed

# Residuals are drawn from -3 to 3 standard deviations.
_SPAN = 6


def draw_comparison(
    path: Path,
    image: DenoisedImageReport,
    reference: Path | None,
    max_pixels: int,
    scratch: Path | None = None,
    *,
    replace: bool,
) -> None:
    """Write a picture of the most detailed part of a result, at most 480 pixels wide and high.

    One pixel of the image is one of the picture. Panels: the noisy file, the result, non-local
    means with the same noise level, and the noisy file less the result. Titles have the PSNR of
    this detail if there is a reference. An image without noise has no panel of non-local means.

    Raises:
        UsageError: matplotlib or scikit-image is not installed.
        ImageError: A file cannot be read.
        OutputError: The picture cannot be written.
    """
    rows = {
        name: PictureRows(Path(one), Path(image.input), max_pixels, scratch)
        for name, one in (("noisy", image.input), ("denoised", image.output))
    }
    detail = most_detailed(rows["denoised"])
    panels = {name: one.cut(detail) for name, one in rows.items()}
    clean = (
        None
        if reference is None
        else PictureRows(reference, Path(image.input), max_pixels, scratch).cut(detail)
    )
    residual = panels["noisy"] - panels["denoised"]
    if image.sigma:
        panels["non-local means"] = non_local_means(panels["noisy"], image.sigma / 255)
    titled = [
        (name if clean is None else f"{name}, {psnr(one, clean):.2f} dB", one)
        for name, one in panels.items()
    ]
    gain = 1 / (_SPAN * max(float(residual.std()), 1 / 255))
    titled.append((f"residual ×{gain:.1f}, gray is 0", 0.5 + gain * residual))
    note = f"{Path(image.input).name}: {detail.width}×{detail.height} at {detail.left},{detail.top}"
    if image.sigma is not None:
        note += f", sigma {image.sigma:.1f} of 255, {image.sigma_source}"
    save_figure(drawn(titled, note), path, replace=replace)


def non_local_means(noisy: np.ndarray, sigma: float) -> np.ndarray:
    """Return (H, W, C) in 0..1 denoised by scikit-image's non-local means, for comparisons.

    Raises:
        UsageError: scikit-image is not installed.
    """
    try:
        from skimage.restoration import denoise_nl_means
    except ImportError as error:
        raise UsageError(
            "non-local means needs scikit-image", hint=install_extra("train")
        ) from error
    found = denoise_nl_means(
        noisy, patch_size=5, patch_distance=6, h=0.6 * sigma, sigma=sigma, channel_axis=-1
    )
    return found.reshape(noisy.shape).clip(0, 1)
