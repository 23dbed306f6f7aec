"""Sums over rows of what was scaled by something of all rows: the scale waits for the sum.

Attention between channels divides queries and keys by their norms over the image and then sums
their products over the image. Taken word by word both must be kept until the norms are known. But
the norms are the same for all rows, so the products can be summed in the sweep that makes queries
and keys, and divided in the end: the same numbers to rounding, and two maps less to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.rules.row_op import Reduction, RowAxis
from lowtide.streaming.rules.rule import RuleContext, op_name

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ScaledOperand:
    """``source`` times or divided by ``scale``, which is the same for all rows, transposed."""

    source: int
    scale: int | None
    divided: bool
    transposed: bool

    def plain(self, tensor: Tensor) -> Tensor:
        """A band of the source, or its scale, as the product takes it."""
        return tensor.mT if self.transposed else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def summed_matmul(
    node: Node,
    rows: RowAxis,
    inputs: tuple[int, int],
    left: View = _as_it_is,
    right: View = _as_it_is,
) -> Reduction:
    """The products of bands added up in double precision."""

    def add(state: Tensor | None, pieces: Sequence[Tensor]) -> Tensor:
        found = torch.matmul(left(pieces[0]), right(pieces[1])).double()
        return found if state is None else state.add_(found)

    def finish(state: Tensor) -> Tensor:
        return state.to(node.like.dtype)

    return Reduction(rows, inputs, add, finish)


def fuse_scale(
    node: Node, tracked: RuleContext, rows: RowAxis
) -> tuple[Reduction, Callable[[int], Node]] | None:
    """A product summed over rows, if one side is scaled; None otherwise.

    Half precision is left as it is: what is not scaled yet may be too large for it.
    """
    sides = [_side(arg, tracked) for arg in node.args[:2]]
    scales = [one for one in sides if one.scale is not None]
    if not scales or node.like.dtype == torch.float16 or sides[0].source == sides[1].source:
        return None
    left, right = sides

    def scaled(total: Tensor, *by: Tensor) -> Tensor:
        for one, scale in zip(scales, by, strict=True):
            total = total / one.plain(scale) if one.divided else total * one.plain(scale)
        return total

    def applied(total: int) -> Node:
        refs = tuple(NodeRef(one.scale) for one in scales if one.scale is not None)
        return replace(node, target=scaled, args=(NodeRef(total), *refs), kwargs={})

    own = replace(rows, dim=tracked.rows[left.source].dim)
    return summed_matmul(node, own, (left.source, right.source), left.plain, right.plain), applied


def _side(arg: Any, tracked: RuleContext) -> ScaledOperand:
    nodes, transposed = tracked.graph.nodes, False
    node = nodes[arg.node]
    if _is_swap(node):
        node, transposed = nodes[node.args[0].node], True
    plain = ScaledOperand(node.index, None, False, transposed)
    name = op_name(node.target)
    if name not in ("div", "mul") or len(node.args) != 2 or node.kwargs:
        return plain
    source, scale = node.args
    if name == "mul" and tracked.of(source) is None:
        source, scale = scale, source
    if not (isinstance(source, NodeRef) and isinstance(scale, NodeRef)) or tracked.of(scale):
        return plain
    rows, shape = tracked.of(source), tracked.like(source).shape
    if rows is None or shape != node.like.shape:
        return plain
    if op_name(nodes[scale.node].target) == "expand":
        scale = nodes[scale.node].args[0]
    alike = tracked.like(scale).shape
    if len(alike) != len(shape) or alike[rows.dim] != 1:
        return plain
    return ScaledOperand(source.node, scale.node, name == "div", transposed)


def _is_swap(node: Node) -> bool:
    """Whether a node swaps the last two dimensions."""
    rank = len(node.like.shape)
    if op_name(node.target) != "transpose":
        return False
    return {dim % rank for dim in node.args[1:3]} == {rank - 2, rank - 1}
