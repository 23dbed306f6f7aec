"""Grid of tiles along one axis: starts, cuts and blending ramps.

All tiles of an axis have the same length. Starts are multiples of ``align`` (the model's window or
stride), spread evenly, the first at 0; the last tile ends exactly at the end, off that grid where
the length is. Between two neighbors, in the middle of their overlap, is a *cut*: each output pixel
belongs to the tile whose cuts enclose it, and has at least ``overlap // 2`` pixels of context
beyond every cut. Without blending a pixel has one owner; with blending two neighbors share a *ramp*
around their cut, and their weights there sum to 1.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import pairwise, starmap

import numpy as np

from lowtide.core.errors import UsageError
from lowtide.memory.plan import ImageGeometry, TileStrategy

_PIXEL_BLOCK = 8


@dataclass(frozen=True)
class TileAxis:
    """Tiles along one axis, in input pixels.

    ``ramps`` holds one (low, high) pair for each cut between neighbors; low == high is a hard cut.
    Ramps never overlap, so at most two tiles share a pixel.
    """

    length: int
    tile: int
    starts: tuple[int, ...]
    ramps: tuple[tuple[int, int], ...]

    def span(self, index: int) -> tuple[int, int]:
        """Return the pixels to which tile ``index`` contributes: (first, past the last)."""
        low = self.ramps[index - 1][0] if index else 0
        high = self.ramps[index][1] if index < len(self.ramps) else self.length
        return low, high

    def final_end(self, index: int) -> int:
        """Return the end of the pixels that are final once tile ``index`` is merged."""
        return self.ramps[index][0] if index < len(self.ramps) else self.length

    @property
    def blended(self) -> bool:
        """Whether any neighbors share a ramp, so that results are sums."""
        return any(starmap(operator.lt, self.ramps))

    @property
    def context(self) -> int:
        """Least context in pixels that a tile has beyond its span, at inner borders."""
        margins = [
            margin
            for (low, high), (before, after) in zip(self.ramps, pairwise(self.starts), strict=True)
            for margin in (low - after, before + self.tile - high)
        ]
        return min(margins, default=self.length)

    def weights(self, index: int, scale: int) -> np.ndarray:
        """Return the weights of tile ``index`` over its span, one per *output* pixel.

        float32 (pixels · scale,). Hann ramps, sin² up and its complement down: the sum over all
        tiles is 1 at each pixel.
        """
        low, high = self.span(index)
        weights = np.ones((high - low) * scale, np.float32)
        if index:
            up = _hann_ramp(self.ramps[index - 1], scale)
            weights[: len(up)] = up
        if index < len(self.ramps):
            down = 1 - _hann_ramp(self.ramps[index], scale)
            weights[len(weights) - len(down) :] = down
        return weights


def _hann_ramp(ramp: tuple[int, int], scale: int) -> np.ndarray:
    """Return the rising half of a Hann window over ``ramp``, from 0 to 1.

    float32 (pixels · scale,), sampled at output pixel centers.
    """
    count = (ramp[1] - ramp[0]) * scale
    centers = (np.arange(count, dtype=np.float64) + 0.5) / max(count, 1)
    return (np.sin(np.pi / 2 * centers) ** 2).astype(np.float32)


def split_axis(length: int, tile: int, overlap: int, *, align: int = 1, blend: int = 0) -> TileAxis:
    """Cover ``length`` pixels with tiles of ``tile`` pixels and at least ``overlap``.

    ``tile`` must be a multiple of ``align``, unless it is as long as the axis; a longer one is
    shortened to it. ``blend`` is the width of the ramp at each cut and may not exceed the overlap.
    Raises `UsageError` if the overlap leaves no room to advance.
    """
    if not 0 <= blend <= overlap:
        raise UsageError(f"blend width {blend} must be between 0 and the overlap {overlap}")
    if tile >= length:
        return TileAxis(length, length, (0,), ())
    if tile % align:
        raise UsageError(f"a tile of {tile} is not a multiple of {align}")
    count = tile_count(length, tile, overlap, align)
    # Even spacing turns the slack of the last tile into overlap everywhere. Rounding up to the grid
    # keeps neighbors within `step`, because `step` is itself on the grid.
    even_stride = round_up(-(-(length - tile) // (count - 1)), align)
    starts = (*range(0, (count - 1) * even_stride, even_stride), length - tile)
    cuts = [(after + before + tile) // 2 for before, after in pairwise(starts)]
    edges = [0, *cuts, length]
    ramps = []
    for index, cut in enumerate(cuts, start=1):
        # At most half of the way to the next cut, so that ramps never overlap.
        width = min(blend, cut - edges[index - 1], edges[index + 1] - cut)
        low = cut - width // 2
        ramps.append((low, low + width))
    return TileAxis(length, tile, starts, tuple(ramps))


def tile_count(length: int, tile: int, overlap: int, align: int) -> int:
    """Return how many tiles `split_axis` makes; raises as it does for too large an overlap."""
    if tile >= length:
        return 1
    step = (tile - overlap) // align * align
    if step < align:
        raise UsageError(
            f"tile {tile} is too small for an overlap of {overlap} on a grid of {align}",
            hint=f"use a tile of at least {min_tile(overlap, align)}",
        )
    return -(-(length - tile) // step) + 1


def min_tile(overlap: int, align: int) -> int:
    """Return the smallest tile that `split_axis` accepts for this overlap and grid."""
    return round_up(overlap + align, align)


def smallest_equal_tile(length: int, tile: int, overlap: int, align: int, minimum: int = 0) -> int:
    """Return the smallest tile that needs no more tiles than ``tile`` does.

    At least ``minimum``. The excess of a larger tile would only be computed twice. A multiple of 8
    where the grid allows it, since kernels work on blocks of pixels.
    """
    count = tile_count(length, tile, overlap, align)
    aligned_overlap = round_up(overlap, align)
    need = max(minimum, -(-(length + (count - 1) * aligned_overlap) // count))
    multiple = math.lcm(align, _PIXEL_BLOCK)
    return min(tile, length, round_up(need, multiple))


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


def tile_axes(image: ImageGeometry, tiles: TileStrategy) -> tuple[TileAxis, TileAxis]:
    """Return the grid of an image's tiles as (rows, columns)."""
    rows, columns = (
        split_axis(length, tile, tiles.overlap, align=image.align, blend=tiles.blend)
        for length, tile in zip(image.padded_size, tiles.network_size(image), strict=True)
    )
    return rows, columns
