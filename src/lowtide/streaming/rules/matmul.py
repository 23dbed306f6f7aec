"""Rules of matrix products and attention: rows as batch, output rows, or summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.attention import cpu_ops
from lowtide.attention.backends import get
from lowtide.attention.backends.onednn import OneDnn
from lowtide.attention.functional import resolve_cached
from lowtide.attention.sdpa_rules import sdpa_kernel_for
from lowtide.attention.spec import AttentionCall, AttentionSpec, LocalDevice
from lowtide.streaming.capture.graph import Node
from lowtide.streaming.rules.fuse_scale import fuse_scale, summed_matmul
from lowtide.streaming.rules.fuse_window_attention import fuse_window_attention
from lowtide.streaming.rules.row_op import RowAxis, RowOp, Run, identity_receptive_field
from lowtide.streaming.rules.rule import (
    Rule,
    RuleContext,
    RuleResult,
    aligned_dim,
    argument,
    banded_op,
)
from lowtide.streaming.spans import Span


def linear(node: Node, context: RuleContext) -> RowOp | None:
    """Lower a linear layer over the last dim."""
    rows = context.row_axis(node.args[0])
    if rows is None or rows.dim == len(node.meta.shape) - 1:
        return None
    if any(context.row_axis(arg) for arg in node.args[1:]):
        return None
    step = banded_op(node, context, rows)
    if len(node.args) > 3 or node.kwargs or len(set(node.refs)) < len(node.args):
        return step

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return cpu_ops.linear(pieces[0], *whole)

    return replace(step, run=run)


def matmul(node: Node, context: RuleContext) -> RuleResult:
    """Lower matmul, bmm and mm.

    Where rows are the summed dim, products of bands are added. Where they are rows of the left and
    columns of the right (global attention scores), the right is taken whole.
    """
    left, right = node.args[:2]
    a, b = context.row_axis(left), context.row_axis(right)
    shapes = context.meta(left).shape, context.meta(right).shape
    rank = len(node.meta.shape)
    if min(map(len, shapes)) < 2:
        return None
    # Dims counted from the end, which broadcasting aligns.
    at_a, at_b = (
        None if rows is None else rows.dim - len(shape)
        for rows, shape in zip((a, b), shapes, strict=True)
    )
    if at_a == -1 and at_b == -2 and a is not None and b is not None:
        if a.size != b.size or left.node == right.node:
            return None
        return fuse_scale(node, context, a) or summed_matmul(node, a, (left.node, right.node))
    if at_a is not None and a is not None and at_a != -1:
        if at_b == at_a and at_a < -2:
            rows = RowAxis(at_a + rank, a.size, a.grain)
            return fuse_window_attention(node, context) or banded_op(node, context, rows)
        if b is not None and at_a != -2:
            return None
        return _left_bands(node, RowAxis(at_a + rank, a.size, a.grain), left, right, shapes[1])
    if b is not None and at_b is not None and at_b != -2 and a is None:
        rows = RowAxis(at_b + rank, b.size, b.grain)
        dim = aligned_dim(rows, rank, shapes[0]) if at_b < -2 else None
        return banded_op(node, context, rows, sliced_dims={} if dim is None else {left.node: dim})
    return None


def _left_bands(node: Node, rows: RowAxis, left: Any, right: Any, shape: tuple[int, ...]) -> RowOp:
    """Return bands of the left operand times the whole right one."""
    target = node.target
    assert target is not None
    aligned = rows.dim - len(node.meta.shape) + len(shape)
    is_sliced = rows.dim < len(node.meta.shape) - 2 and aligned >= 0 and shape[aligned] > 1

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return target(pieces[0], whole[0])

    sliced = {right.node: aligned} if is_sliced else {}
    return RowOp(
        rows, (left.node,), (right.node,), identity_receptive_field(1), run, sliced_dims=sliced
    )


def addmm(node: Node, context: RuleContext) -> RowOp | None:
    """Lower addmm and baddbmm with rows in the left matrix only.

    The added tensor and a batched right matrix are sliced to the band where aligned.
    """
    rows = context.row_axis(node.args[1])
    rank = len(node.meta.shape)
    if (
        rows is None
        or rows.dim == rank - 1
        or context.row_axis(node.args[2])
        or context.row_axis(node.args[0])
    ):
        return None
    slices = {}
    for arg in (node.args[0], node.args[2]):
        dim = aligned_dim(rows, rank, context.meta(arg).shape)
        if dim is not None and (arg is node.args[0] or rows.dim < rank - 2):
            slices[arg.node] = dim
    return banded_op(node, context, rows, sliced_dims=slices)


def scaled_dot_product(node: Node, context: RuleContext) -> RowOp | None:
    """Lower attention of windows (rows are the batch), or of query bands to all keys."""
    query, key, value = (context.row_axis(arg) for arg in node.args[:3])
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", False)
    rank = len(node.meta.shape)
    if query is None or query.dim == rank - 1 or context.row_axis(mask):
        return None
    masks: tuple[int, ...] = () if mask is None else (mask.node,)
    aligned = {one: aligned_dim(query, rank, context.graph.meta(one).shape) for one in masks}
    slices = {one: dim for one, dim in aligned.items() if dim is not None}
    scores = _scores_bytes(node, context, query)
    if query.dim < rank - 2:
        if not (query == key == value):
            return None
        step = banded_op(node, context, query, sliced_dims=slices)
        return replace(step, run=_unit_strided(step.run), row_workspace_bytes=scores)
    target, dropout, extra = node.target, argument(node, 4, "dropout_p", 0.0), dict(node.kwargs)
    assert target is not None
    for name in ("attn_mask", "dropout_p", "is_causal"):
        extra.pop(name, None)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        seen = _causal_mask(span, whole[0]) if causal else whole[2] if masks else None
        return target(pieces[0], whole[0], whole[1], seen, dropout, False, **extra)

    inputs = tuple(arg.node for arg in node.args[:3])
    step = RowOp(
        query,
        inputs[:1],
        (*inputs[1:], *masks),
        identity_receptive_field(1),
        _unit_strided(run),
        sliced_dims=slices,
        row_workspace_bytes=scores,
    )
    plain = not masks and not causal
    return (_onednn_attention(node, context, step) if plain else None) or step


def _unit_strided(run: Run) -> Run:
    """Return ``run`` on tensors whose last dim is contiguous.

    For others PyTorch takes the kernel that writes all scores, many times their bytes.
    """

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def run_laid_out(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        return run(span, [laid_out(one) for one in pieces], [laid_out(one) for one in whole])

    return run_laid_out


def _attention_call(node: Node, context: RuleContext) -> AttentionCall:
    """Describe the whole attention, whose tensors are laid out as `_unit_strided` does."""
    query, key, value = (context.meta(arg).shape for arg in node.args[:3])
    heads, key_heads = (one[-3] if len(one) > 2 else 1 for one in (query, key))
    return AttentionCall(
        context.meta(node.args[0]).dtype,
        query[-1],
        query[-2],
        key[-2],
        value[-1],
        has_mask=argument(node, 3, "attn_mask") is not None,
        is_causal=bool(argument(node, 5, "is_causal", False)),
        dropout=argument(node, 4, "dropout_p", 0.0),
        batch=math.prod(query[:-3]),
        heads=heads,
        key_heads=key_heads,
        dims=len(query),
        is_uniform=query[:-2] == key[:-2] == value[:-2],
    )


def _scores_bytes(node: Node, context: RuleContext, rows: RowAxis) -> Callable[[int], int]:
    """Return the bytes of a number of rows' scores, 0 where PyTorch's kernel keeps none."""
    call, gpu = _attention_call(node, context), context.graph.gpu
    device = LocalDevice() if gpu is None else LocalDevice.of(gpu)
    if sdpa_kernel_for(device, call) != "math":
        return lambda _: 0
    size = get("sdpa-math").workspace_bytes(device, call)
    return lambda count: size * count // rows.size


def _causal_mask(span: Span, keys: Tensor) -> Tensor:
    """Return which keys (..., S, E) the queries of a span attend to: theirs and all before."""
    places = torch.arange(max(span[1], keys.shape[-2]), device=keys.device)
    return places[slice(*span), None] >= places[: keys.shape[-2]]


def _onednn_attention(node: Node, context: RuleContext, step: RowOp) -> RowOp | None:
    """Return ``step`` on the oneDNN backend if that is the choice for this attention.

    It is chosen for the whole and used for all bands, since another backend would round
    differently.
    """
    call = _attention_call(node, context)
    if call.dims != 4 or not context.graph.on_cpu:
        return None
    backend = get(resolve_cached(call, LocalDevice(), None, None).backend)
    if not isinstance(backend, OneDnn):
        return None
    spec = AttentionSpec(node.kwargs.get("scale"))

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        return backend.run(pieces[0], whole[0], whole[1], None, spec)

    tokens = call.query_tokens // step.rows.size

    def taken(rows: int) -> int:
        return backend.block_bytes(replace(call, query_tokens=rows * tokens))

    copies = 0 if call.heads == 1 else backend.copied_bytes(call)
    return replace(step, run=run, row_workspace_bytes=taken, fixed_workspace_bytes=copies)


RULES: dict[str, Rule] = {
    "linear": linear,
    "matmul": matmul,
    "bmm": matmul,
    "mm": matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "scaled_dot_product_attention": scaled_dot_product,
}
