"""Benchmark of tile seams: no blending, linear, Hann, and streamed bands.

The reference is a run of the whole image. A *seam* is where two tiles meet: a cut, or a ramp that
blends one into the other. The error of a tile shows as a step across the cut, so steps are
compared too: the difference of the two rows or columns at each cut, minus that difference in the
reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from lowtide.core.errors import UsageError
from lowtide.core.metrics import psnr
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.devices import resolve_device
from lowtide.jobs.image_adapter import ImageAdapter
from lowtide.jobs.report import reported_db
from lowtide.media import open_image
from lowtide.models import Model, load
from lowtide.streaming.api import stream
from lowtide.streaming.tiles.grid import TileAxis, split_axis

if TYPE_CHECKING:
    from torch import Tensor

OVERLAPS = (8, 16, 32)
BLENDS = ("none", "linear", "hann")
# The middle of a photograph is enough to measure seams, and takes less time.
_MAX_SIDE = 512
# Attention windows of most models are 8 or 16 pixels, and tiles have to start on a window.
_TILE_MULTIPLE = 16


class SeamResult(BaseModel):
    """Errors of one tiling and blending method against a run of the whole image.

    ``psnr_db`` is over all pixels, ``seam_psnr_db`` over pixels no farther from a cut than half the
    overlap, both for a value range of 1, and None where there is no difference. ``step_rms`` is the
    root mean square of the error of steps across cuts, in levels of 255, and ``max_error`` the
    largest absolute error, in the same levels. ``work`` is the number of pixels that were run,
    shared pixels counted once per tile, divided by the image's.
    """

    blend: str
    overlap: int
    tiles: int
    psnr_db: float | None
    seam_psnr_db: float | None
    step_rms: float
    max_error: float
    work: float


class SeamReport(BaseModel):
    """Seam errors of all methods for one image and model."""

    schema_version: int = SCHEMA_VERSION
    image: str
    width: int
    height: int
    model: str
    tile: int
    rows: list[SeamResult] = []


def compare_seams(
    image: str | Path,
    *,
    model: str = "lowtide-x2",
    device: str = "auto",
    tile: int = 128,
    budget: str | int = "auto",
    progress: Callable[[str], None] | None = None,
    cancel: Cancel = None,
) -> SeamReport:
    """Compare tiled, blended and streamed runs with a run of the whole image.

    Runs at most the middle 512 pixels of each side of ``image``, in fp32, in tiles of ``tile``
    pixels.

    Raises:
        UsageError: ``tile`` is not a multiple of 16 or not smaller than the image, the model cannot
            be streamed, or the image or the model is not RGB.
    """
    import torch

    loaded = load(model).to(device=resolve_device(device))
    pixels = _center_crop(Path(image), loaded)
    height, width = pixels.shape[2:]
    if tile % _TILE_MULTIPLE or tile >= max(height, width) or tile <= max(OVERLAPS):
        raise UsageError(
            f"--tile {tile}: tiles here have to be multiples of {_TILE_MULTIPLE}, larger than"
            f" {max(OVERLAPS)} and smaller than the longer side, {max(height, width)}"
        )
    report = SeamReport(image=str(image), width=width, height=height, model=model, tile=tile)

    def report_step(what: str) -> None:
        check_cancel(cancel)
        if progress is not None:
            progress(what)

    report_step("the whole image")
    reference = loaded(pixels)
    scale = loaded.descriptor.scale
    cuts = (
        split_axis(height, tile, 0, align=_TILE_MULTIPLE),
        split_axis(width, tile, 0, align=_TILE_MULTIPLE),
    )
    report_step("bands of rows")
    streamed = stream(loaded.module, budget=budget)
    with torch.inference_mode():
        result = streamed(pixels).clamp_(0, 1)
    report.rows.append(_seam_result("streamed", 0, 1, 1.0, result, reference, cuts, scale))
    for overlap in OVERLAPS:
        axes = [
            [
                split_axis(side, tile, overlap, align=_TILE_MULTIPLE, blend=blend)
                for side in (height, width)
            ]
            for blend in (0, overlap)
        ]
        report_step(f"tiles with an overlap of {overlap} pixels")
        (rows, columns), blended = axes
        tiles = _tiles(loaded, pixels, rows, columns)
        work = len(rows.starts) * len(columns.starts) * rows.tile * columns.tile
        for name in BLENDS:
            used = (rows, columns) if name == "none" else (blended[0], blended[1])
            result = merge_tiles(tiles, *used, scale, linear=name == "linear")
            report.rows.append(
                _seam_result(
                    name,
                    overlap,
                    len(tiles),
                    work / (height * width),
                    result,
                    reference,
                    (rows, columns),
                    scale,
                )
            )
    return report


def _center_crop(path: Path, model: Model) -> Tensor:
    """(1, 3, height, width) of whole cells of the grid."""
    import torch

    with open_image(path) as image:
        info = image.info
        pixels = image.read(0, info.height)[..., :3]
    if info.color_channels != 3 or model.descriptor.in_channels != 3:
        raise UsageError("seams are compared on an RGB image, with a model for RGB images")
    grid = math.lcm(_TILE_MULTIPLE, model.descriptor.size.multiple_of)
    height, width = (min(side, _MAX_SIDE) // grid * grid for side in (info.height, info.width))
    if not height or not width:
        raise UsageError(f"{path}: {info.width}×{info.height} pixels is too small for tiles")
    top, left = (info.height - height) // 2, (info.width - width) // 2
    adapter = ImageAdapter(replace(info, channels=3), 3)
    inputs = adapter.to_network(pixels[None, top : top + height, left : left + width])
    return torch.from_numpy(inputs).to(model.device)


def _tiles(
    model: Model, image: Tensor, rows: TileAxis, columns: TileAxis
) -> dict[tuple[int, int], Tensor]:
    """Return the model's result for each tile, by (row, column)."""
    return {
        (row, column): model(image[..., top : top + rows.tile, left : left + columns.tile])
        for row, top in enumerate(rows.starts)
        for column, left in enumerate(columns.starts)
    }


