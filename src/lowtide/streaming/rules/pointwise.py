"""Rules of pointwise operators, and of row-wise softmax and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.attention.cpu_ops import to_contiguous
from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.rule import (
    LoweringContext,
    RowAxis,
    RowOp,
    Rule,
    aligned_dim,
    banded_op,
    node_argument,
    normalize_dims,
    op_name,
)
from lowtide.streaming.spans import Span

# Pointwise operators that PyTorch does not tag so, or only for some overloads.
UNTAGGED_POINTWISE_OPS = {
    "alias",
    "clone",
    "contiguous",
    "copy",
    "detach",
    "dropout",
    "empty_like",
    "feature_dropout",
    "fill",
    "full_like",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
    "lift_fresh_copy",
    "nan_to_num",
    "ones_like",
    "relu6",
    "to",
    "where",
    "zeros_like",
    "_to_copy",
    "selu",
}
_VIEWS = {"alias", "detach", "contiguous"}


def is_pointwise(node: GraphNode) -> bool:
    """Whether a node is pointwise, so that `lower_pointwise` is its rule."""
    return (
        torch.Tag.pointwise in getattr(node.target, "tags", ())
        or op_name(node.target) in UNTAGGED_POINTWISE_OPS
    )


def lower_pointwise(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a pointwise operator with broadcasting."""
    rank = len(node.meta.shape)
    found: RowAxis | None = None
    slices: dict[int, int] = {}
    for place in node.refs:
        shape = context.graph.nodes[place].meta.shape
        rows = context.rows.get(place)
        if rows is None:
            continue
        at = RowAxis(rows.dim + rank - len(shape), rows.size, rows.grain)
        if found is not None:
            if (found.dim, found.size) != (at.dim, at.size):
                return None
            at = RowAxis(at.dim, at.size, math.lcm(at.grain, found.grain))
        found = at
    if found is None or node.meta.shape[found.dim] != found.size:
        return None
    for place in node.refs:
        dim = aligned_dim(found, rank, context.graph.nodes[place].meta.shape)
        if place not in context.rows and dim is not None:
            slices[place] = dim
    step = banded_op(
        node, context, found, cheap=True, view=op_name(node.target) in _VIEWS, sliced_dims=slices
    )
    memory_format = node.kwargs.get("memory_format")
    if op_name(node.target) == "clone" and memory_format is torch.contiguous_format:
        return replace(step, run=_to_contiguous)
    return step


def _to_contiguous(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
    """Copy only to make the piece contiguous.

    A copy for safety is not needed, since nothing writes to what a segment still reads.
    """
    return to_contiguous(pieces[0])


def lower_per_channel(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower PReLU, and batch norm in eval mode."""
    rows = context.row_axis(node.args[0])
    if rows is None or rows.dim == 1 or any(context.row_axis(arg) for arg in node.args[1:]):
        return None
    if op_name(node.target) == "batch_norm" and node_argument(node, 5, "training"):
        return None
    return banded_op(node, context, rows, cheap=True)


def lower_along_other_dims(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower softmax and cumsum along dims other than the rows'."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    rank = len(node.meta.shape)
    dim = node_argument(node, 1, "dim")
    return (
        None
        if rows.dim in normalize_dims(dim, rank)
        else banded_op(node, context, rows, cheap=True)
    )


def lower_norm_last_dims(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower layer norm and RMS norm over the last dims."""
    rows = context.row_axis(node.args[0])
    if rows is None or rows.dim >= len(node.meta.shape) - len(node.args[1]):
        return None
    return banded_op(node, context, rows, cheap=True)


def lower_slice_scatter(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a slice_scatter along a dim other than the rows'."""
    dim = node_argument(node, 2, "dim", 0) % len(node.meta.shape)
    base, other = (context.row_axis(arg) for arg in node.args[:2])
    if base is None or other is None or (base.dim, base.size) != (other.dim, other.size):
        return None
    if dim == base.dim:
        return None
    rows = RowAxis(base.dim, base.size, math.lcm(base.grain, other.grain))
    return banded_op(node, context, rows, cheap=True)


RULES: dict[str, Rule] = {
    "prelu": lower_per_channel,
    "batch_norm": lower_per_channel,
    "_native_batch_norm_legit_no_training[0]": lower_per_channel,
    "softmax": lower_along_other_dims,
    "_softmax": lower_along_other_dims,
    "log_softmax": lower_along_other_dims,
    "cumsum": lower_along_other_dims,
    "layer_norm": lower_norm_last_dims,
    "rms_norm": lower_norm_last_dims,
    "slice_scatter": lower_slice_scatter,
}
