"""Error of tiling against the whole image, and of low precision against fp32.

Measured on a sample of this image's tiles.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import numpy as np

from lowtide.core.heap import trim_heap
from lowtide.core.signal import RowSource, ValueAdapter
from lowtide.memory.plan import ImageGeometry, TiledStrategy
from lowtide.streaming.row_window import SlidingRowWindow
from lowtide.streaming.tiles.grid import TileAxis, round_up, split_axis, tile_axes
from lowtide.streaming.tiles.network import RunnableNetwork
from lowtide.streaming.tiles.tile_runner import make_tile_runner

_Axes = tuple[TileAxis, TileAxis]

_MEASURE_ALL_UP_TO, _MAX_SAMPLES, _SAMPLE_SHARE = 9, 8, 0.05
_PRECISION_SAMPLES = 3
# One-sided 99 % points of Student's t for 1, 2, ... degrees of freedom: errors of tiles are skewed,
# and a bound of 95 % failed for one in five images.
_T99 = (31.82, 6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90)


@dataclasses.dataclass(frozen=True)
class SampledError:
    """Error of a sample of tiles, for values in 0..1.

    Attributes:
        psnr_db: Lower bound in dB: of every tile, or the 99 % bound of the mean from the sample.
        max_error: The largest absolute error seen.
        tiles_sampled: Tiles compared.
        tiles_total: Tiles of the image.
        against: Description of the reference.
    """

    psnr_db: float
    max_error: float
    tiles_sampled: int
    tiles_total: int
    against: str


@dataclasses.dataclass(frozen=True)
class _Sample:
    row: int
    column: int
    top: int
    left: int
    height: int
    width: int


def execution_error(
    network: RunnableNetwork,
    adapter: ValueAdapter,
    source: RowSource,
    image: ImageGeometry,
    tiles: TiledStrategy,
    allowed_pixels: int,
) -> SampledError:
    """Measure the error of a sample of tiles against runs with more context.

    The reference is the whole image where ``allowed_pixels`` input pixels at once permit it,
    otherwise each tile with up to half a tile more on every side. ``source`` is read from its start
    and consumed. With blending the result is an upper bound of the blended error, since blending
    averages two tiles' errors.
    """
    rows, columns = tile_axes(image, tiles)
    whole = math.prod(round_up(side, image.align) for side in image.padded_size) <= allowed_pixels
    samples = _choose(image, rows, columns, whole, allowed_pixels)
    step = make_tile_runner(network, adapter)
    squares: list[tuple[float, float]] = []
    largest = 0.0
    reference: np.ndarray | None = None
    # One reference serves all samples when it is the whole image.
    for sample, area in _areas(source, image, samples):
        if reference is None or not whole:
            reference = None  # free the last sample's reference before the next one is computed
            reference = _rounded(step([area])[0], adapter)
            trim_heap()  # tiles and references differ in size: neither fits the other's gaps
        y, x = rows.starts[sample.row], columns.starts[sample.column]
        tile = area[y - sample.top :, x - sample.left :][: rows.tile, : columns.tile]
        result = _rounded(step([tile])[0], adapter)
        square, worst = _compare(result, reference, sample, image, (rows, columns))
        squares.append(square)
        largest = max(largest, worst)
        del result
    margins = _margins(image.align, rows.tile, columns.tile, allowed_pixels)
    context = f"tiles with {min(margins)} px more context on each side"
    return SampledError(
        psnr_db=_decibel(_upper_mean(squares, tiles.tiles)),
        max_error=largest,
        tiles_sampled=len(samples),
        tiles_total=tiles.tiles,
        against="the whole image" if whole else context,
    )


def precision_error(
    network: RunnableNetwork,
    adapter: ValueAdapter,
    source: RowSource,
    image: ImageGeometry,
    allowed_pixels: int,
) -> SampledError:
    """Measure the error of the network's precision against fp32 on parts of the image.

    A part has at most ``allowed_pixels`` input pixels: fp32 takes twice the memory of half
    precision, and a streamed plan never runs the whole image at once. ``source`` is read from its
    start and consumed.
    """
    rows, columns = _part_axes(image, allowed_pixels)
    count = len(rows.starts) * len(columns.starts)
    samples = [
        _Sample(row, column, rows.starts[row], columns.starts[column], rows.tile, columns.tile)
        for row, column in (
            divmod(index, len(columns.starts))
            for index in sorted(
                random.Random(0).sample(range(count), min(count, _PRECISION_SAMPLES))
            )
        )
    ]
    assert network.make_fp32_forward is not None, "low precision needs the same model in fp32"
    exact = dataclasses.replace(network, forward=network.make_fp32_forward(), precision="fp32")
    low, high = make_tile_runner(network, adapter), make_tile_runner(exact, adapter)
    squares: list[tuple[float, float]] = []
    largest = 0.0
    for _, area in _areas(source, image, samples):
        difference = low([area]) - high([area])
        squares.append((float(np.square(difference).sum(dtype=np.float64)), difference.size))
        largest = max(largest, float(abs(difference).max()))
    bound = _decibel(_upper_mean(squares, count))
    return SampledError(bound, largest, len(samples), count, "fp32")


def _part_axes(image: ImageGeometry, allowed_pixels: int) -> _Axes:
    """Split the image into parts of up to ``allowed_pixels``.

    None is smaller than the model accepts.
    """

    def side(length: int, wanted: int) -> int:
        on_grid = max(wanted // image.align, 1) * image.align
        return min(length, max(on_grid, round_up(image.minimum, image.align)))

    height = side(image.padded_height, math.isqrt(allowed_pixels))
    width = height if image.square else side(image.padded_width, allowed_pixels // height)
    rows, columns = (
        split_axis(length, part, 0, align=image.align)
        for length, part in zip(image.padded_size, (height, width), strict=True)
    )
    return rows, columns


def _choose(
    image: ImageGeometry, rows: TileAxis, columns: TileAxis, whole: bool, allowed_pixels: int
) -> list[_Sample]:
    """Choose tiles to measure, from the top down, each with its reference's area."""
    count = total = len(rows.starts) * len(columns.starts)
    if count > _MEASURE_ALL_UP_TO or not whole:
        count = min(count, max(2, min(_MAX_SAMPLES, round(_SAMPLE_SHARE * total))))
    picked = sorted(random.Random(0).sample(range(total), count))
    samples = []
    for index in picked:
        row, column = divmod(index, len(columns.starts))
        if whole:
            samples.append(_Sample(row, column, 0, 0, *image.padded_size))
            continue
        margins = _margins(image.align, rows.tile, columns.tile, allowed_pixels)
        top, height = _extend(rows, row, margins[0])
        left, width = _extend(columns, column, margins[1])
        samples.append(_Sample(row, column, top, left, height, width))
    return samples


