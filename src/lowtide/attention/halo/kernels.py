"""Triton kernels for attention in halo windows, straight from (batch, height, width, heads, dim).

A program computes a tile of one window's queries. Which keys it sees is arithmetic, so that nothing
is unfolded, padded or masked in memory. In the backward pass a program gathers what its own tile
needs, so that there are no atomics and results are the same every time. Scores are in powers of
two; softmax and all sums are in fp32.

The file is only imported where Triton is.
"""
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
def _first_key(start, length, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr):
    """Where a window's keys begin whose queries begin at ``start``."""
    first = start - MARGIN
    if BOUNDARY == SHIFT:
        first = tl.maximum(tl.minimum(first, length - SIZE), 0)
    return first


@triton.jit
def _queries(
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
def _keys(
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
def _load(base, y, x, there, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
    """(pixels, WIDE) of a tensor; what is not there is zero."""
    dim = tl.arange(0, WIDE)
    offsets = y.to(tl.int64) * row + x.to(tl.int64) * column
    wanted = there[:, None] & (dim < HEAD)[None, :]
    return tl.load(base + offsets[:, None] + dim[None, :], mask=wanted, other=0.0)


@triton.jit
def _store(base, values, y, x, there, row, column, HEAD: tl.constexpr, WIDE: tl.constexpr):
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
def _scores(
    q, k, table, head, query_y, query_x, key_y, key_x, seen, scale, HAS_BIAS: tl.constexpr,
    FARTHEST: tl.constexpr, PRECISION: tl.constexpr,
):
    """Scores of a tile in powers of two; what is not seen is minus infinity."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
    if HAS_BIAS:
        bias = _bias(table, head, query_y, query_x, key_y, key_x, FARTHEST)
        scores += bias * _LOG2E
    return tl.where(seen[None, :], scores, float("-inf"))


@triton.jit
def forward(
    q, k, v, out, sums, table, height, width, heads, phase_y, phase_x, scale,
    q_batch, q_row, q_column, q_head, k_batch, k_row, k_column, k_head,
    v_batch, v_row, v_column, v_head, o_batch, o_row, o_column, o_head,
    STEP: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    KEY_H: tl.constexpr, KEY_W: tl.constexpr, HAS_BIAS: tl.constexpr, FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Results, and for each query the logarithm of its sum: (batch, heads, height, width).

    Grid: windows across × tiles of a window, windows down, batch × heads.
    """
    tiles: tl.constexpr = ((STEP + TILE_H - 1) // TILE_H) * ((STEP + TILE_W - 1) // TILE_W)
    tile, head = tl.program_id(0) % tiles, tl.program_id(2) % heads
    batch = (tl.program_id(2) // heads).to(tl.int64)
    start_y = tl.program_id(1) * STEP - phase_y
    start_x = (tl.program_id(0) // tiles) * STEP - phase_x
    y, x, there = _queries(tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W)
    query = _load(q + batch * q_batch + head * q_head, y, x, there, q_row, q_column, HEAD, WIDE)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    first_y = _first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
    first_x = _first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
    most = tl.full([TILE_H * TILE_W], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H * TILE_W], tl.float32)
    gathered = tl.zeros([TILE_H * TILE_W, WIDE], tl.float32)
    key_tiles: tl.constexpr = ((SIZE + KEY_H - 1) // KEY_H) * ((SIZE + KEY_W - 1) // KEY_W)
    for step in range(key_tiles):
        key_y, key_x, row, column, seen, read = _keys(
            step, first_y, first_x, height, width, SIZE, KEY_H, KEY_W, BOUNDARY
        )
        key = _load(k, row, column, read, k_row, k_column, HEAD, WIDE)
        value = _load(v, row, column, read, v_row, v_column, HEAD, WIDE)
        scores = _scores(
            query, key, table, head, y, x, key_y, key_x, seen, scale, HAS_BIAS, FARTHEST, PRECISION
        )
        new = tl.maximum(most, tl.max(scores, 1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # of queries that saw nothing yet
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(most - anchor)
        total = total * shrink + tl.sum(weights, 1)
        gathered = gathered * shrink[:, None]
        gathered += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        most = new
    divisor = tl.where(total == 0, 1.0, total)
    result = (gathered / divisor[:, None]).to(out.dtype.element_ty)
    _store(
        out + batch * o_batch + head * o_head, result, y, x, there, o_row, o_column, HEAD, WIDE
    )
    plane = (batch * heads + head) * height.to(tl.int64) * width
    tl.store(sums + plane + y.to(tl.int64) * width + x, most + tl.log2(divisor), mask=there)


@triton.jit
def backward_query(
    q, k, v, out, sums, table, given, changes, to_q, height, width, heads, phase_y, phase_x, scale,
    q_batch, q_row, q_column, q_head, k_batch, k_row, k_column, k_head,
    v_batch, v_row, v_column, v_head, o_batch, o_row, o_column, o_head,
    g_batch, g_row, g_column, g_head,
    STEP: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    KEY_H: tl.constexpr, KEY_W: tl.constexpr, HAS_BIAS: tl.constexpr, FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the queries, laid out as the result, and Σ gradient · result of each query.

    Grid: that of `forward`.
    """
    tiles: tl.constexpr = ((STEP + TILE_H - 1) // TILE_H) * ((STEP + TILE_W - 1) // TILE_W)
    tile, head = tl.program_id(0) % tiles, tl.program_id(2) % heads
    batch = (tl.program_id(2) // heads).to(tl.int64)
    start_y = tl.program_id(1) * STEP - phase_y
    start_x = (tl.program_id(0) // tiles) * STEP - phase_x
    y, x, there = _queries(tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W)
    query = _load(q + batch * q_batch + head * q_head, y, x, there, q_row, q_column, HEAD, WIDE)
    change = _load(
        given + batch * g_batch + head * g_head, y, x, there, g_row, g_column, HEAD, WIDE
    )
    result = _load(out + batch * o_batch + head * o_head, y, x, there, o_row, o_column, HEAD, WIDE)
    share = tl.sum(change.to(tl.float32) * result.to(tl.float32), 1)
    plane = (batch * heads + head) * height.to(tl.int64) * width + y.to(tl.int64) * width + x
    tl.store(changes + plane, share, mask=there)
    logs = tl.load(sums + plane, mask=there, other=0.0)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    first_y = _first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
    first_x = _first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
    gathered = tl.zeros([TILE_H * TILE_W, WIDE], tl.float32)
    key_tiles: tl.constexpr = ((SIZE + KEY_H - 1) // KEY_H) * ((SIZE + KEY_W - 1) // KEY_W)
    for step in range(key_tiles):
        key_y, key_x, row, column, seen, read = _keys(
            step, first_y, first_x, height, width, SIZE, KEY_H, KEY_W, BOUNDARY
        )
        key = _load(k, row, column, read, k_row, k_column, HEAD, WIDE)
        value = _load(v, row, column, read, v_row, v_column, HEAD, WIDE)
        scores = _scores(
            query, key, table, head, y, x, key_y, key_x, seen, scale, HAS_BIAS, FARTHEST, PRECISION
        )
        weights = tl.exp2(scores - logs[:, None])
        of_weights = tl.dot(change, tl.trans(value), input_precision=PRECISION)
        of_scores = weights * (of_weights - share[:, None])
        gathered += tl.dot(of_scores.to(key.dtype), key, input_precision=PRECISION)
    _store(
        to_q + batch * o_batch + head * o_head, (gathered * scale).to(to_q.dtype.element_ty),
        y, x, there, o_row, o_column, HEAD, WIDE,
    )


@triton.jit
def _windows_seeing(
    low, count, length, phase, TILE: tl.constexpr, STEP: tl.constexpr, MARGIN: tl.constexpr,
    BOUNDARY: tl.constexpr,
):
    """First window that may see any of TILE pixels from ``low`` on, and the one after the last."""
    # Windows that are moved inside see pixels beyond their margin.
    more: tl.constexpr = (STEP + MARGIN) // STEP + 1 if BOUNDARY == SHIFT else 0
    # Not below 0, where division rounds towards 0.
    first = tl.maximum(low + phase - MARGIN, 0) // STEP - more
    last = (tl.minimum(low + TILE, length) - 1 + phase + MARGIN) // STEP + more
    return tl.maximum(first, 0), tl.minimum(last, count - 1) + 1


@triton.jit
def backward_key(
    q, k, v, sums, table, given, changes, to_k, to_v, height, width, heads, phase_y, phase_x, scale,
    windows_y, windows_x,
    q_batch, q_row, q_column, q_head, k_batch, k_row, k_column, k_head,
    v_batch, v_row, v_column, v_head, o_batch, o_row, o_column, o_head,
    g_batch, g_row, g_column, g_head,
    STEP: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    KEY_H: tl.constexpr, KEY_W: tl.constexpr, HAS_BIAS: tl.constexpr, FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of keys and values, laid out as the result; not for keys seen by reflection.

    Grid: tiles of the image across, tiles down, batch × heads.
    """
    tiles: tl.constexpr = ((STEP + TILE_H - 1) // TILE_H) * ((STEP + TILE_W - 1) // TILE_W)
    head, batch = tl.program_id(2) % heads, (tl.program_id(2) // heads).to(tl.int64)
    low_y, low_x = tl.program_id(1) * KEY_H, tl.program_id(0) * KEY_W
    place = tl.arange(0, KEY_H * KEY_W)
    key_y, key_x = low_y + place // KEY_W, low_x + place % KEY_W
    read = (key_y < height) & (key_x < width)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    q += batch * q_batch + head * q_head
    given += batch * g_batch + head * g_head
    plane = (batch * heads + head) * height.to(tl.int64) * width
    key = _load(k, key_y, key_x, read, k_row, k_column, HEAD, WIDE)
    value = _load(v, key_y, key_x, read, v_row, v_column, HEAD, WIDE)
    of_key = tl.zeros([KEY_H * KEY_W, WIDE], tl.float32)
    of_value = tl.zeros([KEY_H * KEY_W, WIDE], tl.float32)
    first_down, last_down = _windows_seeing(
        low_y, windows_y, height, phase_y, KEY_H, STEP, MARGIN, BOUNDARY
    )
    first_right, last_right = _windows_seeing(
        low_x, windows_x, width, phase_x, KEY_W, STEP, MARGIN, BOUNDARY
    )
    for down in range(first_down, last_down):
        start_y = down * STEP - phase_y
        from_y = _first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
        for right in range(first_right, last_right):
            start_x = right * STEP - phase_x
            from_x = _first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
            seen = (key_y >= from_y) & (key_y < from_y + SIZE) & read
            seen = seen & (key_x >= from_x) & (key_x < from_x + SIZE)
            for tile in range(tiles):
                y, x, there = _queries(tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W)
                query = _load(q, y, x, there, q_row, q_column, HEAD, WIDE)
                change = _load(given, y, x, there, g_row, g_column, HEAD, WIDE)
                at = plane + y.to(tl.int64) * width + x
                logs = tl.load(sums + at, mask=there, other=0.0)
                share = tl.load(changes + at, mask=there, other=0.0)
                scores = _scores(
                    query, key, table, head, y, x, key_y, key_x, seen, scale, HAS_BIAS, FARTHEST,
                    PRECISION,
                )
                weights = tl.where(there[:, None], tl.exp2(scores - logs[:, None]), 0.0)
                of_value += tl.dot(
                    tl.trans(weights).to(change.dtype), change, input_precision=PRECISION
                )
                of_weights = tl.dot(change, tl.trans(value), input_precision=PRECISION)
                of_scores = weights * (of_weights - share[:, None])
                of_key += tl.dot(
                    tl.trans(of_scores).to(query.dtype), query, input_precision=PRECISION
                )
    to_k += batch * o_batch + head * o_head
    to_v += batch * o_batch + head * o_head
    of_key = (of_key * scale).to(to_k.dtype.element_ty)
    of_value = of_value.to(to_v.dtype.element_ty)
    _store(to_k, of_key, key_y, key_x, read, o_row, o_column, HEAD, WIDE)
    _store(to_v, of_value, key_y, key_x, read, o_row, o_column, HEAD, WIDE)


@triton.jit
def backward_bias(
    q, k, v, sums, table, given, changes, to_bias, height, width, heads, phase_y, phase_x, scale,
    batches, windows_y, windows_x,
    q_batch, q_row, q_column, q_head, k_batch, k_row, k_column, k_head,
    v_batch, v_row, v_column, v_head, g_batch, g_row, g_column, g_head,
    STEP: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
    KEY_H: tl.constexpr, KEY_W: tl.constexpr, FARTHEST: tl.constexpr, PRECISION: tl.constexpr,
):
    """The sum over all windows of the gradients of their scores: (heads, tiles · queries of a tile,
    key tiles · keys of a tile). For windows that all have one shape.

    Grid: tiles of keys, tiles of queries, heads.
    """
    tile, head = tl.program_id(1), tl.program_id(2)
    gathered = tl.zeros([TILE_H * TILE_W, KEY_H * KEY_W], tl.float32)
    for place in range(batches):
        batch = tl.full([], place, tl.int64)
        plane = (batch * heads + head) * height.to(tl.int64) * width
        for window in range(windows_y * windows_x):
            start_y = (window // windows_x) * STEP - phase_y
            start_x = (window % windows_x) * STEP - phase_x
            y, x, there = _queries(tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W)
            key_y, key_x, row, column, seen, read = _keys(
                tl.program_id(0), start_y - MARGIN, start_x - MARGIN, height, width, SIZE, KEY_H,
                KEY_W, BOUNDARY,
            )
            at_q = q + batch * q_batch + head * q_head
            at_k = k + batch * k_batch + head * k_head
            at_v = v + batch * v_batch + head * v_head
            at_g = given + batch * g_batch + head * g_head
            query = _load(at_q, y, x, there, q_row, q_column, HEAD, WIDE)
            change = _load(at_g, y, x, there, g_row, g_column, HEAD, WIDE)
            key = _load(at_k, row, column, read, k_row, k_column, HEAD, WIDE)
            value = _load(at_v, row, column, read, v_row, v_column, HEAD, WIDE)
            at = plane + y.to(tl.int64) * width + x
            logs = tl.load(sums + at, mask=there, other=0.0)
            share = tl.load(changes + at, mask=there, other=0.0)
            scores = _scores(
                query, key, table, head, y, x, key_y, key_x, seen, scale, True, FARTHEST, PRECISION
            )
            weights = tl.where(there[:, None], tl.exp2(scores - logs[:, None]), 0.0)
            of_weights = tl.dot(change, tl.trans(value), input_precision=PRECISION)
            gathered += weights * (of_weights - share[:, None])
    queries, keys = TILE_H * TILE_W, KEY_H * KEY_W
    rows = tile * queries + tl.arange(0, TILE_H * TILE_W)
    columns = tl.program_id(0) * keys + tl.arange(0, KEY_H * KEY_W)
    wide = tl.num_programs(0) * keys
    to_bias += head.to(tl.int64) * tl.num_programs(1) * queries * wide
    tl.store(to_bias + rows[:, None].to(tl.int64) * wide + columns[None, :], gathered)
