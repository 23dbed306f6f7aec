"""Rules of views: permute, reshape, squeeze, expand; they move no row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.rule import (
    InputSpans,
    LoweringContext,
    RowAxis,
    RowOp,
    Rule,
    banded_op,
    node_argument,
    normalize_dims,
    op_name,
    replace_arg,
)
from lowtide.streaming.spans import Span


def permutation_rule(order: Callable[[GraphNode, int], list[int]]) -> Rule:
    """Return the rule of a permutation.

    ``order`` returns for a node and its rank the former dim of each dim.
    """

    def rule(node: GraphNode, context: LoweringContext) -> RowOp | None:
        rows = context.row_axis(node.args[0])
        if rows is None:
            return None
        dim = order(node, len(node.meta.shape)).index(rows.dim)
        return banded_op(node, context, RowAxis(dim, rows.size, rows.grain), cheap=True, view=True)

    return rule


def _transposed(node: GraphNode, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = (rank - 2, rank - 1) if len(node.args) < 3 else node.args[1:3]
    order[first], order[second] = order[second], order[first]
    return order


def _permuted(node: GraphNode, rank: int) -> list[int]:
    return [dim % rank for dim in node_argument(node, 1, "dims")]


def _moved(node: GraphNode, rank: int) -> list[int]:
    source, target = (normalize_dims(dims, rank) for dims in node.args[1:3])
    rest = iter([dim for dim in range(rank) if dim not in source])
    return [source[target.index(place)] if place in target else next(rest) for place in range(rank)]


def lower_unsqueeze(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower an unsqueeze."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    at = node_argument(node, 1, "dim") % len(node.meta.shape)
    dim = rows.dim + (at <= rows.dim)
    return banded_op(node, context, RowAxis(dim, rows.size, rows.grain), cheap=True, view=True)


def lower_drop_dim(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a squeeze, or a select; see `_select_row` for one along the rows."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    shape = context.meta(node.args[0]).shape
    given = normalize_dims(node_argument(node, 1, "dim"), len(shape))
    gone = (
        given
        if len(node.meta.shape) == len(shape) - 1 and len(given) == 1
        else [dim for dim in given if shape[dim] == 1]
    )
    if rows.dim in gone:
        return _select_row(node, context, rows)
    dim = rows.dim - sum(one < rows.dim for one in gone)
    return banded_op(node, context, RowAxis(dim, rows.size, rows.grain), cheap=True, view=True)


def _select_row(node: GraphNode, context: LoweringContext, rows: RowAxis) -> RowOp | None:
    """Lower a select of one row, such as the first frame of a clip, or the squeeze of the only one.

    It is row 0 of a dim of size 1, of the batch if there is one.
    """
    if 1 not in node.meta.shape:
        return None
    selected = op_name(node.target) == "select"
    at = node_argument(node, 2, "index") % rows.size if selected else 0

    def needed(span: Span) -> InputSpans:
        return ([(at + span[0], at + span[1])],)

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return ((*args[:2], 0), {}) if selected else (args, kwargs)

    found = RowAxis(node.meta.shape.index(1), 1)
    return banded_op(
        node, context, found, input_spans=needed, change_args=change, cheap=True, view=True
    )


def lower_expand(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower an expand of dims of size 1, with new leading dims."""
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    dim = rows.dim + len(node.meta.shape) - len(context.meta(node.args[0]).shape)
    if node.meta.shape[dim] != rows.size:
        return None
    found = RowAxis(dim, rows.size, rows.grain)

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return replace_arg(args, 1, _band_shape(node, found, span)), kwargs

    return banded_op(node, context, found, change_args=change, cheap=True, view=True)


def lower_reshape(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a reshape; rows must be the outermost dim of those merged or split.

    One row of the result has ``out`` elements, one row of the input ``inside``: spans are aligned
    to multiples of both.
    """
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    before, after = context.meta(node.args[0]).shape, node.meta.shape
    outer = math.prod(before[: rows.dim])
    inside = math.prod(before[rows.dim + 1 :])
    at, passed = 0, 1
    while at < len(after) and passed < outer:
        passed *= after[at]
        at += 1
    while at < len(after) - 1 and after[at] == 1 and rows.size > 1:
        at += 1
    if passed != outer or at == len(after):
        return None
    out = math.prod(after[at + 1 :])
    grain = math.lcm(out, inside * rows.grain) // out
    if out * after[at] != inside * rows.size:
        return None
    found = RowAxis(at, after[at], grain)

    def needed(span: Span) -> InputSpans:
        first, last = span
        return ([(first * out // inside, last * out // inside)],)

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], _band_shape(node, found, span)), {}

    # reshape, not view: a band may have other strides than the whole, so a view may be impossible
    plain = replace(node, target=torch.ops.aten.reshape.default)
    return banded_op(
        plain, context, found, input_spans=needed, change_args=change, cheap=True, view=True
    )


def _band_shape(node: GraphNode, rows: RowAxis, span: Span) -> list[int]:
    shape = list(node.meta.shape)
    shape[rows.dim] = span[1] - span[0]
    return shape


def _reshape(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower flatten, unflatten and others as a reshape to the result's shape."""
    plain = GraphNode(
        node.index,
        node.name,
        node.kind,
        node.meta,
        torch.ops.aten.reshape.default,
        (node.args[0], list(node.meta.shape)),
    )
    return lower_reshape(plain, context)


RULES: dict[str, Rule] = {
    "permute": permutation_rule(_permuted),
    "transpose": permutation_rule(_transposed),
    "t": permutation_rule(_transposed),
    "mT": permutation_rule(_transposed),
    "movedim": permutation_rule(_moved),
    "unsqueeze": lower_unsqueeze,
    "squeeze": lower_drop_dim,
    "select": lower_drop_dim,
    "expand": lower_expand,
    "view": lower_reshape,
    "reshape": lower_reshape,
    "_unsafe_view": lower_reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "view_as": _reshape,
    "reshape_as": _reshape,
}
