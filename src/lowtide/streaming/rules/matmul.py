"""Products of matrices and attention: rows as a batch, as rows of a result, or summed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lowtide.attention import linear_ops
from lowtide.attention.backends import get
from lowtide.attention.backends.onednn import OneDnn
from lowtide.attention.functional import resolved
from lowtide.attention.spec import AttentionCall, AttentionSpec, LocalDevice
from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.fuse_scale import fuse_scale, summed_matmul
from lowtide.streaming.rules.fuse_window_attention import fuse_window_attention
from lowtide.streaming.rules.row_op import RowAxis, RowOp, identity_region
from lowtide.streaming.rules.rule import (
    Rule,
    RuleContext,
    RuleResult,
    aligned_dim,
    argument,
    banded_op,
)
from lowtide.streaming.spans import Span


def linear(node: Node, tracked: RuleContext) -> RowOp | None:
    """A product with a matrix over the last dimension."""
    rows = tracked.of(node.args[0])
    if rows is None or rows.dim == len(node.like.shape) - 1:
        return None
    if any(tracked.of(arg) for arg in node.args[1:]):
        return None
    step = banded_op(node, tracked, rows)
    if len(node.args) > 3 or node.kwargs or len(set(node.refs)) < len(node.args):
        return step

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return linear_ops.linear(pieces[0], *whole)

    return replace(step, run=run)


def matmul(node: Node, tracked: RuleContext) -> RuleResult:
    """matmul, bmm and mm.

    Where rows are summed over, the products of bands are added up. Where they are rows of the
    left and columns of the right (scores of attention over the image), the right is taken whole.
    """
    left, right = node.args[:2]
    a, b = tracked.of(left), tracked.of(right)
    shapes = tracked.like(left).shape, tracked.like(right).shape
    rank = len(node.like.shape)
    if min(map(len, shapes)) < 2:
        return None
    # Places counted from the end, which are the same in both and in the result.
    at_a, at_b = (
        None if rows is None else rows.dim - len(shape)
        for rows, shape in zip((a, b), shapes, strict=True)
    )
    if at_a == -1 and at_b == -2 and a is not None and b is not None:
        if a.size != b.size or left.node == right.node:
            return None
        return fuse_scale(node, tracked, a) or summed_matmul(node, a, (left.node, right.node))
    if at_a is not None and a is not None and at_a != -1:
        if at_b == at_a and at_a < -2:
            rows = RowAxis(at_a + rank, a.size, a.grain)
            return fuse_window_attention(node, tracked) or banded_op(node, tracked, rows)
        if b is not None and at_a != -2:
            return None
        return _left(node, RowAxis(at_a + rank, a.size, a.grain), left, right, shapes[1])
    if b is not None and at_b is not None and at_b != -2 and a is None:
        rows = RowAxis(at_b + rank, b.size, b.grain)
        dim = aligned_dim(rows, rank, shapes[0]) if at_b < -2 else None
        return banded_op(node, tracked, rows, slices={} if dim is None else {left.node: dim})
    return None


def _left(node: Node, rows: RowAxis, left: Any, right: Any, shape: tuple[int, ...]) -> RowOp:
    """Bands of the left with all of the right, whether that has rows or not."""
    target = node.target
    assert target is not None
    aligned = rows.dim - len(node.like.shape) + len(shape)
    cut = rows.dim < len(node.like.shape) - 2 and aligned >= 0 and shape[aligned] > 1

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return target(pieces[0], whole[0])

    sliced = {right.node: aligned} if cut else {}
    return RowOp(rows, (left.node,), (right.node,), identity_region(1), run, sliced=sliced)


def addmm(node: Node, tracked: RuleContext) -> RowOp | None:
    """addmm and baddbmm: a product, and something added that has no rows, or just its own."""
    rows = tracked.of(node.args[1])
    rank = len(node.like.shape)
    if rows is None or rows.dim == rank - 1 or tracked.of(node.args[2]) or tracked.of(node.args[0]):
        return None
    slices = {}
    for arg in (node.args[0], node.args[2]):
        dim = aligned_dim(rows, rank, tracked.like(arg).shape)
        if dim is not None and (arg is node.args[0] or rows.dim < rank - 2):
            slices[arg.node] = dim
    return banded_op(node, tracked, rows, slices=slices)


def scaled_dot_product(node: Node, tracked: RuleContext) -> RowOp | None:
    """Attention of windows, whose rows are a batch; or of bands of queries to the whole image."""
    query, key, value = (tracked.of(arg) for arg in node.args[:3])
    mask = argument(node, 3, "attn_mask")
    rank = len(node.like.shape)
    if query is None or query.dim == rank - 1 or argument(node, 5, "is_causal", False):
        return None
    if query.dim < rank - 2:
        if not (query == key == value):
            return None
        slices = {}
        if mask is not None and tracked.of(mask) is None:
            dim = aligned_dim(query, rank, tracked.like(mask).shape)
            if dim is not None:
                slices[mask.node] = dim
        return banded_op(node, tracked, query, slices=slices)
    if mask is not None:
        return None
    target, extra = node.target, node.kwargs
    assert target is not None
    rest = node.args[3:]

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return target(pieces[0], whole[0], whole[1], *rest, **extra)

    inputs = tuple(arg.node for arg in node.args[:3])
    step = RowOp(query, inputs[:1], inputs[1:], identity_region(1), run)
    return _by_onednn(node, tracked, step) or step


def _by_onednn(node: Node, tracked: RuleContext, step: RowOp) -> RowOp | None:
    """``step`` by the backend of that name, if it is the one for this attention: the same for all
    bands, which would round differently otherwise."""
    query, key, value = (tracked.like(arg) for arg in node.args[:3])
    if len(query.shape) != 4 or not tracked.graph.on_cpu:
        return None
    batch, heads, queries, width = query.shape
    call = AttentionCall(
        query.dtype,
        width,
        queries,
        key.shape[2],
        value.shape[3],
        batch=batch,
        heads=heads,
        key_heads=key.shape[1],
    )
    backend = get(resolved(call, LocalDevice(), None, None).backend)
    if not isinstance(backend, OneDnn):
        return None
    spec = AttentionSpec(node.kwargs.get("scale"))

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return backend.run(pieces[0], whole[0], whole[1], None, spec)

    tokens = queries // step.rows.size

    def taken(rows: int) -> int:
        return backend.part_bytes(replace(call, query_tokens=rows * tokens))

    copies = 0 if heads == 1 else backend.copied_bytes(call)
    return replace(step, run=run, scratch_of=taken, scratch_bytes=copies)


RULES: dict[str, Rule] = {
    "linear": linear,
    "matmul": matmul,
    "bmm": matmul,
    "mm": matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "scaled_dot_product_attention": scaled_dot_product,
}
