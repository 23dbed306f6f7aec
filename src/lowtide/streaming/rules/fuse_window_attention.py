"""Attention of windows written out as products, sums and a softmax, run as one operator.

Models add a bias to the scores and, where windows are shifted over the border, a mask that is as
large as the scores. Most windows are masked by nothing and the others in two or three ways, so
the mask is given as the few patterns that there are and where they stand, and scores are never
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowtide.attention.window_attention import LEAST_CHANNELS, MaskPattern, attend_windows
from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.rules.row_op import RowAxis, RowOp, identity_region
from lowtide.streaming.rules.rule import RuleContext, argument, op_name, sole_producer
from lowtide.streaming.spans import Span


@dataclass
class _Scores:
    """Where the scores of a softmax come from: ``addends`` are the same for all windows."""

    query: NodeRef
    key: NodeRef
    scale: float
    addends: list[int] = field(default_factory=list)
    mask: int | None = None


@dataclass(frozen=True)
class WindowAttentionMatch:
    """Queries, keys and values, whose rows are the windows, and what is added to their scores:
    ``wholes`` are the same for all windows, the last of them a mask if there is one, with the
    dimension of its windows."""

    rows: RowAxis
    inputs: tuple[int, ...]
    wholes: tuple[int, ...]
    patterned: dict[int, int]
    scale: float

    def added(self, whole: Sequence[Any]) -> tuple[Tensor | None, Sequence[MaskPattern]]:
        """Of the wholes the sum of biases, and the patterns of the mask."""
        patterns: Sequence[MaskPattern] = whole[-1] if self.patterned else ()
        bias = None
        for one in whole[:-1] if self.patterned else whole:
            bias = one if bias is None else bias + one
        return bias, patterns


def fuse_window_attention(node: Node, tracked: RuleContext) -> RowOp | None:
    """`match_window_attention` as an operator."""
    found = match_window_attention(node, tracked)
    if found is None:
        return None

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        bias, patterns = found.added(whole)
        query, key, value = pieces
        return attend_windows(query, key, value, bias, patterns, found.scale)

    return RowOp(
        found.rows, found.inputs, found.wholes, identity_region(3), run, patterned=found.patterned
    )


def match_window_attention(node: Node, tracked: RuleContext) -> WindowAttentionMatch | None:
    """The product of a softmax and values of (windows, heads, places, channels), as a whole
    attention; None if that is not what it is, or if rows are not the windows."""
    weights, value = node.args[:2]
    if not isinstance(value, NodeRef) or len(node.like.shape) != 4:
        return None
    scores = _scores(tracked, weights)
    if scores is None:
        return None
    inputs = scores.query.node, scores.key.node, value.node
    rows = tracked.of(value)
    if rows is None or rows.dim != 0 or any(tracked.rows.get(one) != rows for one in inputs):
        return None
    if len(set(inputs)) < len(inputs):
        return None
    if tracked.like(scores.query).shape[-1] < LEAST_CHANNELS:
        return None
    wholes, patterned = tuple(scores.addends), {}
    if scores.mask is not None:
        wholes = *wholes, scores.mask
        patterned[scores.mask] = len(tracked.graph.nodes[scores.mask].like.shape) - 4
    return WindowAttentionMatch(rows, inputs, wholes, patterned, scores.scale)


def _scores(tracked: RuleContext, weights: Any) -> _Scores | None:
    """Follow a softmax back to the product that it is of."""
    softmax = sole_producer(weights, tracked)
    if softmax is None or op_name(softmax.target) not in ("softmax", "_softmax"):
        return None
    shape = softmax.like.shape
    if argument(softmax, 1, "dim") not in (-1, len(shape) - 1) or len(shape) != 4:
        return None
    addends: list[int] = []
    mask: int | None = None
    node = sole_producer(softmax.args[0], tracked)
    while node is not None and op_name(node.target) in ("add", "view"):
        first, *rest = node.args
        # Windows may be a dimension of images and one of windows: of one image, or it has no rows.
        if node.like.shape[-4:] != shape or node.like.count != softmax.like.count or node.kwargs:
            return None
        if op_name(node.target) == "add":
            if not isinstance(rest[0], NodeRef) or rest[0].node not in tracked.fixed:
                return None
            added = tracked.like(rest[0]).shape
            windows, heads = (added[place] if len(added) >= -place else 1 for place in (-4, -3))
            if windows == 1:
                addends.append(rest[0].node)
            elif heads == 1 and mask is None and windows == shape[0]:
                mask = rest[0].node
            else:
                return None
        node = sole_producer(first, tracked)
    found = None if node is None else _product(tracked, node)
    if found is not None:
        found.addends, found.mask = addends, mask
    return found


def _product(tracked: RuleContext, node: Node) -> _Scores | None:
    """The scaled product of queries and keys."""
    scale = 1.0
    if op_name(node.target) in ("mul", "div") and _number(node) is not None:
        scale = _number(node) or 0.0
        inside = sole_producer(node.args[0], tracked)
        if inside is None:
            return None
        node = inside
    if op_name(node.target) != "matmul":
        return None
    query, turned = node.args
    key = sole_producer(turned, tracked)
    if key is None or not _is_turned(key):
        return None
    scaled = sole_producer(query, tracked)
    if scaled is not None and op_name(scaled.target) in ("mul", "div"):
        factor = _number(scaled)
        if factor is not None:
            query, scale = scaled.args[0], scale * factor
    return _Scores(query, key.args[0], scale)


def _number(node: Node) -> float | None:
    """By which number a node multiplies its first argument."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], (int, float)):
        return None
    return node.args[1] if op_name(node.target) == "mul" else 1 / node.args[1]


def _is_turned(node: Node) -> bool:
    """Whether it swaps the last two of four dimensions."""
    if op_name(node.target) == "transpose":
        return sorted(dim % 4 for dim in node.args[1:3]) == [2, 3]
    return op_name(node.target) == "permute" and [dim % 4 for dim in node.args[1]] == [0, 1, 3, 2]
