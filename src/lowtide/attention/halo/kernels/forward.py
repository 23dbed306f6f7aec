"""The forward pass: a program for a tile of one window's queries."""
# Triton's language has no types, and its functions are not what they look like to a checker.
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.attention.halo.kernels.parts import (
    first_key,
    key_tile,
    load_pixels,
    own_queries,
    score_tile,
    store_pixels,
)


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
    batch, head, start_y, start_x, y, x, there = own_queries(
        height, width, heads, phase_y, phase_x, STEP, TILE_H, TILE_W
    )
    query = load_pixels(
        q + batch * q_batch + head * q_head, y, x, there, q_row, q_column, HEAD, WIDE
    )
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    first_y = first_key(start_y, height, MARGIN, SIZE, BOUNDARY)
    first_x = first_key(start_x, width, MARGIN, SIZE, BOUNDARY)
    most = tl.full([TILE_H * TILE_W], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H * TILE_W], tl.float32)
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
    store_pixels(
        out + batch * o_batch + head * o_head, result, y, x, there, o_row, o_column, HEAD, WIDE
    )
    plane = (batch * heads + head) * height.to(tl.int64) * width
    tl.store(sums + plane + y.to(tl.int64) * width + x, most + tl.log2(divisor), mask=there)
