"""Rules of matrix products and attention: rows as batch, output rows, or summed.

A scale is fused into a product that is summed over the rows: attention between channels divides
queries and keys by their norms over the image, and then sums their products over the image. Run
literally, both must be kept until the norms are known. But the norms are the same for all rows, so
the products are summed in the sweep that makes queries and keys, and divided at the end: the same
values to rounding, and two maps less to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.attention import cpu_ops
from lowtide.attention.backends import get_backend
from lowtide.attention.sdpa_rules import sdpa_kernel_for
from lowtide.attention.spec import AttentionCall, LocalDevice
from lowtide.streaming.capture.graph import GraphNode, NodeRef
from lowtide.streaming.rules.fuse_window_attention import fuse_window_attention
from lowtide.streaming.rules.rule import (
    LoweringContext,
    Reduction,
    RowAxis,
    RowOp,
    Rule,
    RuleResult,
    Run,
    aligned_dim,
    banded_op,
    identity_receptive_field,
    node_argument,
    op_name,
    swaps_last_dims,
)
from lowtide.streaming.spans import Span

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ScaledOperand:
    """Operand of a matmul: ``source`` times or divided by ``scale``, maybe transposed.

    ``scale`` is the same for all rows.
    """

    source: int
    scale: int | None
    divided: bool
    transposed: bool

    def transpose_if_needed(self, tensor: Tensor) -> Tensor:
        """Transpose a band (..., rows, C) of the source, or its scale, if the matmul does."""
        return tensor.mT if self.transposed else tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def matmul_reduction(
    node: GraphNode,
    rows: RowAxis,
    inputs: tuple[int, int],
    left: View = _identity,
    right: View = _identity,
) -> Reduction:
    """Return a reduction that sums the products of bands in double precision."""

    def add(state: Tensor | None, pieces: Sequence[Tensor]) -> Tensor:
        found = torch.matmul(left(pieces[0]), right(pieces[1])).double()
        return found if state is None else state.add_(found)

    def finish(state: Tensor) -> Tensor:
        return state.to(node.meta.dtype)

    return Reduction(rows, inputs, add, finish)


def fuse_scale(
    node: GraphNode, context: LoweringContext, rows: RowAxis
) -> tuple[Reduction, Callable[[int], GraphNode]] | None:
    """Lower a matmul summed over rows with a scaled operand.

    Returns None if neither operand is scaled. Half precision is left alone: unscaled values may
    overflow it.
    """
    sides = [_match_operand(arg, context) for arg in node.args[:2]]
    scales = [one for one in sides if one.scale is not None]
    if not scales or node.meta.dtype == torch.float16 or sides[0].source == sides[1].source:
        return None
    left, right = sides

    def scaled(total: Tensor, *by: Tensor) -> Tensor:
        for one, scale in zip(scales, by, strict=True):
            total = (
                total / one.transpose_if_needed(scale)
                if one.divided
                else total * one.transpose_if_needed(scale)
            )
        return total

    def applied(total: int) -> GraphNode:
        refs = tuple(NodeRef(one.scale) for one in scales if one.scale is not None)
        return replace(node, target=scaled, args=(NodeRef(total), *refs), kwargs={})

    own = replace(rows, dim=context.rows[left.source].dim)
    return matmul_reduction(
        node, own, (left.source, right.source), left.transpose_if_needed, right.transpose_if_needed
    ), applied


def _match_operand(arg: Any, context: LoweringContext) -> ScaledOperand:
    nodes, transposed = context.graph.nodes, False
    node = nodes[arg.node]
    if swaps_last_dims(node):
        node, transposed = nodes[node.args[0].node], True
    unscaled = ScaledOperand(node.index, None, False, transposed)
    name = op_name(node.target)
    if name not in ("div", "mul") or len(node.args) != 2 or node.kwargs:
        return unscaled
    source, scale = node.args
    if name == "mul" and context.row_axis(source) is None:
        source, scale = scale, source
    if not (isinstance(source, NodeRef) and isinstance(scale, NodeRef)) or context.row_axis(scale):
        return unscaled
    rows, shape = context.row_axis(source), context.meta(source).shape
    if rows is None or shape != node.meta.shape:
        return unscaled
    if op_name(nodes[scale.node].target) == "expand":
        scale = nodes[scale.node].args[0]
    scale_shape = context.meta(scale).shape
    if len(scale_shape) != len(shape) or scale_shape[rows.dim] != 1:
        return unscaled
    return ScaledOperand(source.node, scale.node, name == "div", transposed)


def lower_linear(node: GraphNode, context: LoweringContext) -> RowOp | None:
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
        return cpu_ops.cpu_linear(pieces[0], *whole)

    return replace(step, run=run)


def lower_matmul(node: GraphNode, context: LoweringContext) -> RuleResult:
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
        return fuse_scale(node, context, a) or matmul_reduction(node, a, (left.node, right.node))
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


def _left_bands(
    node: GraphNode, rows: RowAxis, left: Any, right: Any, shape: tuple[int, ...]
) -> RowOp:
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


def lower_addmm(node: GraphNode, context: LoweringContext) -> RowOp | None:
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


def lower_scaled_dot_product(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower attention of windows (rows are the batch), or of query bands to all keys."""
    query, key, value = (context.row_axis(arg) for arg in node.args[:3])
    mask, causal = node_argument(node, 3, "attn_mask"), node_argument(node, 5, "is_causal", False)
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
    target, dropout, extra = (
        node.target,
        node_argument(node, 4, "dropout_p", 0.0),
        dict(node.kwargs),
    )
    assert target is not None
    for name in ("attn_mask", "dropout_p", "is_causal"):
        extra.pop(name, None)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        seen = _causal_mask(span, whole[0]) if causal else whole[2] if masks else None
        return target(pieces[0], whole[0], whole[1], seen, dropout, False, **extra)

    inputs = tuple(arg.node for arg in node.args[:3])
    return RowOp(
        query,
        inputs[:1],
        (*inputs[1:], *masks),
        identity_receptive_field(1),
        _unit_strided(run),
        sliced_dims=slices,
        row_workspace_bytes=scores,
    )


