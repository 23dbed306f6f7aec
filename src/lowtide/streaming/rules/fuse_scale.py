"""Fusion of a scale into a matmul over the rows: scale the sum, not the operands.

Attention between channels divides queries and keys by their norms over the image, and then sums
their products over the image. Run literally, both must be kept until the norms are known. But the
norms are the same for all rows, so the products are summed in the sweep that makes queries and
keys, and divided at the end: the same values to rounding, and two maps less to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.rules.row_op import Reduction, RowAxis
from lowtide.streaming.rules.rule import RuleContext, op_name, swaps_last_dims

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


def summed_matmul(
    node: Node,
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
    node: Node, context: RuleContext, rows: RowAxis
) -> tuple[Reduction, Callable[[int], Node]] | None:
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

    def applied(total: int) -> Node:
        refs = tuple(NodeRef(one.scale) for one in scales if one.scale is not None)
        return replace(node, target=scaled, args=(NodeRef(total), *refs), kwargs={})

    own = replace(rows, dim=context.rows[left.source].dim)
    return summed_matmul(
        node, own, (left.source, right.source), left.transpose_if_needed, right.transpose_if_needed
    ), applied


def _match_operand(arg: Any, context: RuleContext) -> ScaledOperand:
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
