"""Triton kernels of the halo attention's backward pass.

A program gathers what its own tile needs, from all windows that see it.
"""
# Triton's language has no types, and type checkers cannot analyze its functions.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.attention.halo.kernels.forward import (
    LOG2E,
    bias_tile,
    first_key,
    head_of,
    key_tile,
    load_all,
    load_block,
    load_keys,
    load_pixels,
    one_of,
    own_window,
    pixel_pointers,
    query_tile,
    store_pixels,
    tiles_inside,
    within_image,
)


@triton.jit
def backward_query(
    q, k, v, out, sums, table, given, to_q, image, scale, grid, strides, fixed: tl.constexpr
):
    """Compute the queries' gradients, and Σ gradient · output of each query.

    Gradients have the layout of the output. The sums are the second element of ``sums``.

    Grid: that of `forward`.
    """
    queries: tl.constexpr = fixed.tile.queries
    dim: tl.constexpr = fixed.padded_dim
    programs: tl.constexpr = (fixed.stride * fixed.stride + queries - 1) // queries
    height, width, heads, _, _ = image
    q_strides, k_strides, v_strides, o_strides, g_strides = strides
    place, tile, start_y, start_x = own_window(image, grid, programs, fixed)
    batch, head, first_y, _ = place
    if not fixed.inside and start_y + tile * queries // fixed.stride >= height:
        return  # all of its queries are below the image
    q = head_of(q, batch, head, q_strides)
    if not fixed.tiled:
        k = head_of(k, batch, head, k_strides)
        v = head_of(v, batch, head, v_strides)
    out = head_of(out, batch, head, o_strides)
    to_q = head_of(to_q, batch, head, o_strides)
    given = head_of(given, batch, head, g_strides)
    sums += 2 * (batch.to(tl.int64) * heads + head) * height * width
    y, x, valid = query_tile(tile, start_y, start_x, image, fixed)
    query = load_pixels(q, y, x, valid, q_strides, fixed)
    grad_output = load_pixels(given, y, x, valid, g_strides, fixed)
    result = load_pixels(out, y, x, valid, o_strides, fixed)
    row_dot = tl.sum(grad_output.to(tl.float32) * result.to(tl.float32), 1)
    at = 2 * (y.to(tl.int64) * width + x)
    tl.store(sums + at + 1, row_dot, mask=valid)
    logs = tl.load(sums + at, mask=valid, other=0.0)
    accumulated = tl.zeros([queries, dim], tl.float32)
    first, last = tiles_inside(first_y, image, fixed)
    for step in range(first, last):
        key, value, key_y, key_x, seen = load_keys(
            step, k, v, place, image, k_strides, v_strides, fixed
        )
        scores = tl.dot(query, tl.trans(key), input_precision=fixed.precision) * (scale * LOG2E)
        if fixed.has_bias:
            delta_y, delta_x = key_y[None, :] - y[:, None], key_x[None, :] - x[:, None]
            scores += bias_tile(table, head, delta_y, delta_x, fixed)
        weights = tl.exp2(scores - logs[:, None])
        if not fixed.inside:
            weights = tl.where(seen[None, :], weights, 0.0)
        of_weights = tl.dot(grad_output, tl.trans(value), input_precision=fixed.precision)
        of_scores = (weights * (of_weights - row_dot[:, None])).to(key.dtype)
        accumulated = tl.dot(of_scores, key, accumulated, input_precision=fixed.precision)
    accumulated = (accumulated * scale).to(to_q.dtype.element_ty)
    store_pixels(to_q, accumulated, y, x, valid, o_strides, fixed)


@triton.jit
def _windows_seeing(low, count, length, phase, fixed):
    """Return the range [first, last) of windows that may see a tile of keys.

    Along one axis; the tile is ``fixed.tile.side`` pixels from ``low`` on.
    """
    # Windows that are shifted inside see pixels beyond their margin.
    more: tl.constexpr = (
        (fixed.stride + fixed.halo) // fixed.stride + 1 if fixed.boundary == "shift" else 0
    )
    # Clamped at 0, because Triton's division rounds towards 0.
    first = tl.maximum(tl.maximum(low, 0) + phase - fixed.halo, 0) // fixed.stride - more
    end = tl.minimum(low + fixed.tile.side, length)
    last = (end - 1 + phase + fixed.halo) // fixed.stride + more
    return tl.maximum(first, 0), tl.minimum(last, count - 1) + 1


