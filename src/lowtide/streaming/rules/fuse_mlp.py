"""Two linear layers with GELU between them, and a sum behind them, run as one operator.

What lies between has two to four times the channels, and would be written and read again for a
whole band; here it is made for some tokens at a time.
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
    """Two layers over the last dimension of ``given``; nothing else takes what lies between."""

    given: NodeRef
    first: tuple[int, ...]
    second: tuple[int, ...]


def fuse_mlp(node: Node, tracked: RuleContext) -> RowOp | None:
    """The second of two layers, or a sum of it and of something of its shape; None if a node is
    neither."""
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
    """The nodes of its weight, and of its bias if it has one."""
    return tuple(ref.node for ref in layer.args[1:] if ref is not None)


def is_on_cpu(layer: Node, tracked: RuleContext) -> bool:
    """Whether its weights are the model's and of fp32, for which there is a faster way."""
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
    """The operator, whose result is put into the memory of an input if it is all of that."""

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        layers = linear_layer(whole[:first]), linear_layer(whole[first:])
        out = None if place is None else pieces[place]
        if out is not None:
            out = out if is_all_of_its_memory(out) and out.is_contiguous() else None
        return mlp(pieces[0], *layers, plus=(*pieces, None)[1], out=out)

    return run