def merge_tiles(
    tiles: dict[tuple[int, int], Tensor],
    rows: TileAxis,
    columns: TileAxis,
    scale: int,
    *,
    linear: bool,
) -> Tensor:
    """Merge overlapping result tiles into one image, weighted by Hann or linear ramps.

    Tiles are (B, C, H, W), by (row, column). ``linear`` replaces the ramps of the axes with linear
    ones.
    """
    import torch

    size = rows.length * scale, columns.length * scale
    first_tile = next(iter(tiles.values()))
    total = first_tile.new_zeros(*first_tile.shape[:2], *size)
    for (row, column), tile in tiles.items():
        spans, weights, places = [], [], []
        for axis, index in ((rows, row), (columns, column)):
            low, high = axis.span(index)
            spans.append(slice(low * scale, high * scale))
            first = (low - axis.starts[index]) * scale
            places.append(slice(first, first + (high - low) * scale))
            weights.append(
                torch.from_numpy(axis.weights(index, scale, linear=linear)).to(tile.device)
            )
        part = tile[..., places[0], places[1]]
        total[..., spans[0], spans[1]] += part * weights[0][:, None] * weights[1]
    return total


def _seam_result(
    blend: str,
    overlap: int,
    tiles: int,
    work: float,
    result: Tensor,
    reference: Tensor,
    axes: tuple[TileAxis, TileAxis],
    scale: int,
) -> SeamResult:
    import torch

    difference = (result - reference).double()
    reach = max(overlap // 2, 1) * scale
    near = torch.zeros(reference.shape[2:], dtype=torch.bool, device=reference.device)
    steps = []
    for dim, axis in enumerate(axes):
        for low, high in axis.ramps:
            cut = (low + high) // 2 * scale
            first, past = max(cut - reach, 0), min(cut + reach, near.shape[dim])
            near.narrow(dim, first, past - first).fill_(True)
            edges = difference.narrow(2 + dim, cut - 1, 2)
            steps.append((edges.select(2 + dim, 1) - edges.select(2 + dim, 0)).flatten())
    step_errors = torch.cat(steps) if steps else difference.new_zeros(1)
    return SeamResult(
        blend=blend,
        overlap=overlap,
        tiles=tiles,
        psnr_db=_psnr(result, reference),
        seam_psnr_db=_psnr(result[..., near], reference[..., near]),
        work=round(work, 3),
        step_rms=round(255 * float(step_errors.square().mean().sqrt()), 4),
        max_error=round(255 * float(difference.abs().max()), 3),
    )


def _psnr(one: Tensor, other: Tensor) -> float | None:
    return reported_db(psnr(one.cpu().numpy(), other.cpu().numpy())) if one.numel() else None
