"""What the kernels are made of: a tile's pixels, their values, and its scores."""
# Triton's language has no types, and its functions are not what they look like to a checker.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

# Boundary rules as numbers; `zero` and `reflect` see keys beyond the image.
MASK, SHIFT, ZERO, REFLECT = (tl.constexpr(number) for number in range(4))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mirrored(at, length):
    """The pixel that a position stands for by reflection, for windows of any size."""
    period = tl.maximum(2 * (length - 1), 1)
    at = at % period
    at = tl.where(at < 0, at + period, at)
    return tl.minimum(at, period - at) % length


@triton.jit
def first_key(start, length, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr):
    """Where a window's keys begin whose queries begin at ``start``."""
    first = start - MARGIN
    if BOUNDARY == SHIFT:
        first = tl.maximum(tl.minimum(first, length - SIZE), 0)
    return first


@triton.jit
def query_tile(
    tile, start_y, start_x, height, width, STEP: tl.constexpr, TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Rows and columns of a tile of a window's queries, and which of them are there."""
    across: tl.constexpr = (STEP + TILE_W - 1) // TILE_W
    place = tl.arange(0, TILE_H * TILE_W)
    down = (tile // across) * TILE_H + place // TILE_W
    right = (tile % across) * TILE_W + place % TILE_W
    y, x = start_y + down, start_x + right
    there = (down < STEP) & (right < STEP) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return y, x, there


@triton.jit
def own_queries(
    height, width, heads, phase_y, phase_x, STEP: tl.constexpr, TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """A program's batch and head, where its window's queries begin, and its tile of them.

    Grid: windows across × tiles of a window, windows down, batch × heads.
    """
    tiles: tl.constexpr = ((STEP + TILE_H - 1) // TILE_H) * ((STEP + TILE_W - 1) // TILE_W)
    tile, head = tl.program_id(0) % tiles, tl.program_id(2) % heads
    batch = (tl.program_id(2) // heads).to(tl.int64)
    start_y = tl.program_id(1) * STEP - phase_y
    start_x = (tl.program_id(0) // tiles) * STEP - phase_x
    y, x, there = query_tile(tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W)
    return batch, head, start_y, start_x, y, x, there


@triton.jit
def key_tile(
    tile, first_y, first_x, height, width, SIZE: tl.constexpr, KEY_H: tl.constexpr,
    KEY_W: tl.constexpr, BOUNDARY: tl.constexpr,
):
    """Positions of a tile of a window's keys, their pixels, which are seen, which are read."""
    across: tl.constexpr = (SIZE + KEY_W - 1) // KEY_W
    place = tl.arange(0, KEY_H * KEY_W)
    down = (tile // across) * KEY_H + place // KEY_W
    right = (tile % across) * KEY_W + place % KEY_W
    y, x = first_y + down, first_x + right
    within = (down < SIZE) & (right < SIZE)
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    if BOUNDARY == REFLECT:
        return y, x, _mirrored(y, height), _mirrored(x, width), within, within
    if BOUNDARY == ZERO:
        return y, x, y, x, within, within & inside
    return y, x, y, x, within & inside, within & inside


@triton.jit
def load_pixels(base, y, x, there, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """(pixels, WIDE) of a tensor; what is not there is zero."""
    dim = tl.arange(0, WIDE)
    offsets = y.to(tl.int64) * row + x.to(tl.int64) * column
    wanted = there[:, None] & (dim < HEAD)[None, :]
    return tl.load(base + offsets[:, None] + dim[None, :], mask=wanted, other=0.0)


@triton.jit
def store_pixels(base, values, y, x, there, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    dim = tl.arange(0, WIDE)
    offsets = y.to(tl.int64) * row + x.to(tl.int64) * column
    wanted = there[:, None] & (dim < HEAD)[None, :]
    tl.store(base + offsets[:, None] + dim[None, :], values, mask=wanted)


@triton.jit
def _bias(table, head, query_y, query_x, key_y, key_x, FARTHEST: tl.constexpr):
    """A score's bias by distance, from a table of one head that stays in the cache."""
    side: tl.constexpr = 2 * FARTHEST + 1
    down = key_y[None, :] - query_y[:, None] + FARTHEST
    right = key_x[None, :] - query_x[:, None] + FARTHEST
    # Pixels that are not there, and are dropped, may be farther than any table knows.
    down = tl.minimum(tl.maximum(down, 0), side - 1)
    right = tl.minimum(tl.maximum(right, 0), side - 1)
    return tl.load(table + head * side * side + down * side + right).to(tl.float32)


@triton.jit
def score_tile(
    q, k, table, head, query_y, query_x, key_y, key_x, seen, scale, HAS_BIAS: tl.constexpr,
    FARTHEST: tl.constexpr, PRECISION: tl.constexpr,
):
    """Scores of a tile in powers of two; what is not seen is minus infinity."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
    if HAS_BIAS:
        bias = _bias(table, head, query_y, query_x, key_y, key_x, FARTHEST)
        scores += bias * _LOG2E
    return tl.where(seen[None, :], scores, float("-inf"))
