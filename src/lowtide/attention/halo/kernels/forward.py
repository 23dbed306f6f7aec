"""Triton kernel of the halo attention's forward pass, one program per query tile."""
# Triton's language has no types, and type checkers cannot analyze its functions.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportOptionalOperand=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.attention.halo.kernels.common import (
    LOG2E,
    bias_tile,
    head_of,
    load_keys,
    load_pixels,
    own_window,
    query_tile,
    store_pixels,
    tiles_inside,
)


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
