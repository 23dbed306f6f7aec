"""Triton kernel of the halo attention's forward pass, and what all halo kernels share.

One program per query tile. ``fixed`` are the kernel's `KernelConstants`, ``image`` is (height,
width, heads, phase along the rows, phase along the columns), and ``strides`` are a tensor's along
B, H, W and heads.
"""
# Triton's language has no types, and type checkers cannot analyze its functions.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mirrored(at, length):
    """Reflect a position into the image, for windows of any size."""
    period = tl.maximum(2 * (length - 1), 1)
    at = at % period
    at = tl.where(at < 0, at + period, at)
    return tl.minimum(at, period - at) % length


@triton.jit
def first_key(start, length, fixed):
    """Return the first key of a window whose queries begin at ``start``."""
    first = start - fixed.halo
    if fixed.boundary == "shift":
        first = tl.maximum(tl.minimum(first, length - fixed.size), 0)
    return first


@triton.jit
def one_of(number, wide, tall, inner, fixed):
    """Return row and column of the ``number``-th place inside or outside a rectangle.

    The places form a grid of ``tall`` × ``wide``; ``inner`` is the rectangle's (top, bottom, left,
    right). ``fixed.inside`` counts the places in it, otherwise those around it count.
    """
    top, bottom, left, right = inner
    if fixed.inside:
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
def own_window(image, grid, tiles, fixed):
    """Return a program's place (batch, head, first key), tile, and window's first query.

    Grid: windows × tiles of a window's queries, batch × heads.
    """
    height, width, heads, phase_y, phase_x = image
    windows_y, windows_x, top, bottom, left, right = grid
    tile, head = tl.program_id(0) % tiles, tl.program_id(1) % heads
    batch = tl.program_id(1) // heads
    inner = top, bottom, left, right
    down, across = one_of(tl.program_id(0) // tiles, windows_x, windows_y, inner, fixed)
    start_y, start_x = down * fixed.stride - phase_y, across * fixed.stride - phase_x
    first_y = first_key(start_y, height, fixed)
    first_x = first_key(start_x, width, fixed)
    return (batch, head, first_y, first_x), tile, start_y, start_x


@triton.jit
def query_tile(tile, start_y, start_x, image, fixed):
    """Return rows and columns of a tile of a window's queries, and which exist."""
    place = tile * fixed.tile.queries + tl.arange(0, fixed.tile.queries)
    y, x = start_y + place // fixed.stride, start_x + place % fixed.stride
    return y, x, (place < fixed.stride * fixed.stride) & within_image(y, x, image)


@triton.jit
def key_tile(tile, first_y, first_x, image, fixed):
    """Return positions of a tile of a window's keys, their pixels, and two masks.

    The masks are the keys that are seen and the keys that are loaded.
    """
    place = tile * fixed.tile.keys + tl.arange(0, fixed.tile.keys)
    y, x = first_y + place // fixed.size, first_x + place % fixed.size
    within = place < fixed.size * fixed.size
    inside = within_image(y, x, image)
    if fixed.boundary == "reflect":
        return y, x, _mirrored(y, image[0]), _mirrored(x, image[1]), within, within
    if fixed.boundary == "zero":
        return y, x, y, x, within, within & inside
    return y, x, y, x, within & inside, within & inside


@triton.jit
def tiles_inside(first_y, image, fixed):
    """Return the range [first, last) of a window's key tiles that may be seen."""
    size: tl.constexpr = fixed.size
    keys: tl.constexpr = fixed.tile.keys
    tiles: tl.constexpr = (size * size + keys - 1) // keys
    if fixed.inside or fixed.boundary == "zero" or fixed.boundary == "reflect":
        return 0, tiles
    first = tl.maximum(-first_y, 0) * size // keys
    return first, tl.minimum((image[0] - first_y) * size + keys - 1, tiles * keys) // keys


@triton.jit
def head_of(base, batch, head, strides):
    """Return a pointer to the first element of a head."""
    return base + (batch.to(tl.int64) * strides[0] + head * strides[3])


@triton.jit
def pixel_pointers(base, y, x, strides, fixed):
    """Return pointers to (pixels, padded head dim) elements of a head."""
    offsets = y.to(tl.int64) * strides[1] + x.to(tl.int64) * strides[2]
    return base + offsets[:, None] + tl.arange(0, fixed.padded_dim)[None, :]


@triton.jit
def _wanted(valid, fixed):
    return valid[:, None] & (tl.arange(0, fixed.padded_dim) < fixed.head_dim)[None, :]


@triton.jit
def load_pixels(base, y, x, valid, strides, fixed):
    """Load (pixels, padded head dim) elements of a head, zero where masked."""
    wanted = _wanted(valid, fixed)
    return tl.load(pixel_pointers(base, y, x, strides, fixed), mask=wanted, other=0.0)


@triton.jit
def load_all(pointers, fixed):
    """Load (pixels, padded head dim) elements of pixels that are all in the image."""
    if fixed.head_dim == fixed.padded_dim:
        return tl.load(pointers)
    wanted = (tl.arange(0, fixed.padded_dim) < fixed.head_dim)[None, :]
    return tl.load(pointers, mask=wanted, other=0.0)


@triton.jit
def load_block(tensor, batch, y, x, head, rows: tl.constexpr, columns: tl.constexpr, fixed):
    """Load (rows · columns, padded head dim) by a descriptor, zero out of bounds."""
    dim: tl.constexpr = fixed.padded_dim
    return tl.reshape(tensor.load([batch, y, x, head, 0]), (rows * columns, dim))


@triton.jit
def load_keys(step, k, v, place, image, k_strides, v_strides, fixed):
    """Load a tile of a window's keys and values, their positions, and which are seen."""
    batch, head, first_y, first_x = place
    size: tl.constexpr = fixed.size
    keys: tl.constexpr = fixed.tile.keys
    # Tiles are whole rows of the window, so that the next one is one pointer addition further.
    rows: tl.constexpr = keys // size
    row, column = tl.arange(0, keys) // size + first_y, tl.arange(0, keys) % size + first_x
    if fixed.tiled:
        y, x, seen = row + step * rows, column, row == row
        key = load_block(k, batch, first_y + step * rows, first_x, head, rows, size, fixed)
        value = load_block(v, batch, first_y + step * rows, first_x, head, rows, size, fixed)
        if not fixed.inside and fixed.boundary != "zero":
            seen = within_image(y, x, image)
    elif fixed.inside and keys % size == 0:
        y, x, seen = row + step * rows, column, row == row
        past = tl.cast(step * rows, tl.int64)
        key = load_all(pixel_pointers(k, row, x, k_strides, fixed) + past * k_strides[1], fixed)
        value = load_all(pixel_pointers(v, row, x, v_strides, fixed) + past * v_strides[1], fixed)
    else:
        y, x, at_y, at_x, seen, read = key_tile(step, first_y, first_x, image, fixed)
        key = load_pixels(k, at_y, at_x, read, k_strides, fixed)
        value = load_pixels(v, at_y, at_x, read, v_strides, fixed)
    return key, value, y, x, seen


@triton.jit
def within_image(y, x, image):
    """Return a mask of the pixels inside the image."""
    return (y >= 0) & (y < image[0]) & (x >= 0) & (x < image[1])


@triton.jit
def store_pixels(base, values, y, x, valid, strides, fixed):
    """Store (pixels, padded head dim) values to a head, except where masked."""
    tl.store(pixel_pointers(base, y, x, strides, fixed), values, mask=_wanted(valid, fixed))


@triton.jit
def bias_tile(table, head, down, right, fixed):
    """Load biases by distance from query to key, scaled by log2 e.

    The head's table stays in the cache.
    """
    farthest: tl.constexpr = fixed.max_distance
    side: tl.constexpr = 2 * farthest + 1
    # Masked pixels may be farther than the table covers.
    down = tl.minimum(tl.maximum(down + farthest, 0), side - 1)
    right = tl.minimum(tl.maximum(right + farthest, 0), side - 1)
    return tl.load(table + head * side * side + down * side + right).to(tl.float32) * LOG2E


@triton.jit
def forward(q, k, v, out, sums, table, image, scale, grid, strides, fixed: tl.constexpr):
    """Compute the attention output and the log-sum-exp of each query.

    ``sums`` is (B, heads, H, W, 2): the log-sum-exp in base 2, and an element that the backward
    pass fills. ``grid`` is (windows down, windows across, top, bottom, left, right): windows with
    all keys in the image need no masks, those from row ``top`` to ``bottom`` and from column
    ``left`` to ``right`` of the grid of windows. All other windows get their own launch.

    Grid: windows × tiles of a window's queries, batch × heads.
    """
    queries: tl.constexpr = fixed.tile.queries
    dim: tl.constexpr = fixed.padded_dim
    programs: tl.constexpr = (fixed.stride * fixed.stride + queries - 1) // queries
    height, width, heads, _, _ = image
    q_strides, k_strides, v_strides, o_strides = strides
    place, tile, start_y, start_x = own_window(image, grid, programs, fixed)
    batch, head, first_y, _ = place
    if not fixed.inside and start_y + tile * queries // fixed.stride >= height:
        return  # all of its queries are below the image
    q = head_of(q, batch, head, q_strides)
    if not fixed.tiled:
        k = head_of(k, batch, head, k_strides)
        v = head_of(v, batch, head, v_strides)
    out = head_of(out, batch, head, o_strides)
    sums += 2 * (batch.to(tl.int64) * heads + head) * height * width
    y, x, valid = query_tile(tile, start_y, start_x, image, fixed)
    query = load_pixels(q, y, x, valid, q_strides, fixed)
    # Online softmax before the first key: maximum, sum of weights, weighted sum of values.
    row_max = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    accumulated = tl.zeros([queries, dim], tl.float32)
    first, last = tiles_inside(first_y, image, fixed)
    for step in range(first, last):
        key, value, key_y, key_x, seen = load_keys(
            step, k, v, place, image, k_strides, v_strides, fixed
        )
        scores = tl.dot(query, tl.trans(key), input_precision=fixed.precision)
        unit = scale * LOG2E
        if fixed.has_bias:
            delta_y, delta_x = key_y[None, :] - y[:, None], key_x[None, :] - x[:, None]
            scores = scores * unit + bias_tile(table, head, delta_y, delta_x, fixed)
            unit = 1.0
        if not fixed.inside:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(row_max, tl.max(scores, 1) * unit)
        finite_max = new
        if not fixed.inside:  # queries that have seen no key yet
            finite_max = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores * unit - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        total = total * rescale + tl.sum(weights, 1)
        accumulated = accumulated * rescale[:, None]
        weights = weights.to(value.dtype)
        accumulated = tl.dot(weights, value, accumulated, input_precision=fixed.precision)
        row_max = new
    divisor = tl.where(total == 0, 1.0, total)
    result = (accumulated / divisor[:, None]).to(out.dtype.element_ty)
    store_pixels(out, result, y, x, valid, o_strides, fixed)
    at = 2 * (y.to(tl.int64) * width + x)
    tl.store(sums + at, row_max + tl.log2(divisor), mask=valid)
