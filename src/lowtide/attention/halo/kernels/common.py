"""Shared Triton functions of the halo kernels: window positions, loads and bias."""
# Triton's language has no types, and type checkers cannot analyze its functions.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# Boundary modes as integers; `ZERO` and `REFLECT` have keys beyond the image.
MASK, SHIFT, ZERO, REFLECT = (tl.constexpr(number) for number in range(4))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mirrored(at, length):
    """Reflect a position into the image, for windows of any size."""
    period = tl.maximum(2 * (length - 1), 1)
    at = at % period
    at = tl.where(at < 0, at + period, at)
    return tl.minimum(at, period - at) % length


@triton.jit
def first_key(start, length, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr):
    """Return the first key of a window whose queries begin at ``start``."""
    first = start - MARGIN
    if BOUNDARY == SHIFT:
        first = tl.maximum(tl.minimum(first, length - SIZE), 0)
    return first


@triton.jit
def one_of(number, wide, tall, top, bottom, left, right, INSIDE: tl.constexpr):
    """Return row and column of the ``number``-th place inside or outside a rectangle.

    The places form a grid of ``tall`` × ``wide``. INSIDE counts those in the rectangle, otherwise
    those around it count.
    """
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
    """Return a program's batch, head and tile, and its window's first query and key.

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
    """Return rows and columns of a tile of a window's queries, and which exist."""
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
    """Return positions of a tile of a window's keys, their pixels, and two masks.

    The masks are the keys that are seen and the keys that are loaded.
    """
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
    """Return the range [first, last) of a window's key tiles that may be seen."""
    tiles: tl.constexpr = (SIZE * SIZE + KEYS - 1) // KEYS
    if INSIDE or BOUNDARY == ZERO or BOUNDARY == REFLECT:
        return 0, tiles
    first = tl.maximum(-first_y, 0) * SIZE // KEYS
    return first, tl.minimum((height - first_y) * SIZE + KEYS - 1, tiles * KEYS) // KEYS


@triton.jit
def pixels(base, y, x, row, column, WIDE: tl.constexpr):
    """Return pointers to (pixels, WIDE) elements of a tensor."""
    offsets = y.to(tl.int64) * row + x.to(tl.int64) * column
    return base + offsets[:, None] + tl.arange(0, WIDE)[None, :]


@triton.jit
def _wanted(valid, HEAD: tl.constexpr, WIDE: tl.constexpr):
    return valid[:, None] & (tl.arange(0, WIDE) < HEAD)[None, :]


@triton.jit
def load_pixels(base, y, x, valid, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """Load (pixels, WIDE) elements of a tensor, zero where masked."""
    wanted = _wanted(valid, HEAD, WIDE)
    return tl.load(pixels(base, y, x, row, column, WIDE), mask=wanted, other=0.0)


@triton.jit
def load_all(pointers, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """Load (pixels, WIDE) elements of pixels that are all in the image."""
    if HEAD == WIDE:
        return tl.load(pointers)
    return tl.load(pointers, mask=(tl.arange(0, WIDE) < HEAD)[None, :], other=0.0)


@triton.jit
def load_block(
    tensor, batch, y, x, head, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Load (ROWS · COLUMNS, WIDE) by a tensor descriptor, zero out of bounds."""
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
    """Load a tile of a window's keys and values, their positions, and which are seen."""
    # Tiles are whole rows of the window, so that the next one is one pointer addition further.
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
    """Return a mask of the pixels inside the image."""
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def store_pixels(base, values, y, x, valid, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """Store (pixels, WIDE) values to a tensor, except where masked."""
    wanted = _wanted(valid, HEAD, WIDE)
    tl.store(pixels(base, y, x, row, column, WIDE), values, mask=wanted)


@triton.jit
def bias_tile(table, head, down, right, FARTHEST: tl.constexpr):
    """Load biases by distance from query to key, scaled by log2 e.

    The head's table stays in the cache.
    """
    side: tl.constexpr = 2 * FARTHEST + 1
    # Masked pixels may be farther than the table covers.
    down = tl.minimum(tl.maximum(down + FARTHEST, 0), side - 1)
    right = tl.minimum(tl.maximum(right + FARTHEST, 0), side - 1)
    return tl.load(table + head * side * side + down * side + right).to(tl.float32) * LOG2E
