"""The backward pass: a program gathers what its own tile needs, of whatever windows see it."""
# Triton's language has no types, and its functions are not what they look like to a checker.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.attention.halo.kernels.parts import (
    SHIFT,
    first_key,
    key_tile,
    load_pixels,
    own_queries,
    query_tile,
    score_tile,
    store_pixels,
)


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
    batch, head, start_y, start_x, y, x, there = own_queries(
        height, width, heads, phase_y, phase_x, STEP, TILE_H, TILE_W
    )
    query = load_pixels(
        q + batch * q_batch + head * q_head, y, x, there, q_row, q_column, HEAD, WIDE
    )
    change = load_pixels(
        given + batch * g_batch + head * g_head, y, x, there, g_row, g_column, HEAD, WIDE
    )
    result = load_pixels(
        out + batch * o_batch + head * o_head, y, x, there, o_row, o_column, HEAD, WIDE
    )
    share = tl.sum(change.to(tl.float32) * result.to(tl.float32), 1)
    plane = (batch * heads + head) * height.to(tl.int64) * width + y.to(tl.int64) * width + x
    tl.store(changes + plane, share, mask=there)
    logs = tl.load(sums + plane, mask=there, other=0.0)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    first_y = first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
    first_x = first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
    gathered = tl.zeros([TILE_H * TILE_W, WIDE], tl.float32)
    key_tiles: tl.constexpr = ((SIZE + KEY_H - 1) // KEY_H) * ((SIZE + KEY_W - 1) // KEY_W)
    for step in range(key_tiles):
        key_y, key_x, row, column, seen, read = key_tile(
            step, first_y, first_x, height, width, SIZE, KEY_H, KEY_W, BOUNDARY
        )
        key = load_pixels(k, row, column, read, k_row, k_column, HEAD, WIDE)
        value = load_pixels(v, row, column, read, v_row, v_column, HEAD, WIDE)
        scores = score_tile(
            query, key, table, head, y, x, key_y, key_x, seen, scale, HAS_BIAS, FARTHEST, PRECISION
        )
        weights = tl.exp2(scores - logs[:, None])
        of_weights = tl.dot(change, tl.trans(value), input_precision=PRECISION)
        of_scores = weights * (of_weights - share[:, None])
        gathered += tl.dot(of_scores.to(key.dtype), key, input_precision=PRECISION)
    store_pixels(
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
    key = load_pixels(k, key_y, key_x, read, k_row, k_column, HEAD, WIDE)
    value = load_pixels(v, key_y, key_x, read, v_row, v_column, HEAD, WIDE)
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
        from_y = first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
        for right in range(first_right, last_right):
            start_x = right * STEP - phase_x
            from_x = first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
            seen = (key_y >= from_y) & (key_y < from_y + SIZE) & read
            seen = seen & (key_x >= from_x) & (key_x < from_x + SIZE)
            for tile in range(tiles):
                y, x, there = query_tile(
                    tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W
                )
                query = load_pixels(q, y, x, there, q_row, q_column, HEAD, WIDE)
                change = load_pixels(given, y, x, there, g_row, g_column, HEAD, WIDE)
                at = plane + y.to(tl.int64) * width + x
                logs = tl.load(sums + at, mask=there, other=0.0)
                share = tl.load(changes + at, mask=there, other=0.0)
                scores = score_tile(
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
    store_pixels(to_k, of_key, key_y, key_x, read, o_row, o_column, HEAD, WIDE)
    store_pixels(to_v, of_value, key_y, key_x, read, o_row, o_column, HEAD, WIDE)


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
            y, x, there = query_tile(tile, start_y, start_x, height, width, STEP, TILE_H, TILE_W)
            key_y, key_x, row, column, seen, read = key_tile(
                tl.program_id(0), start_y - MARGIN, start_x - MARGIN, height, width, SIZE, KEY_H,
                KEY_W, BOUNDARY,
            )
            at_q = q + batch * q_batch + head * q_head
            at_k = k + batch * k_batch + head * k_head
            at_v = v + batch * v_batch + head * v_head
            at_g = given + batch * g_batch + head * g_head
            query = load_pixels(at_q, y, x, there, q_row, q_column, HEAD, WIDE)
            change = load_pixels(at_g, y, x, there, g_row, g_column, HEAD, WIDE)
            key = load_pixels(at_k, row, column, read, k_row, k_column, HEAD, WIDE)
            value = load_pixels(at_v, row, column, read, v_row, v_column, HEAD, WIDE)
            at = plane + y.to(tl.int64) * width + x
            logs = tl.load(sums + at, mask=there, other=0.0)
            share = tl.load(changes + at, mask=there, other=0.0)
            scores = score_tile(
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