def _margins(align: int, height: int, width: int, allowed_pixels: int) -> tuple[int, int]:
    """Return the extra context on each side: up to half a tile, on the grid.

    As far as memory allows. The plan has priced at least one grid step, so that always fits.
    """
    for share in (2, 4, 8):
        margins = [max(align, side // share // align * align) for side in (height, width)]
        if (height + 2 * margins[0]) * (width + 2 * margins[1]) <= allowed_pixels:
            break
    return margins[0], margins[1]


def _extend(axis: TileAxis, index: int, margin: int) -> tuple[int, int]:
    start = max(0, axis.starts[index] - margin)
    return start, min(axis.length, axis.starts[index] + axis.tile + margin) - start


def _areas(
    source: RowSource, image: ImageGeometry, samples: list[_Sample]
) -> Iterator[tuple[_Sample, np.ndarray]]:
    """Yield each sample's reference area, read in one pass down the image."""
    tallest = max(sample.height for sample in samples)
    window = SlidingRowWindow(source, *image.padded_size, tallest)
    for sample in sorted(samples, key=lambda s: s.top):
        rows = window.rows(sample.top, sample.top + sample.height)
        yield sample, rows[:, sample.left : sample.left + sample.width]


def _compare(
    tile: np.ndarray, reference: np.ndarray, sample: _Sample, image: ImageGeometry, axes: _Axes
) -> tuple[tuple[float, float], float]:
    """Return ((squared error, weight) as in the merge, largest error) of a tile.

    Over the tile's own span, within the image only: results for the padding are cut off in the end.
    """
    scale, (rows, columns) = image.scale, axes
    difference, weights = tile, []
    for dim, axis, index, origin, length in (
        (0, rows, sample.row, sample.top, image.height),
        (1, columns, sample.column, sample.left, image.width),
    ):
        low, high = axis.span(index)
        count, start = (min(high, length) - low) * scale, axis.starts[index]
        difference, reference = (
            one.swapaxes(0, dim)[place : place + count].swapaxes(0, dim)
            for one, place in (
                (difference, (low - start) * scale),
                (reference, (low - origin) * scale),
            )
        )
        weights.append(axis.weights(index, scale)[:count])
    weight = np.outer(*weights)[..., None]
    difference = abs(difference - reference)
    largest = float((difference * (weight > 0)).max())
    squares = np.square(difference, out=difference)
    squares *= weight
    total = weight.sum(dtype=np.float64) * difference.shape[-1]
    return (float(squares.sum(dtype=np.float64)), float(total)), largest


def _rounded(values: np.ndarray, adapter: ValueAdapter) -> np.ndarray:
    """Round values as the sink stores them.

    Two results on either side of a rounding boundary differ by a whole step.
    """
    if adapter.dtype.kind == "f":
        return adapter.to_sink(values)
    rounded = adapter.to_sink(values)
    return rounded / np.float32(np.iinfo(rounded.dtype).max)


def _upper_mean(sums: list[tuple[float, float]], population: int) -> float:
    """Return the one-sided 99 % bound of the mean error per pixel.

    The mean itself when all tiles were measured. ``sums`` holds (squared error, weight) for each
    sampled tile. Tiles differ in size, hence a ratio estimate with the spread of its residuals.
    """
    count, total = len(sums), sum(weight for _, weight in sums)
    mean = sum(square for square, _ in sums) / total
    if count == population or count < 2:
        return mean
    residuals = sum((square - mean * weight) ** 2 for square, weight in sums) / (count - 1)
    spread = math.sqrt(residuals) / (total / count)
    unseen = math.sqrt(1 - count / population)
    quantile = _T99[min(count - 2, len(_T99) - 1)]
    return mean + quantile * spread * unseen / math.sqrt(count)


def _decibel(square: float) -> float:
    return math.inf if square <= 0 else -10 * math.log10(square)
