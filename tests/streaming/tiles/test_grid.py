"""Geometry: every length, no model. Weights sum to 1, nothing is missed, context is kept."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import UsageError
from lowtide.streaming.row_window import reflect_index
from lowtide.streaming.tiles.grid import min_tile, smallest_equal_tile, split_axis

TILES = [(8, 0, 1), (16, 4, 1), (33, 12, 1), (32, 8, 8), (64, 20, 16), (48, 16, 16), (25, 24, 1)]


@pytest.mark.parametrize(("tile", "overlap", "align"), TILES)
def test_weights_sum_to_one_for_every_length(tile, overlap, align):
    for length, blend in itertools.product(range(1, 201), {0, overlap}):
        axis = split_axis(length, tile, overlap, align=align, blend=blend)
        for scale in (1, 2, 3):
            total = np.zeros(length * scale, np.float32)
            for index in range(len(axis.starts)):
                low, high = axis.span(index)
                start = axis.starts[index]
                assert start <= low < high <= start + axis.tile
                total[low * scale : high * scale] += axis.weights(index, scale)
            np.testing.assert_allclose(total, 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("tile", "overlap", "align"), TILES)
def test_geometry_of_every_length(tile, overlap, align):
    for length in range(1, 201):
        axis = split_axis(length, tile, overlap, align=align)
        assert axis.starts[0] == 0
        assert axis.starts[-1] + axis.tile == length
        assert all(start % align == 0 for start in axis.starts[:-1])
        assert length % align or axis.starts[-1] % align == 0
        steps = np.diff(axis.starts)
        assert (steps > 0).all()
        assert (axis.tile - steps >= overlap).all()
        assert axis.context >= min(overlap // 2, length)
        settled = [axis.final_end(index) for index in range(len(axis.starts))]
        assert settled == sorted(settled)
        assert settled[-1] == length


@pytest.mark.parametrize(("tile", "overlap", "align"), TILES)
def test_the_tightest_tile_needs_no_more_tiles_and_a_smaller_one_would(tile, overlap, align):
    grain = math.lcm(align, 8)
    for length in range(1, 401):
        count = len(split_axis(length, tile, overlap, align=align).starts)
        tight = smallest_equal_tile(length, tile, overlap, align)
        assert tight <= min(tile, length)
        assert tight % align == 0 or tight == length
        assert len(split_axis(length, tight, overlap, align=align).starts) == count
        smaller = (tight - 1) // grain * grain
        if smaller >= min_tile(overlap, align):
            assert len(split_axis(length, smaller, overlap, align=align).starts) > count
        assert smallest_equal_tile(length, tile, overlap, align, minimum=tile) == min(tile, length)


def test_a_tile_off_the_grid_is_refused():
    with pytest.raises(UsageError, match="not a multiple of 8"):
        split_axis(100, 33, 8, align=8)
    assert split_axis(33, 40, 8, align=8).tile == 33


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ramps_are_disjoint_and_inside_both_tiles(data):
    align = data.draw(st.sampled_from([1, 2, 8, 16]))
    overlap = data.draw(st.integers(0, 60))
    tile = min_tile(overlap, align) + align * data.draw(st.integers(0, 8))
    length = data.draw(st.integers(1, 60 * align))
    axis = split_axis(length, tile, overlap, align=align, blend=data.draw(st.integers(0, overlap)))
    edge = 0
    for index, (low, high) in enumerate(axis.ramps):
        assert edge <= low <= high
        assert axis.starts[index + 1] <= low
        assert high <= axis.starts[index] + axis.tile
        edge = high
    assert edge <= length


def test_impossible_overlap_names_the_smallest_tile():
    with pytest.raises(UsageError, match="too small") as caught:
        split_axis(640, 32, 24, align=16)
    assert "at least 48" in str(caught.value.hint)
    assert split_axis(640, 48, 24, align=16).context >= 12


@pytest.mark.parametrize("length", [1, 2, 5])
def test_padding_follows_reflect_then_repeat(length):
    torch = pytest.importorskip("torch")
    row = torch.arange(float(length))[None, None, None]
    reflected = min(7, length - 1)
    wanted = torch.nn.functional.pad(row, (0, reflected, 0, 0), "reflect")
    wanted = torch.nn.functional.pad(wanted, (0, 7 - reflected, 0, 0), "replicate")
    assert [reflect_index(i, length) for i in range(length + 7)] == wanted.flatten().tolist()
