"""Operators that name, order, split and merge dimensions, and move no row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowtide.streaming.bands.graph import Node
from lowtide.streaming.bands.rows import Needs, RowOp, Rows
from lowtide.streaming.bands.rules.rule import (
    Rule,
    Tracked,
    argument,
    dims_of,
    mapped,
    replaced,
)
from lowtide.streaming.bands.spans import Span


def reordered(order: Callable[[Node, int], list[int]]) -> Rule:
    """Dimensions in another order; ``order`` gives for each its former place."""

    def rule(node: Node, tracked: Tracked) -> RowOp | None:
        rows = tracked.of(node.args[0])
        if rows is None:
            return None
        dim = order(node, len(node.like.shape)).index(rows.dim)
        return mapped(node, tracked, Rows(dim, rows.size, rows.grain), cheap=True, view=True)

    return rule


def _transposed(node: Node, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = (rank - 2, rank - 1) if len(node.args) < 3 else node.args[1:3]
    order[first], order[second] = order[second], order[first]
    return order


def _permuted(node: Node, rank: int) -> list[int]:
    return [dim % rank for dim in argument(node, 1, "dims")]


def _moved(node: Node, rank: int) -> list[int]:
    source, target = (dims_of(dims, rank) for dims in node.args[1:3])
    rest = iter([dim for dim in range(rank) if dim not in source])
    return [source[target.index(place)] if place in target else next(rest) for place in range(rank)]


def unsqueezed(node: Node, tracked: Tracked) -> RowOp | None:
    """A new dimension of 1."""
    rows = tracked.of(node.args[0])
    if rows is None:
        return None
    at = argument(node, 1, "dim") % len(node.like.shape)
    dim = rows.dim + (at <= rows.dim)
    return mapped(node, tracked, Rows(dim, rows.size, rows.grain), cheap=True, view=True)


def dropped(node: Node, tracked: Tracked) -> RowOp | None:
    """One dimension less: of 1, or of which one place is taken."""
    rows = tracked.of(node.args[0])
    if rows is None:
        return None
    shape = tracked.like(node.args[0]).shape
    given = dims_of(argument(node, 1, "dim"), len(shape))
    gone = (
        given
        if len(node.like.shape) == len(shape) - 1 and len(given) == 1
        else [dim for dim in given if shape[dim] == 1]
    )
    if rows.dim in gone:
        return None
    dim = rows.dim - sum(one < rows.dim for one in gone)
    return mapped(node, tracked, Rows(dim, rows.size, rows.grain), cheap=True, view=True)


def expanded(node: Node, tracked: Tracked) -> RowOp | None:
    """Dimensions of 1 repeated, and new ones in front."""
    rows = tracked.of(node.args[0])
    if rows is None:
        return None
    dim = rows.dim + len(node.like.shape) - len(tracked.like(node.args[0]).shape)
    if node.like.shape[dim] != rows.size:
        return None
    found = Rows(dim, rows.size, rows.grain)

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return replaced(args, 1, _resized(node, found, span)), kwargs

    return mapped(node, tracked, found, change=change, cheap=True, view=True)


def viewed(node: Node, tracked: Tracked) -> RowOp | None:
    """Dimensions split and merged: rows must be the outermost of those that they share.

    A place of the result holds as many numbers as ``out``, one of the input ``inside``: spans of
    both begin where they meet.
    """
    rows = tracked.of(node.args[0])
    if rows is None:
        return None
    before, after = tracked.like(node.args[0]).shape, node.like.shape
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
    found = Rows(at, after[at], grain)

    def needed(span: Span) -> Needs:
        first, last = span
        return ([(first * out // inside, last * out // inside)],)

    def change(span: Span, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args[0], _resized(node, found, span)), {}

    # A band may lie in another order than the whole, in which a view is not always one.
    plain = replace(node, target=torch.ops.aten.reshape.default)
    return mapped(plain, tracked, found, needed=needed, change=change, cheap=True, view=True)


def _resized(node: Node, rows: Rows, span: Span) -> list[int]:
    shape = list(node.like.shape)
    shape[rows.dim] = span[1] - span[0]
    return shape


def _reshape(node: Node, tracked: Tracked) -> RowOp | None:
    """Whatever takes no shape becomes a reshape."""
    plain = Node(
        node.index,
        node.name,
        node.kind,
        node.like,
        torch.ops.aten.reshape.default,
        (node.args[0], list(node.like.shape)),
    )
    return viewed(plain, tracked)


RULES: dict[str, Rule] = {
    "permute": reordered(_permuted),
    "transpose": reordered(_transposed),
    "t": reordered(_transposed),
    "mT": reordered(_transposed),
    "movedim": reordered(_moved),
    "unsqueeze": unsqueezed,
    "squeeze": dropped,
    "select": dropped,
    "expand": expanded,
    "view": viewed,
    "reshape": viewed,
    "_unsafe_view": viewed,
    "flatten": _reshape,
    "unflatten": _reshape,
    "view_as": _reshape,
    "reshape_as": _reshape,
}
