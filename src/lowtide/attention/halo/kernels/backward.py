"""Triton kernels of the halo attention's backward pass.

A program gathers what its own tile needs, from all windows that see it.
"""
# Triton's language has no types, and type checkers cannot analyze its functions.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.attention.halo.kernels.common import (
    LOG2E,
    SHIFT,
    bias_tile,
    first_key,
    key_tile,
    load_all,
    load_block,
    load_keys,
    load_pixels,
    one_of,
    own_window,
    pixels,
    query_tile,
    store_pixels,
    tiles_inside,
    within_image,
)


@triton.jit
def backward_query(
    q,
    k,
    v,
    out,
    sums,
    table,
    given,
    to_q,
    height,
    width,
    heads,
    phase_y,
    phase_x,
    scale,
    windows_y,
    windows_x,
    top,
    bottom,
    left,
    right,
    q_batch,
    q_row,
    q_column,
    q_head,
    k_batch,
    k_row,
    k_column,
    k_head,
    v_batch,
    v_row,
    v_column,
    v_head,
    o_batch,
    o_row,
    o_column,
    o_head,
    g_batch,
    g_row,
    g_column,
    g_head,
    STEP: tl.constexpr,
    MARGIN: tl.constexpr,
    SIZE: tl.constexpr,
    BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
    TILED: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Compute the queries' gradients, and Σ gradient · output of each query.

    Gradients have the layout of the output. The sums are the second element of ``sums``.

    Grid: that of `forward`.
    """
    programs: tl.constexpr = (STEP * STEP + QUERIES - 1) // QUERIES
    batch, head, tile, start_y, start_x, first_y, first_x = own_window(
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
        STEP,
        MARGIN,
        SIZE,
        BOUNDARY,
        programs,
        INSIDE,
    )
    if not INSIDE and start_y + tile * QUERIES // STEP >= height:
        return  # all of its queries are below the image
    wide_batch = batch.to(tl.int64)
    q += wide_batch * q_batch + head * q_head
    if not TILED:
        k += wide_batch * k_batch + head * k_head
        v += wide_batch * v_batch + head * v_head
    out += wide_batch * o_batch + head * o_head
    to_q += wide_batch * o_batch + head * o_head
    given += wide_batch * g_batch + head * g_head
    sums += 2 * (wide_batch * heads + head) * height * width
    y, x, valid = query_tile(tile, start_y, start_x, height, width, STEP, QUERIES)
    query = load_pixels(q, y, x, valid, q_row, q_column, HEAD, WIDE)
    grad_output = load_pixels(given, y, x, valid, g_row, g_column, HEAD, WIDE)
    result = load_pixels(out, y, x, valid, o_row, o_column, HEAD, WIDE)
    row_dot = tl.sum(grad_output.to(tl.float32) * result.to(tl.float32), 1)
    at = 2 * (y.to(tl.int64) * width + x)
    tl.store(sums + at + 1, row_dot, mask=valid)
    logs = tl.load(sums + at, mask=valid, other=0.0)
    accumulated = tl.zeros([QUERIES, WIDE], tl.float32)
    first, last = tiles_inside(first_y, height, SIZE, KEYS, BOUNDARY, INSIDE)
    for step in range(first, last):
        key, value, key_y, key_x, seen = load_keys(
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
            SIZE,
            KEYS,
            BOUNDARY,
            HEAD,
            WIDE,
            TILED,
            INSIDE,
        )
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
        if HAS_BIAS:
            delta_y, delta_x = key_y[None, :] - y[:, None], key_x[None, :] - x[:, None]
            scores += bias_tile(table, head, delta_y, delta_x, FARTHEST)
        weights = tl.exp2(scores - logs[:, None])
        if not INSIDE:
            weights = tl.where(seen[None, :], weights, 0.0)
        of_weights = tl.dot(grad_output, tl.trans(value), input_precision=PRECISION)
        of_scores = (weights * (of_weights - row_dot[:, None])).to(key.dtype)
        accumulated = tl.dot(of_scores, key, accumulated, input_precision=PRECISION)
    accumulated = (accumulated * scale).to(to_q.dtype.element_ty)
    store_pixels(to_q, accumulated, y, x, valid, o_row, o_column, HEAD, WIDE)


@triton.jit
def _windows_seeing(
    low,
    count,
    length,
    phase,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    MARGIN: tl.constexpr,
    BOUNDARY: tl.constexpr,
):
    """Return the range [first, last) of windows that may see a tile of pixels.

    The tile is TILE pixels from ``low`` on.
    """
    # Windows that are shifted inside see pixels beyond their margin.
    more: tl.constexpr = (STEP + MARGIN) // STEP + 1 if BOUNDARY == SHIFT else 0
    # Clamped at 0, because Triton's division rounds towards 0.
    first = tl.maximum(tl.maximum(low, 0) + phase - MARGIN, 0) // STEP - more
    last = (tl.minimum(low + TILE, length) - 1 + phase + MARGIN) // STEP + more
    return tl.maximum(first, 0), tl.minimum(last, count - 1) + 1


@triton.jit
def backward_key(
    q,
    k,
    v,
    sums,
    table,
    given,
    to_k,
    to_v,
    height,
    width,
    heads,
    phase_y,
    phase_x,
    scale,
    windows_y,
    windows_x,
    tiles_y,
    tiles_x,
    top,
    bottom,
    left,
    right,
    q_batch,
    q_row,
    q_column,
    q_head,
    k_batch,
    k_row,
    k_column,
    k_head,
    v_batch,
    v_row,
    v_column,
    v_head,
    o_batch,
    o_row,
    o_column,
    o_head,
    g_batch,
    g_row,
    g_column,
    g_head,
    STEP: tl.constexpr,
    MARGIN: tl.constexpr,
    SIZE: tl.constexpr,
    BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
    TILED: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Compute the gradients of keys and values, in the layout of the output.

    Not for keys seen by reflection. A program has SIDE × SIDE keys, and scores as (keys, queries),
    the order of its products. The grid of key tiles begins where that of windows does: where
    windows begin and end at multiples of SIDE, each sees all of a tile or nothing of it. Tiles from
    row ``top`` to ``bottom`` and from column ``left`` to ``right`` then need no masks, and all
    other tiles get their own launch.

    Grid: tiles, batch × heads.
    """
    down, across = one_of(tl.program_id(0), tiles_x, tiles_y, top, bottom, left, right, INSIDE)
    # The first tile may begin before the image.
    low_y = down * SIDE - (phase_y + MARGIN) % SIDE
    low_x = across * SIDE - (phase_x + MARGIN) % SIDE
    head, batch = tl.program_id(1) % heads, tl.program_id(1) // heads
    wide_batch = batch.to(tl.int64)
    k += wide_batch * k_batch + head * k_head
    v += wide_batch * v_batch + head * v_head
    if not TILED:
        q += wide_batch * q_batch + head * q_head
        given += wide_batch * g_batch + head * g_head
    to_k += wide_batch * o_batch + head * o_head
    to_v += wide_batch * o_batch + head * o_head
    sums += 2 * (wide_batch * heads + head) * height * width
    first_down, last_down = _windows_seeing(
        low_y, windows_y, height, phase_y, SIDE, STEP, MARGIN, BOUNDARY
    )
    first_right, last_right = _windows_seeing(
        low_x, windows_x, width, phase_x, SIDE, STEP, MARGIN, BOUNDARY
    )
    # Query tiles are rectangles too, so that the next one is one pointer addition further.
    wide: tl.constexpr = (STEP + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = ((STEP + ROWS - 1) // ROWS) * wide
    place = tl.arange(0, SIDE * SIDE)
    key_y, key_x = low_y + place // SIDE, low_x + place % SIDE
    read = within_image(key_y, key_x, height, width)
    key = load_pixels(k, key_y, key_x, read, k_row, k_column, HEAD, WIDE)
    value = load_pixels(v, key_y, key_x, read, v_row, v_column, HEAD, WIDE)
    of_key = tl.zeros([SIDE * SIDE, WIDE], tl.float32)
    of_value = tl.zeros([SIDE * SIDE, WIDE], tl.float32)
    windows_right = last_right - first_right
    offset = tl.arange(0, ROWS * COLUMNS)
    offset_y, offset_x = offset // COLUMNS, offset % COLUMNS
    if not TILED:
        queries = pixels(q, offset_y, offset_x, q_row, q_column, WIDE)
        givens = pixels(given, offset_y, offset_x, g_row, g_column, WIDE)
    # Load both elements of a query at once: otherwise Triton replicates them across threads.
    pairs = sums + 2 * (offset_y * width + offset_x)[:, None] + tl.arange(0, 2)[None, :]
    for step in range((last_down - first_down) * windows_right * tiles):
        window, tile = step // tiles, step % tiles
        start_y = (first_down + window // windows_right) * STEP - phase_y
        start_x = (first_right + window % windows_right) * STEP - phase_x
        corner_y, corner_x = start_y + tile // wide * ROWS, start_x + tile % wide * COLUMNS
        y, x = corner_y + offset_y, corner_x + offset_x
        valid = (y < start_y + STEP) & (x < start_x + STEP) & within_image(y, x, height, width)
        far_y, far_x = corner_y.to(tl.int64), corner_x.to(tl.int64)
        if TILED:
            query = load_block(q, batch, corner_y, corner_x, head, ROWS, COLUMNS, WIDE)
            grad_output = load_block(given, batch, corner_y, corner_x, head, ROWS, COLUMNS, WIDE)
        elif INSIDE:
            query = load_all(queries + (far_y * q_row + far_x * q_column), HEAD, WIDE)
            grad_output = load_all(givens + (far_y * g_row + far_x * g_column), HEAD, WIDE)
        else:
            query = load_pixels(q, y, x, valid, q_row, q_column, HEAD, WIDE)
            grad_output = load_pixels(given, y, x, valid, g_row, g_column, HEAD, WIDE)
        both_of = pairs + 2 * (far_y * width + far_x)
        if INSIDE:
            both = tl.load(both_of)
        else:
            both = tl.load(both_of, mask=valid[:, None], other=0.0)
        logs, row_dot = tl.split(both)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * LOG2E)
        if HAS_BIAS:
            delta_y, delta_x = key_y[:, None] - y[None, :], key_x[:, None] - x[None, :]
            scores += bias_tile(table, head, delta_y, delta_x, FARTHEST)
        weights = tl.exp2(scores - logs[None, :])
        if not INSIDE:
            from_y = first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
            from_x = first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
            seen = (key_y >= from_y) & (key_y < from_y + SIZE) & read
            seen = seen & (key_x >= from_x) & (key_x < from_x + SIZE)
            weights = tl.where(seen[:, None] & valid[None, :], weights, 0.0)
        of_value = tl.dot(
            weights.to(grad_output.dtype), grad_output, of_value, input_precision=PRECISION
        )
        of_weights = tl.dot(value, tl.trans(grad_output), input_precision=PRECISION)
        of_scores = (weights * (of_weights - row_dot[None, :])).to(query.dtype)
        of_key = tl.dot(of_scores, query, of_key, input_precision=PRECISION)
    of_key = (of_key * scale).to(to_k.dtype.element_ty)
    of_value = of_value.to(to_v.dtype.element_ty)
    store_pixels(to_k, of_key, key_y, key_x, read, o_row, o_column, HEAD, WIDE)
    store_pixels(to_v, of_value, key_y, key_x, read, o_row, o_column, HEAD, WIDE)


@triton.jit
def backward_bias(
    q,
    k,
    v,
    sums,
    table,
    given,
    to_bias,
    height,
    width,
    heads,
    phase_y,
    phase_x,
    scale,
    batches,
    windows_y,
    windows_x,
    q_batch,
    q_row,
    q_column,
    q_head,
    k_batch,
    k_row,
    k_column,
    k_head,
    v_batch,
    v_row,
    v_column,
    v_head,
    g_batch,
    g_row,
    g_column,
    g_head,
    STEP: tl.constexpr,
    MARGIN: tl.constexpr,
    SIZE: tl.constexpr,
    BOUNDARY: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of scores, summed over all windows.

    The result is (heads, query tiles · QUERIES, key tiles · KEYS). For windows that all have one
    shape.

    Grid: tiles of keys, tiles of queries, heads.
    """
    tile, head = tl.program_id(1), tl.program_id(2)
    accumulated = tl.zeros([QUERIES, KEYS], tl.float32)
    for place in range(batches):
        batch = tl.full([], place, tl.int64)
        plane = 2 * (batch * heads + head) * height * width
        at_q = q + batch * q_batch + head * q_head
        at_k = k + batch * k_batch + head * k_head
        at_v = v + batch * v_batch + head * v_head
        at_g = given + batch * g_batch + head * g_head
        for window in range(windows_y * windows_x):
            start_y = (window // windows_x) * STEP - phase_y
            start_x = (window % windows_x) * STEP - phase_x
            y, x, valid = query_tile(tile, start_y, start_x, height, width, STEP, QUERIES)
            key_y, key_x, row, column, seen, read = key_tile(
                tl.program_id(0),
                start_y - MARGIN,
                start_x - MARGIN,
                height,
                width,
                SIZE,
                KEYS,
                BOUNDARY,
            )
            query = load_pixels(at_q, y, x, valid, q_row, q_column, HEAD, WIDE)
            grad_output = load_pixels(at_g, y, x, valid, g_row, g_column, HEAD, WIDE)
            key = load_pixels(at_k, row, column, read, k_row, k_column, HEAD, WIDE)
            value = load_pixels(at_v, row, column, read, v_row, v_column, HEAD, WIDE)
            at = sums + plane + 2 * (y.to(tl.int64) * width + x)
            logs = tl.load(at, mask=valid, other=0.0)
            row_dot = tl.load(at + 1, mask=valid, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
            delta_y, delta_x = key_y[None, :] - y[:, None], key_x[None, :] - x[:, None]
            scores += bias_tile(table, head, delta_y, delta_x, FARTHEST)
            weights = tl.exp2(scores - logs[:, None])
            weights = tl.where(seen[None, :] & valid[:, None], weights, 0.0)
            of_weights = tl.dot(grad_output, tl.trans(value), input_precision=PRECISION)
            accumulated += weights * (of_weights - row_dot[:, None])
    rows = tile * QUERIES + tl.arange(0, QUERIES)
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    wide = tl.num_programs(0) * KEYS
    to_bias += head.to(tl.int64) * tl.num_programs(1) * QUERIES * wide
    tl.store(to_bias + rows[:, None].to(tl.int64) * wide + columns[None, :], accumulated)
