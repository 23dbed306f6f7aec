"""Comparisons after a denoising run: scores against clean files, and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from lowtide.core.errors import UsageError, install_extra
from lowtide.core.figure_file import save_figure
from lowtide.core.metrics import psnr
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.jobs.denoise.report import DenoisedImageReport, DenoiseReport
from lowtide.jobs.denoise.scores import find_references, score_files
from lowtide.jobs.engine.report import write_sidecar
from lowtide.jobs.images.detail_picture import (
    PictureRowReader,
    most_detailed_part,
    panels_side_by_side,
    require_comparison,
)
from lowtide.jobs.images.job import ImageJob
from lowtide.jobs.images.run import Inputs, find_jobs
from lowtide.jobs.images.settings import ImageSettings
from lowtide.media.discover import IMAGES, MediaKind

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
        name: PictureRowReader(Path(one), Path(image.input), max_pixels, scratch)
        for name, one in (("noisy", image.input), ("denoised", image.output))
    }
    detail = most_detailed_part(rows["denoised"])
    panels = {name: one.cut(detail) for name, one in rows.items()}
    clean = (
        None
        if reference is None
        else PictureRowReader(reference, Path(image.input), max_pixels, scratch).cut(detail)
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
    save_figure(panels_side_by_side(titled, note), path, replace=replace)


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


@dataclass(frozen=True)
class ReferenceFiles:
    """Clean files by input, and the path of a picture; both may be absent.

    ``force`` is whether a file at that path is replaced.
    """

    settings: ImageSettings
    references: dict[str, Path] = field(default_factory=dict)
    picture: Path | None = None
    force: bool = False

    @classmethod
    def find(
        cls,
        kind: MediaKind,
        inputs: Inputs,
        output: str | Path,
        settings: ImageSettings,
        reference: str | Path | None,
        picture: str | Path | None,
        *,
        force: bool,
    ) -> Self:
        """Check all that a comparison of files of a kind needs, before anything runs.

        Raises:
            UsageError: The kind is not that of photographs, a clean file is missing, or the picture
                cannot be made.
            ImageError: A clean file cannot be read, or has another size than its input.
        """
        if reference is None and picture is None:
            return cls(settings)
        if kind is not IMAGES:
            raise UsageError(
                f"--reference and --comparison are for images, not for a {kind.noun}",
                hint="drop them",
            )
        found, _ = find_jobs(inputs, output, settings, ImageJob)
        references = {}
        if reference is not None:
            references = find_references(found.pairs, Path(reference), settings.max_pixels)
        if picture is not None:
            require_comparison(Path(picture), found, references.values(), force=force)
            non_local_means(np.zeros((8, 8, 1)), 0.1)  # which may not be installed
        return cls(settings, references, None if picture is None else Path(picture), force)

    def make(self, report: DenoiseReport, *, sidecar: bool, cancel: Cancel) -> None:
        """Add scores to the images of ``report`` and their sidecar files, and draw the picture.

        Images that an earlier run finished are scored too.
        """
        if not self.references and self.picture is None:
            return
        limit = self.settings.max_pixels
        scratch = Path(self.settings.scratch) if self.settings.scratch else None
        for image in report.images:
            raise_if_cancelled(cancel)
            reference = self.references.get(image.input)
            if reference is not None and image.status in ("done", "skipped"):
                files = Path(image.input), Path(image.output), reference
                image.scores = score_files(*files, limit, scratch)
                if sidecar and image.status == "done":
                    write_sidecar(report, image)
            if self.picture is not None:
                files = self.picture, image, reference
                draw_comparison(*files, limit, scratch, replace=self.force)
