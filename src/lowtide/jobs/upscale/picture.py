"""Picture of an upscaled detail: before, enlarged by a cubic filter, and after."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lowtide.core.figure_file import save_figure
from lowtide.jobs.images.detail_picture import Detail, PictureRows, drawn, most_detailed
from lowtide.jobs.images.report import ImageReport
from lowtide.models.resample import CubicReads


def draw_enlargement(
    path: Path,
    image: ImageReport,
    model: str,
    max_pixels: int,
    scratch: Path | None = None,
    *,
    replace: bool,
) -> None:
    """Write a picture of the most detailed part of a result, at most 480 pixels wide and high.

    One pixel of the result is one of the picture. Panels: the input at the size of the result by
    cubic interpolation, and the result.

    Raises:
        UsageError: matplotlib is not installed.
        ImageError: A file cannot be read.
        OutputError: The picture cannot be written.
    """
    small, large = (
        PictureRows(Path(one), Path(image.input), max_pixels, scratch)
        for one in (image.input, image.output)
    )
    detail = most_detailed(large)
    panels = [
        (
            f"input, ×{image.out_width / image.width:.4g} by bicubic",
            _enlarged(small, image, detail),
        ),
        (model, large.cut(detail)),
    ]
    note = (
        f"{Path(image.output).name}: {detail.width}×{detail.height} at {detail.left},{detail.top}"
    )
    save_figure(drawn(panels, note), path, replace=replace)


def _enlarged(small: PictureRows, image: ImageReport, detail: Detail) -> np.ndarray:
    """Return a detail (H, W, C) of the input at the size of the result."""
    rows = CubicReads.of(image.height, image.out_height, detail.top, detail.height)
    columns = CubicReads.of(image.width, image.out_width, detail.left, detail.width)
    part = small.cut(Detail(rows.first, columns.first, rows.count, columns.count))
    return columns.along(rows.along(part, 0), 1)
