"""Picture of a detail of one image, in panels: what commands draw for `--comparison`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.atomic_file import require_distinct, require_name, require_output
from lowtide.core.errors import UsageError
from lowtide.core.figure_file import DOTS_PER_INCH, new_figure, require_figure_name, save_figure
from lowtide.core.input_file import is_folder
from lowtide.jobs.images.adapter import NoisyImageAdapter
from lowtide.jobs.images.report import ImageReport
from lowtide.jobs.images.value_range import shared_range
from lowtide.media import open_image
from lowtide.media.discover import DiscoveredFiles
from lowtide.models.resample import CubicReads

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Sides in pixels of the detail, and of the blocks in which it is looked for.
_SIDE, _BLOCK = 480, 16
_GAP, _HEADER, _FOOTER = 8, 24, 24


@dataclass(frozen=True)
class DetailRectangle:
    """Rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def require_comparison(
    path: Path, found: DiscoveredFiles, others: Iterable[Path] = (), *, force: bool
) -> None:
    """Raise `UsageError` where a picture cannot be made, before anything runs.

    ``others`` are files that are read besides the input.
    """
    if not found.single_file:
        raise UsageError(
            f"--comparison draws one file, and there are {len(found.pairs)} inputs or the output is"
            " a folder",
            hint="name one file, and a file for -o",
        )
    require_name(path)
    require_figure_name(path)
    (pair,) = found.pairs
    require_distinct([pair.target, path], [pair.source, *others])
    if not is_folder(path.parent):
        raise UsageError(f"{path}: there is no such folder", hint="name a folder that exists")
    require_output(path, force=force)


class PictureRowReader:
    """Color rows (N, W, C) of a file in 0..1, from the top down as often as needed.

    0..1 is the range of the values of ``like``.
    """

    def __init__(self, path: Path, like: Path, max_pixels: int, scratch: Path | None) -> None:
        self._path, self._max_pixels, self._scratch = path, max_pixels, scratch
        self._range = shared_range(path, like, max_pixels, scratch)

    def __iter__(self) -> Iterator[np.ndarray]:
        with open_image(
            self._path,
            max_pixels=self._max_pixels,
            scratch_dir=self._scratch,
            value_range=self._range,
        ) as source:
            adapter = NoisyImageAdapter(source.info, 3)
            for first in range(0, source.shape[0], _BLOCK):
                yield adapter.color(source.read(first, first + _BLOCK))

    def cut(self, detail: DetailRectangle) -> np.ndarray:
        """Return a detail (H, W, C) as float64."""
        kept, first = [], 0
        for rows in self:
            start, end = (
                min(max(row - first, 0), len(rows))
                for row in (detail.top, detail.top + detail.height)
            )
            kept.append(
                rows[start:end, detail.left : detail.left + detail.width].astype(np.float64)
            )
            first += len(rows)
        return np.concatenate(kept)


def most_detailed_part(rows: PictureRowReader) -> DetailRectangle:
    """Return the part of an image, 480 pixels wide and high or all, with the largest gradients."""
    strips, height, width = [], 0, 0
    for color in rows:
        gray, width = color.mean(2), color.shape[1]
        change = np.zeros(width)
        change[1:] += np.abs(np.diff(gray, axis=1)).sum(0)
        change += np.abs(np.diff(gray, axis=0)).sum(0)
        strips.append(np.add.reduceat(change, np.arange(0, width, _BLOCK)))
        height += len(color)
    sums = np.pad(np.stack(strips).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    tall, wide = (min(_SIDE // _BLOCK, size - 1) for size in sums.shape)
    inside = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    row, column = np.unravel_index(inside.argmax(), inside.shape)
    shown = min(_SIDE, height), min(_SIDE, width)
    return DetailRectangle(
        min(int(row) * _BLOCK, height - shown[0]),
        min(int(column) * _BLOCK, width - shown[1]),
        *shown,
    )


def panels_side_by_side(panels: list[tuple[str, np.ndarray]], note: str) -> Figure:
    """Return images (H, W, C) of one size side by side, with titles, and a note below."""
    height, width, _ = panels[0][1].shape
    cell = max(width, 200)  # room for a title
    whole = _GAP + len(panels) * (cell + _GAP), _HEADER + height + _FOOTER
    figure = new_figure(*(side / DOTS_PER_INCH for side in whole), layout=None)
    for place, (title, image) in enumerate(panels):
        left = _GAP + place * (cell + _GAP)
        box = left / whole[0], _FOOTER / whole[1], width / whole[0], height / whole[1]
        panel = figure.add_axes(box)
        panel.set_axis_off()
        panel.imshow(
            image.clip(0, 1).repeat(3 // image.shape[2], 2), interpolation="nearest", aspect="auto"
        )
        figure.text(left / whole[0], 1 - 0.75 * _HEADER / whole[1], title, fontsize=8)
    figure.text(_GAP / whole[0], 0.3 * _FOOTER / whole[1], note, fontsize=7, color="0.3")
    return figure


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
        PictureRowReader(Path(one), Path(image.input), max_pixels, scratch)
        for one in (image.input, image.output)
    )
    detail = most_detailed_part(large)
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
    save_figure(panels_side_by_side(panels, note), path, replace=replace)


def _enlarged(small: PictureRowReader, image: ImageReport, detail: DetailRectangle) -> np.ndarray:
    """Return a detail (H, W, C) of the input at the size of the result."""
    rows = CubicReads.of(image.height, image.out_height, detail.top, detail.height)
    columns = CubicReads.of(image.width, image.out_width, detail.left, detail.width)
    part = small.cut(DetailRectangle(rows.first, columns.first, rows.count, columns.count))
    return columns.along(rows.along(part, 0), 1)
