"""Fusion of an MLP: linear, GELU, linear and an optional residual sum.

The hidden tensor has two to four times the channels. Here it is computed for some tokens at a
time, and never stored for a whole band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.attention.linear_ops import linear_layer, mlp, mlp_workspace_bytes
from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.rules.row_op import RowAxis, RowOp, Run, identity_region
from lowtide.streaming.rules.rule import (
    RuleContext,
    argument,
    is_all_of_its_memory,
    op_name,
    sole_producer,
)
from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class _MlpLayers:
    """Two linear layers over the last dim of ``given``, with GELU in between.

    Nothing else takes the hidden tensors.
    """

    given: NodeRef
    first: tuple[int, ...]
    second: tuple[int, ...]


def fuse_mlp(node: Node, tracked: RuleContext) -> RowOp | None:
    """Lower the last node of an MLP, its second linear or its residual sum.

    Returns None if the node is neither, or if weights are not fp32 on the CPU.
    """
    if node.kwargs or len(node.args) < 2:
        return None
    if op_name(node.target) == "linear":
        found = _layers(node, tracked)
        return None if found is None else _operator(node, tracked, found, None)
    if op_name(node.target) != "add" or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        last = sole_producer(one, tracked, "linear")
        found = None if last is None else _layers(last, tracked)
        if found is not None and isinstance(other, NodeRef):
            return _operator(node, tracked, found, other)
    return None


def _layers(last: Node, tracked: RuleContext) -> _MlpLayers | None:
    between = sole_producer(last.args[0], tracked, "gelu")
    if between is None or argument(between, 1, "approximate", "none") != "none":
        return None
    first = sole_producer(between.args[0], tracked, "linear")
    if first is None or not isinstance(first.args[0], NodeRef):
        return None
    if not (is_on_cpu(first, tracked) and is_on_cpu(last, tracked)):
        return None
    return _MlpLayers(first.args[0], weights_of(first), weights_of(last))


def weights_of(layer: Node) -> tuple[int, ...]:
    """Return the nodes of a linear layer's weight and bias, if any."""
    return tuple(ref.node for ref in layer.args[1:] if ref is not None)


def is_on_cpu(layer: Node, tracked: RuleContext) -> bool:
    """Whether a layer's weights are the model's own, fp32 and on the CPU.

    There is a faster kernel for these.
    """
    own = [tracked.graph.tensors.get(one) for one in weights_of(layer)]
    return not layer.kwargs and all(
        one is not None and one.dtype == torch.float32 and one.device.type == "cpu" for one in own
    )


def _operator(
    node: Node, tracked: RuleContext, layers: _MlpLayers, plus: NodeRef | None
) -> RowOp | None:
    rows = tracked.of(layers.given)
    given = (layers.given,) if plus is None else (layers.given, plus)
    inputs = tuple(one.node for one in given)
    wholes = *layers.first, *layers.second
    if rows is None or rows.dim == len(node.like.shape) - 1:
        return None
    if len(set(inputs)) < len(inputs) or len(set(wholes)) < len(wholes):
        return None
    grain = rows.grain
    if plus is not None:
        beside = tracked.of(plus)
        alike = tracked.like(plus) == node.like
        if beside is None or not alike or (beside.dim, beside.size) != (rows.dim, rows.size):
            return None
        grain = math.lcm(grain, beside.grain)
    over = {
        one.node: _over(place, len(layers.first))
        for place, one in enumerate(given)
        if tracked.like(one) == node.like
    }
    first, second = (
        tracked.graph.nodes[one[0]].like.shape for one in (layers.first, layers.second)
    )
    tokens = node.like.count // second[0] // rows.size
    return RowOp(
        RowAxis(rows.dim, rows.size, grain),
        inputs,
        wholes,
        identity_region(len(inputs)),
        _over(None, len(layers.first)),
        over=over,
        scratch_of=lambda count: mlp_workspace_bytes(count * tokens, first, second),
    )


def _over(place: int | None, first: int) -> Run:
    """Return the run of an MLP that writes into an input's memory if that is possible."""

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        layers = linear_layer(whole[:first]), linear_layer(whole[first:])
        out = None if place is None else pieces[place]
        if out is not None:
            out = out if is_all_of_its_memory(out) and out.is_contiguous() else None
        return mlp(pieces[0], *layers, plus=(*pieces, None)[1], out=out)

    return run