def _unit_strided(run: Run) -> Run:
    """Return ``run`` on tensors whose last dim is contiguous.

    For others PyTorch takes the kernel that writes all scores, many times their bytes.
    """

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def run_laid_out(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        return run(span, [laid_out(one) for one in pieces], [laid_out(one) for one in whole])

    return run_laid_out


def _attention_call(node: GraphNode, context: LoweringContext) -> AttentionCall:
    """Describe the whole attention, whose tensors are laid out as `_unit_strided` does."""
    query, key, value = (context.meta(arg).shape for arg in node.args[:3])
    heads, key_heads = (one[-3] if len(one) > 2 else 1 for one in (query, key))
    return AttentionCall(
        context.meta(node.args[0]).dtype,
        query[-1],
        query[-2],
        key[-2],
        value[-1],
        has_mask=node_argument(node, 3, "attn_mask") is not None,
        is_causal=bool(node_argument(node, 5, "is_causal", False)),
        dropout=node_argument(node, 4, "dropout_p", 0.0),
        batch=math.prod(query[:-3]),
        heads=heads,
        key_heads=key_heads,
        dims=len(query),
        is_uniform=query[:-2] == key[:-2] == value[:-2],
    )


def _scores_bytes(node: GraphNode, context: LoweringContext, rows: RowAxis) -> Callable[[int], int]:
    """Return the bytes of a number of rows' scores, 0 where PyTorch's kernel keeps none."""
    call, gpu = _attention_call(node, context), context.graph.gpu
    device = LocalDevice() if gpu is None else LocalDevice.of(gpu)
    if sdpa_kernel_for(device, call) != "math":
        return lambda _: 0
    size = get_backend("sdpa-math").workspace_bytes(device, call)
    return lambda count: size * count // rows.size


def _causal_mask(span: Span, keys: Tensor) -> Tensor:
    """Return which keys (..., S, E) the queries of a span attend to: theirs and all before."""
    places = torch.arange(max(span[1], keys.shape[-2]), device=keys.device)
    return places[slice(*span), None] >= places[: keys.shape[-2]]


RULES: dict[str, Rule] = {
    "linear": lower_linear,
    "matmul": lower_matmul,
    "bmm": lower_matmul,
    "mm": lower_matmul,
    "addmm": lower_addmm,
    "baddbmm": lower_addmm,
    "scaled_dot_product_attention": lower_scaled_dot_product,
}
