"""Triton kernel of the halo attention's forward pass, one program per query tile."""
# Triton's language has no types, and type checkers cannot analyze its functions.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.attention.halo.kernels.common import (
    LOG2E,
    bias_tile,
    load_keys,
    load_pixels,
    own_window,
    query_tile,
    store_pixels,
    tiles_inside,
)


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    sums,
    table,
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
    """Compute the attention output and the log-sum-exp of each query.

    ``sums`` is (B, heads, H, W, 2): the log-sum-exp in base 2, and an element that the backward
    pass fills. Windows with all keys in the image need no masks: those from row ``top`` to
    ``bottom`` and from column ``left`` to ``right`` of the grid of windows. All other windows get
    their own launch.

    Grid: windows × tiles of a window's queries, batch × heads.
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
    sums += 2 * (wide_batch * heads + head) * height * width
    y, x, valid = query_tile(tile, start_y, start_x, height, width, STEP, QUERIES)
    query = load_pixels(q, y, x, valid, q_row, q_column, HEAD, WIDE)
    # Online softmax before the first key: maximum, sum of weights, weighted sum of values.
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
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
        row_max, total, accumulated = _with_keys(
            query,
            key,
            value,
            table,
            head,
            y,
            x,
            key_y,
            key_x,
            seen,
            scale,
            row_max,
            total,
            accumulated,
            HAS_BIAS,
            FARTHEST,
            PRECISION,
            INSIDE,
        )
    divisor = tl.where(total == 0, 1.0, total)
    result = (accumulated / divisor[:, None]).to(out.dtype.element_ty)
    store_pixels(out, result, y, x, valid, o_row, o_column, HEAD, WIDE)
    at = 2 * (y.to(tl.int64) * width + x)
    tl.store(sums + at, row_max + tl.log2(divisor), mask=valid)


@triton.jit
def _with_keys(
    query,
    key,
    value,
    table,
    head,
    y,
    x,
    key_y,
    key_x,
    seen,
    scale,
    row_max,
    total,
    accumulated,
    HAS_BIAS: tl.constexpr,
    FARTHEST: tl.constexpr,
    PRECISION: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Update the online softmax (maximum, sum, weighted sum) with a tile of keys."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    unit = scale * LOG2E
    if HAS_BIAS:
        delta_y, delta_x = key_y[None, :] - y[:, None], key_x[None, :] - x[:, None]
        scores = scores * unit + bias_tile(table, head, delta_y, delta_x, FARTHEST)
        unit = 1.0
    if not INSIDE:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    new = tl.maximum(row_max, tl.max(scores, 1) * unit)
    finite_max = new
    if not INSIDE:
        finite_max = tl.where(new == float("-inf"), 0.0, new)  # queries that have seen no key yet
    weights = tl.exp2(scores * unit - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    total = total * rescale + tl.sum(weights, 1)
    accumulated = accumulated * rescale[:, None]
    accumulated = tl.dot(weights.to(value.dtype), value, accumulated, input_precision=PRECISION)
    return new, total, accumulated
