"""What the kernels are made of: pixels of a window, their values, and scores."""
# Triton's language has no types, and its functions are not what they look like to a checker.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# Boundary rules as numbers; `zero` and `reflect` see keys beyond the image.
MASK, SHIFT, ZERO, REFLECT = (tl.constexpr(number) for number in range(4))
LOG2E = tl.constexpr(1.4426950408889634)


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
def one_of(number, wide, tall, top, bottom, left, right, INSIDE: tl.constexpr):
    """Row and column of the ``number``-th of ``tall`` × ``wide`` places: of those in a rectangle,
    or of those round it."""
    if INSIDE:
        return top + number // (right - left), left + number % (right - left)
    whole = (tall - (bottom - top)) * wide  # in the rows above and below
    beside = tl.maximum(wide - (right - left), 1)
    row, column = number // wide, number % wide
    row = tl.where(row < top, row, row - top + bottom)
    middle = number - whole
    other = middle % beside
    other = tl.where(other < left, other, other - left + right)
    within = number >= whole
    return tl.where(within, top + middle // beside, row), tl.where(within, other, column)


@triton.jit
def own_window(
    height,
    width,
    heads,
    phase_y,
    phase_x,
    windows_y,
    windows_x,
    top,
    bottom,
    left,
    right,
    STEP: tl.constexpr,
    MARGIN: tl.constexpr,
    SIZE: tl.constexpr,
    BOUNDARY: tl.constexpr,
    TILES: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """A program's batch, head and tile, and where its window's queries and keys begin.

    Grid: windows × tiles of a window's queries, batch × heads.
    """
    tile, head = tl.program_id(0) % TILES, tl.program_id(1) % heads
    batch = tl.program_id(1) // heads
    down, across = one_of(
        tl.program_id(0) // TILES, windows_x, windows_y, top, bottom, left, right, INSIDE
    )
    start_y, start_x = down * STEP - phase_y, across * STEP - phase_x
    first_y = first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
    first_x = first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
    return batch, head, tile, start_y, start_x, first_y, first_x


@triton.jit
def query_tile(tile, start_y, start_x, height, width, STEP: tl.constexpr, QUERIES: tl.constexpr):
    """Rows and columns of a tile of a window's queries, and which of them are there."""
    place = tile * QUERIES + tl.arange(0, QUERIES)
    y, x = start_y + place // STEP, start_x + place % STEP
    return y, x, (place < STEP * STEP) & within_image(y, x, height, width)


@triton.jit
def key_tile(
    tile,
    first_y,
    first_x,
    height,
    width,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    BOUNDARY: tl.constexpr,
):
    """Positions of a tile of a window's keys, their pixels, which are seen, which are read."""
    place = tile * KEYS + tl.arange(0, KEYS)
    y, x = first_y + place // SIZE, first_x + place % SIZE
    within = place < SIZE * SIZE
    inside = within_image(y, x, height, width)
    if BOUNDARY == REFLECT:
        return y, x, _mirrored(y, height), _mirrored(x, width), within, within
    if BOUNDARY == ZERO:
        return y, x, y, x, within, within & inside
    return y, x, y, x, within & inside, within & inside


@triton.jit
def tiles_inside(
    first_y,
    height,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    BOUNDARY: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """The first tile of a window's keys with a row that may be seen, and the one after the last."""
    tiles: tl.constexpr = (SIZE * SIZE + KEYS - 1) // KEYS
    if INSIDE or BOUNDARY == ZERO or BOUNDARY == REFLECT:
        return 0, tiles
    first = tl.maximum(-first_y, 0) * SIZE // KEYS
    return first, tl.minimum((height - first_y) * SIZE + KEYS - 1, tiles * KEYS) // KEYS


@triton.jit
def pixels(base, y, x, row, column, WIDE: tl.constexpr):
    """Pointers to (pixels, WIDE) of a tensor."""
    offsets = y.to(tl.int64) * row + x.to(tl.int64) * column
    return base + offsets[:, None] + tl.arange(0, WIDE)[None, :]


@triton.jit
def _wanted(there, HEAD: tl.constexpr, WIDE: tl.constexpr):
    return there[:, None] & (tl.arange(0, WIDE) < HEAD)[None, :]


@triton.jit
def load_pixels(base, y, x, there, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """(pixels, WIDE) of a tensor; what is not there is zero."""
    wanted = _wanted(there, HEAD, WIDE)
    return tl.load(pixels(base, y, x, row, column, WIDE), mask=wanted, other=0.0)


@triton.jit
def load_all(pointers, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """(pixels, WIDE) that are all there."""
    if HEAD == WIDE:
        return tl.load(pointers)
    return tl.load(pointers, mask=(tl.arange(0, WIDE) < HEAD)[None, :], other=0.0)


@triton.jit
def load_block(
    tensor, batch, y, x, head, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """(ROWS · COLUMNS, WIDE) by a tensor's descriptor; what is not there is zero."""
    return tl.reshape(tensor.load([batch, y, x, head, 0]), (ROWS * COLUMNS, WIDE))


@triton.jit
def load_keys(
    step,
    k,
    v,
    batch,
    head,
    first_y,
    first_x,
    height,
    width,
    k_row,
    k_column,
    v_row,
    v_column,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    TILED: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """A tile of a window's keys and their values, their positions, and which are seen."""
    # Tiles of whole rows of the window: where the next one lies is one addition.
    rows: tl.constexpr = KEYS // SIZE
    row, column = tl.arange(0, KEYS) // SIZE + first_y, tl.arange(0, KEYS) % SIZE + first_x
    if TILED:
        y, x, seen = row + step * rows, column, row == row
        key = load_block(k, batch, first_y + step * rows, first_x, head, rows, SIZE, WIDE)
        value = load_block(v, batch, first_y + step * rows, first_x, head, rows, SIZE, WIDE)
        if not INSIDE and BOUNDARY != ZERO:
            seen = within_image(y, x, height, width)
    elif INSIDE and KEYS % SIZE == 0:
        y, x, seen = row + step * rows, column, row == row
        past = tl.cast(step * rows, tl.int64)
        key = load_all(pixels(k, row, x, k_row, k_column, WIDE) + past * k_row, HEAD, WIDE)
        value = load_all(pixels(v, row, x, v_row, v_column, WIDE) + past * v_row, HEAD, WIDE)
    else:
        y, x, at_y, at_x, seen, read = key_tile(
            step, first_y, first_x, height, width, SIZE, KEYS, BOUNDARY
        )
        key = load_pixels(k, at_y, at_x, read, k_row, k_column, HEAD, WIDE)
        value = load_pixels(v, at_y, at_x, read, v_row, v_column, HEAD, WIDE)
    return key, value, y, x, seen


@triton.jit
def within_image(y, x, height, width):
    """Which pixels are in the image."""
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def store_pixels(base, values, y, x, there, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    wanted = _wanted(there, HEAD, WIDE)
    tl.store(pixels(base, y, x, row, column, WIDE), values, mask=wanted)


@triton.jit
def bias_tile(table, head, down, right, FARTHEST: tl.constexpr):
    """Biases by distance from query to key, in powers of two, from a head's table that stays in
    the cache."""
    side: tl.constexpr = 2 * FARTHEST + 1
    # Pixels that are not there, and are dropped, may be farther than any table knows.
    down = tl.minimum(tl.maximum(down + FARTHEST, 0), side - 1)
    right = tl.minimum(tl.maximum(right + FARTHEST, 0), side - 1)
    return tl.load(table + head * side * side + down * side + right).to(tl.float32) * LOG2E