@triton.jit
def backward_key(
    q, k, v, sums, table, given, to_k, to_v, image, scale, grid, strides, fixed: tl.constexpr
):
    """Compute the gradients of keys and values, in the layout of the output.

    Not for keys seen by reflection. A program has a square of keys, and scores as (keys, queries),
    the order of its products. The grid of key tiles begins where that of windows does: where
    windows begin and end at multiples of its side, each sees all of a tile or nothing of it.
    ``grid`` is (windows down and across, tiles down and across, top, bottom, left, right): tiles
    from row ``top`` to ``bottom`` and from column ``left`` to ``right`` then need no masks, and all
    other tiles get their own launch.

    Grid: tiles, batch × heads.
    """
    size: tl.constexpr = fixed.size
    stride: tl.constexpr = fixed.stride
    side: tl.constexpr = fixed.tile.side
    rows: tl.constexpr = fixed.tile.rectangle[0]
    columns: tl.constexpr = fixed.tile.rectangle[1]
    dim: tl.constexpr = fixed.padded_dim
    height, width, heads, phase_y, phase_x = image
    windows_y, windows_x, tiles_y, tiles_x, top, bottom, left, right = grid
    q_strides, k_strides, v_strides, o_strides, g_strides = strides
    inner = top, bottom, left, right
    down, across = one_of(tl.program_id(0), tiles_x, tiles_y, inner, fixed)
    # The first tile may begin before the image.
    low_y = down * side - (phase_y + fixed.halo) % side
    low_x = across * side - (phase_x + fixed.halo) % side
    head, batch = tl.program_id(1) % heads, tl.program_id(1) // heads
    k = head_of(k, batch, head, k_strides)
    v = head_of(v, batch, head, v_strides)
    if not fixed.tiled:
        q = head_of(q, batch, head, q_strides)
        given = head_of(given, batch, head, g_strides)
    to_k = head_of(to_k, batch, head, o_strides)
    to_v = head_of(to_v, batch, head, o_strides)
    sums += 2 * (batch.to(tl.int64) * heads + head) * height * width
    first_down, last_down = _windows_seeing(low_y, windows_y, height, phase_y, fixed)
    first_right, last_right = _windows_seeing(low_x, windows_x, width, phase_x, fixed)
    # Query tiles are rectangles too, so that the next one is one pointer addition further.
    wide: tl.constexpr = (stride + columns - 1) // columns
    tiles: tl.constexpr = ((stride + rows - 1) // rows) * wide
    place = tl.arange(0, side * side)
    key_y, key_x = low_y + place // side, low_x + place % side
    read = within_image(key_y, key_x, image)
    key = load_pixels(k, key_y, key_x, read, k_strides, fixed)
    value = load_pixels(v, key_y, key_x, read, v_strides, fixed)
    of_key = tl.zeros([side * side, dim], tl.float32)
    of_value = tl.zeros([side * side, dim], tl.float32)
    windows_right = last_right - first_right
    offset = tl.arange(0, rows * columns)
    offset_y, offset_x = offset // columns, offset % columns
    if not fixed.tiled:
        queries = pixel_pointers(q, offset_y, offset_x, q_strides, fixed)
        givens = pixel_pointers(given, offset_y, offset_x, g_strides, fixed)
    # Load both elements of a query at once: otherwise Triton replicates them across threads.
    pairs = sums + 2 * (offset_y * width + offset_x)[:, None] + tl.arange(0, 2)[None, :]
    for step in range((last_down - first_down) * windows_right * tiles):
        window, tile = step // tiles, step % tiles
        start_y = (first_down + window // windows_right) * stride - phase_y
        start_x = (first_right + window % windows_right) * stride - phase_x
        corner_y, corner_x = start_y + tile // wide * rows, start_x + tile % wide * columns
        y, x = corner_y + offset_y, corner_x + offset_x
        valid = (y < start_y + stride) & (x < start_x + stride) & within_image(y, x, image)
        far_y, far_x = corner_y.to(tl.int64), corner_x.to(tl.int64)
        if fixed.tiled:
            query = load_block(q, batch, corner_y, corner_x, head, rows, columns, fixed)
            grad_output = load_block(given, batch, corner_y, corner_x, head, rows, columns, fixed)
        elif fixed.inside:
            query = load_all(queries + (far_y * q_strides[1] + far_x * q_strides[2]), fixed)
            grad_output = load_all(givens + (far_y * g_strides[1] + far_x * g_strides[2]), fixed)
        else:
            query = load_pixels(q, y, x, valid, q_strides, fixed)
            grad_output = load_pixels(given, y, x, valid, g_strides, fixed)
        both_of = pairs + 2 * (far_y * width + far_x)
        if fixed.inside:
            both = tl.load(both_of)
        else:
            both = tl.load(both_of, mask=valid[:, None], other=0.0)
        logs, row_dot = tl.split(both)
        scores = tl.dot(key, tl.trans(query), input_precision=fixed.precision) * (scale * LOG2E)
        if fixed.has_bias:
            delta_y, delta_x = key_y[:, None] - y[None, :], key_x[:, None] - x[None, :]
            scores += bias_tile(table, head, delta_y, delta_x, fixed)
        weights = tl.exp2(scores - logs[None, :])
        if not fixed.inside:
            from_y = first_key(start_y, height, fixed)
            from_x = first_key(start_x, width, fixed)
            seen = (key_y >= from_y) & (key_y < from_y + size) & read
            seen = seen & (key_x >= from_x) & (key_x < from_x + size)
            weights = tl.where(seen[:, None] & valid[None, :], weights, 0.0)
        given_weights = weights.to(grad_output.dtype)
        of_value = tl.dot(given_weights, grad_output, of_value, input_precision=fixed.precision)
        of_weights = tl.dot(value, tl.trans(grad_output), input_precision=fixed.precision)
        of_scores = (weights * (of_weights - row_dot[None, :])).to(query.dtype)
        of_key = tl.dot(of_scores, query, of_key, input_precision=fixed.precision)
    of_key = (of_key * scale).to(to_k.dtype.element_ty)
    of_value = of_value.to(to_v.dtype.element_ty)
    store_pixels(to_k, of_key, key_y, key_x, read, o_strides, fixed)
    store_pixels(to_v, of_value, key_y, key_x, read, o_strides, fixed)


@triton.jit
def backward_bias(
    q, k, v, sums, table, given, to_bias, image, scale, grid, strides, fixed: tl.constexpr
):
    """Compute the gradients of scores, summed over all windows.

    The result is (heads, query tiles · tile.queries, key tiles · tile.keys). For windows that all
    have one shape. ``grid`` is (batches, windows down, windows across).

    Grid: tiles of keys, tiles of queries, heads.
    """
    queries: tl.constexpr = fixed.tile.queries
    keys: tl.constexpr = fixed.tile.keys
    height, width, heads, phase_y, phase_x = image
    batches, windows_y, windows_x = grid
    q_strides, k_strides, v_strides, g_strides = strides
    tile, head = tl.program_id(1), tl.program_id(2)
    accumulated = tl.zeros([queries, keys], tl.float32)
    for place in range(batches):
        batch = tl.full([], place, tl.int64)
        plane = 2 * (batch * heads + head) * height * width
        at_q = head_of(q, batch, head, q_strides)
        at_k = head_of(k, batch, head, k_strides)
        at_v = head_of(v, batch, head, v_strides)
        at_g = head_of(given, batch, head, g_strides)
        for window in range(windows_y * windows_x):
            start_y = (window // windows_x) * fixed.stride - phase_y
            start_x = (window % windows_x) * fixed.stride - phase_x
            y, x, valid = query_tile(tile, start_y, start_x, image, fixed)
            key_y, key_x, row, column, seen, read = key_tile(
                tl.program_id(0), start_y - fixed.halo, start_x - fixed.halo, image, fixed
            )
            query = load_pixels(at_q, y, x, valid, q_strides, fixed)
            grad_output = load_pixels(at_g, y, x, valid, g_strides, fixed)
            key = load_pixels(at_k, row, column, read, k_strides, fixed)
            value = load_pixels(at_v, row, column, read, v_strides, fixed)
            at = sums + plane + 2 * (y.to(tl.int64) * width + x)
            logs = tl.load(at, mask=valid, other=0.0)
            row_dot = tl.load(at + 1, mask=valid, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=fixed.precision) * (scale * LOG2E)
            delta_y, delta_x = key_y[None, :] - y[:, None], key_x[None, :] - x[:, None]
            scores += bias_tile(table, head, delta_y, delta_x, fixed)
            weights = tl.exp2(scores - logs[:, None])
            weights = tl.where(seen[None, :] & valid[:, None], weights, 0.0)
            of_weights = tl.dot(grad_output, tl.trans(value), input_precision=fixed.precision)
            accumulated += weights * (of_weights - row_dot[:, None])
    at_rows = tile * queries + tl.arange(0, queries)
    at_columns = tl.program_id(0) * keys + tl.arange(0, keys)
    wide = tl.num_programs(0) * keys
    to_bias += head.to(tl.int64) * tl.num_programs(1) * queries * wide
    tl.store(to_bias + at_rows[:, None].to(tl.int64) * wide + at_columns[None, :], accumulated)
