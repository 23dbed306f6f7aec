"""Merging: every pixel is written once, whatever the order in which a row's tiles arrive."""

import random

import numpy as np
import pytest

from lowtide.streaming.engine.source_run import IdentityAdapter
from lowtide.streaming.tiles.grid import split_axis
from lowtide.streaming.tiles.runner import StripMerger
from support.toy_models import ArraySink


def coordinates(height, width, scale):
    """A picture of its own coordinates, so that a misplaced pixel shows."""
    sides = (np.linspace(0, 1, side * scale, dtype=np.float32) for side in (height, width))
    y, x = np.meshgrid(*sides, indexing="ij")
    return np.stack([y, x, (y + x) / 2], axis=-1)


def merge(height, width, scale, tile, overlap, blend, *, order=None):
    """Cut the coordinate picture into tiles and put it together again."""
    whole = coordinates(height, width, scale)
    rows, columns = (split_axis(side, tile, overlap, blend=blend) for side in (height, width))
    sink = ArraySink()
    merger = StripMerger(rows, columns, IdentityAdapter(3), sink, (height, width), scale)
    for row, top in enumerate(rows.starts):
        indices = list(range(len(columns.starts)))
        if order is not None:
            order.shuffle(indices)
        for column in indices:
            left = columns.starts[column]
            part = whole[top * scale : (top + rows.tile) * scale]
            merger.add(row, column, part[:, left * scale : (left + columns.tile) * scale])
        merger.finish_row(row)
    return sink.commit(), whole


@pytest.mark.parametrize(("tile", "overlap", "blend"), [(16, 4, 0), (16, 4, 4), (40, 16, 9)])
@pytest.mark.parametrize("scale", [1, 2])
def test_puts_every_pixel_back_for_every_width_and_height(tile, overlap, blend, scale):
    # Each length from 1 to 200 occurs as a height and as a width.
    for height in range(1, 201, 1 if scale == 1 else 7):
        width = 201 - height
        merged, whole = merge(height, width, scale, tile, overlap, blend)
        assert merged.shape == whole.shape
        np.testing.assert_allclose(merged, whole, rtol=0, atol=1e-6)


# Sums of floats round by their order, and by no more than that.
@pytest.mark.parametrize(("blend", "rounding"), [(0, 0), (8, 2e-7)])
def test_the_order_of_tiles_does_not_matter(blend, rounding):
    generator = random.Random(0)
    for _ in range(20):
        size = generator.randint(1, 200), generator.randint(1, 200)
        straight, _ = merge(*size, 2, 24, 8, blend)
        shuffled, _ = merge(*size, 2, 24, 8, blend, order=generator)
        np.testing.assert_allclose(straight, shuffled, rtol=0, atol=rounding)
