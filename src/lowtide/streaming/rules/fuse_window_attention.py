"""Fusion of window attention: matmul, bias, mask, softmax and matmul.

Models add a bias to the scores and, for shifted windows, a mask as large as the scores. Most
windows have no mask, and the others only two or three different ones. So the mask is passed as
its distinct patterns with their windows, and scores are never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.window_attention import MIN_HEAD_DIM, MaskPattern, attend_windows
from lowtide.streaming.capture.graph import GraphNode, NodeRef
from lowtide.streaming.rules.rule import (
    LoweringContext,
    RowOp,
    identity_receptive_field,
    node_argument,
    op_name,
    sole_producer,
    swaps_last_dims,
)
from lowtide.streaming.spans import Span


@dataclass
class _Scores:
    """Sources of attention scores; ``biases`` are biases, equal for all windows."""

    query: NodeRef
    key: NodeRef
    scale: float
    biases: list[int] = field(default_factory=list)
    mask: int | None = None


def fuse_window_attention(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower the product of a softmax and values as a window attention.

    Returns None if it is none, or if rows are not the windows. Values are (windows, heads, N, head
    dim).
    """
    weights, value = node.args[:2]
    if not isinstance(value, NodeRef) or len(node.meta.shape) != 4:
        return None
    scores = _match_scores(context, weights)
    if scores is None or context.meta(scores.query).shape[-1] < MIN_HEAD_DIM:
        return None
    inputs = scores.query.node, scores.key.node, value.node
    rows = context.row_axis(value)
    if rows is None or rows.dim != 0 or any(context.rows.get(one) != rows for one in inputs):
        return None
    if len(set(inputs)) < len(inputs):
        return None
    count, mask, scale = len(scores.biases), scores.mask, scores.scale
    dims = {} if mask is None else {mask: len(context.graph.nodes[mask].meta.shape) - 4}

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        query, key, value = pieces
        bias = reduce(torch.add, whole[:count]) if count else None
        patterns: Sequence[MaskPattern] = whole[count] if dims else ()
        return attend_windows(query, key, value, bias, patterns, scale)

    return RowOp(
        rows,
        inputs,
        (*scores.biases, *dims),
        identity_receptive_field(3),
        run,
        pattern_dims=dims,
    )


def _match_scores(context: LoweringContext, weights: Any) -> _Scores | None:
    """Return the sources of the scores of a softmax, or None."""
    softmax = sole_producer(weights, context)
    if softmax is None or op_name(softmax.target) not in ("softmax", "_softmax"):
        return None
    shape = softmax.meta.shape
    if node_argument(softmax, 1, "dim") not in (-1, len(shape) - 1) or len(shape) != 4:
        return None
    biases: list[int] = []
    mask: int | None = None
    node = sole_producer(softmax.args[0], context)
    while node is not None and op_name(node.target) in ("add", "view"):
        first, *rest = node.args
        # A view may split windows to (B, N), with B of 1; otherwise it has no row axis.
        if node.meta.shape[-4:] != shape or node.meta.numel != softmax.meta.numel or node.kwargs:
            return None
        if op_name(node.target) == "add":
            if not isinstance(rest[0], NodeRef) or rest[0].node not in context.constants:
                return None
            added = context.meta(rest[0]).shape
            windows, heads = (added[place] if len(added) >= -place else 1 for place in (-4, -3))
            if windows == 1:
                biases.append(rest[0].node)
            elif heads == 1 and mask is None and windows == shape[0]:
                mask = rest[0].node
            else:
                return None
        node = sole_producer(first, context)
    found = None if node is None else _match_product(context, node)
    if found is not None:
        found.biases, found.mask = biases, mask
    return found


def _match_product(context: LoweringContext, node: GraphNode) -> _Scores | None:
    """Return the sources of a scaled product of queries and keys, or None."""
    scale = 1.0
    if op_name(node.target) in ("mul", "div") and _scale_factor(node) is not None:
        scale = _scale_factor(node) or 0.0
        inside = sole_producer(node.args[0], context)
        if inside is None:
            return None
        node = inside
    if op_name(node.target) != "matmul":
        return None
    query, turned = node.args
    key = sole_producer(turned, context)
    if key is None or not swaps_last_dims(key):
        return None
    scaled = sole_producer(query, context)
    if scaled is not None and op_name(scaled.target) in ("mul", "div"):
        factor = _scale_factor(scaled)
        if factor is not None:
            query, scale = scaled.args[0], scale * factor
    return _Scores(query, key.args[0], scale)


def _scale_factor(node: GraphNode) -> float | None:
    """Return the factor by which a node multiplies its first argument, or None."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], (int, float)):
        return None
    return node.args[1] if op_name(node.target) == "mul" else 1 / node.args[1]
