"""Seams of tiles of a window transformer, blended and not, compared with bands.

    LOWTIDE_DATA=... python benchmarks/seams.py [--fresh]

A trained CRAFT on the middle of the example photograph. The reference is a run of the whole image.
A *seam* is where two tiles meet: a cut, or a ramp that blends one into the other. The error of a
tile shows as a step across the cut, so steps are compared too: the difference of the two rows or
columns at each cut, minus that difference in the reference.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ResultFile
from photographs import EXAMPLE, as_array
from torch import Tensor

import lowtide
from lowtide.core.metrics import psnr
from lowtide.jobs.engine.report import reported_db
from lowtide.streaming.tiles.grid import TileAxis, split_axis

TILE, MULTIPLE = 128, 16  # of CRAFT's windows, on which tiles have to start
OVERLAPS = (8, 16, 32)
BLENDS = ("none", "linear", "hann")
# The middle of a photograph is enough to measure seams, and takes less time.
MOST = 512

Axes = tuple[TileAxis, TileAxis]


def center(image: np.ndarray) -> Tensor:
    """The middle of (height, width, 3) in whole windows, as (1, 3, height, width) in 0..1."""
    height, width = (min(side, MOST) // MULTIPLE * MULTIPLE for side in image.shape[:2])
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    part = image[top : top + height, left : left + width]
    return torch.from_numpy(part.astype(np.float32) / 255).permute(2, 0, 1)[None].contiguous()


def axes_of(image: Tensor, overlap: int, blend: int = 0) -> Axes:
    """The tiles of both axes, blended over ``blend`` pixels."""
    height, width = image.shape[2:]
    return (
        split_axis(height, TILE, overlap, align=MULTIPLE, blend=blend),
        split_axis(width, TILE, overlap, align=MULTIPLE, blend=blend),
    )


def weights(axis: TileAxis, index: int, scale: int, *, linear: bool) -> np.ndarray:
    """Those of a tile over its span, one for each pixel of the result: of Hann or linear ramps."""
    found = axis.weights(index, scale)
    if linear:
        rising = [_linear(*ramp, scale) for ramp in axis.ramps]
        if index:
            found[: len(rising[index - 1])] = rising[index - 1]
        if index < len(rising):
            found[len(found) - len(rising[index]) :] = 1 - rising[index]
    return found


def _linear(low: int, high: int, scale: int) -> np.ndarray:
    count = (high - low) * scale
    return (np.arange(count, dtype=np.float32) + 0.5) / max(count, 1)


def merged(tiles: dict[tuple[int, int], Tensor], axes: Axes, scale: int, *, linear: bool) -> Tensor:
    """One image of overlapping results (1, C, H, W), by (row, column)."""
    first = next(iter(tiles.values()))
    total = first.new_zeros(*first.shape[:2], *(axis.length * scale for axis in axes))
    for place, tile in tiles.items():
        spans, parts, ramps = [], [], []
        for axis, index in zip(axes, place, strict=True):
            low, high = axis.span(index)
            start = axis.starts[index]
            spans.append(slice(low * scale, high * scale))
            parts.append(slice((low - start) * scale, (high - start) * scale))
            ramps.append(torch.from_numpy(weights(axis, index, scale, linear=linear)))
        part = tile[..., parts[0], parts[1]]
        total[..., spans[0], spans[1]] += part * ramps[0][:, None] * ramps[1]
    return total


def errors(
    result: Tensor, reference: Tensor, axes: Axes, scale: int, overlap: int
) -> dict[str, Any]:
    """PSNR of all pixels and of those near a cut, the steps across cuts, and the largest error.

    Near is no farther than half of the overlap. Steps are a root mean square, in levels of 255 as
    the largest error is.
    """
    difference = (result - reference).double()
    reach = max(overlap // 2, 1) * scale
    near = torch.zeros(reference.shape[2:], dtype=torch.bool)
    steps = []
    for dim, axis in enumerate(axes):
        for low, high in axis.ramps:
            cut = (low + high) // 2 * scale
            first, past = max(cut - reach, 0), min(cut + reach, near.shape[dim])
            near.narrow(dim, first, past - first).fill_(True)
            edges = difference.narrow(2 + dim, cut - 1, 2)
            steps.append((edges.select(2 + dim, 1) - edges.select(2 + dim, 0)).flatten())
    return {
        "psnr_db": reported_db(psnr(result.numpy(), reference.numpy())),
        "seam_psnr_db": reported_db(psnr(result[..., near].numpy(), reference[..., near].numpy())),
        "step": round(255 * torch.cat(steps).square().mean().sqrt().item(), 4),
        "largest": round(255 * difference.abs().max().item(), 3),
    }


def main() -> None:
    """Measure all rows, or none where they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "seams",
        fresh=options.fresh,
        about=f"CRAFT ×4 in tiles of {TILE} against the whole: blending and overlap.",
    )
    if results.data["rows"]:
        return
    model = lowtide.load(Path(os.environ["LOWTIDE_DATA"]) / "models" / "craft_x4.pth")
    image, scale = center(as_array(EXAMPLE)), model.descriptor.scale
    height, width = image.shape[2:]
    reference = model(image)

    def add(blend: str, overlap: int, result: Tensor, axes: Axes, **more: Any) -> None:
        found = errors(result, reference, axes, scale, overlap)
        size = {"width": width, "height": height, "tile": TILE}
        results.add(f"{blend}, {overlap}", **size, blend=blend, overlap=overlap, **more, **found)

    with torch.inference_mode():
        streamed = lowtide.stream(model.module)(image).clamp_(0, 1)
    add("streamed", 0, streamed, axes_of(image, 0), tiles=1, work=1.0)
    for overlap in OVERLAPS:
        rows, columns = axes_of(image, overlap)
        tiles = {
            (row, column): model(image[..., top : top + TILE, left : left + TILE])
            for row, top in enumerate(rows.starts)
            for column, left in enumerate(columns.starts)
        }
        work = round(len(tiles) * TILE**2 / (height * width), 3)
        for blend in BLENDS:
            used = axes_of(image, overlap, 0 if blend == "none" else overlap)
            result = merged(tiles, used, scale, linear=blend == "linear")
            add(blend, overlap, result, (rows, columns), tiles=len(tiles), work=work)


if __name__ == "__main__":
    main()
