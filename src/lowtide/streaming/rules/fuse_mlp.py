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
from lowtide.streaming.rules.row_op import RowAxis, RowOp, Run, identity_receptive_field
from lowtide.streaming.rules.rule import (
    RuleContext,
    argument,
    op_name,
    owns_full_storage,
    sole_producer,
)
from lowtide.streaming.spans import Span


@dataclass(frozen=True)
class _MlpLayers:
    """Two linear layers over the last dim of ``input_ref``, with GELU in between.

    Nothing else takes the hidden tensors.
    """

    input_ref: NodeRef
    first: tuple[int, ...]
    second: tuple[int, ...]


def fuse_mlp(node: Node, context: RuleContext) -> RowOp | None:
    """Lower the last node of an MLP, its second linear or its residual sum.

    Returns None if the node is neither, or if weights are not fp32 on the CPU.
    """
    if node.kwargs or len(node.args) < 2:
        return None
    if op_name(node.target) == "linear":
        found = _match_layers(node, context)
        return None if found is None else _mlp_op(node, context, found, None)
    if op_name(node.target) != "add" or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        last = sole_producer(one, context, "linear")
        found = None if last is None else _match_layers(last, context)
        if found is not None and isinstance(other, NodeRef):
            return _mlp_op(node, context, found, other)
    return None


def _match_layers(last: Node, context: RuleContext) -> _MlpLayers | None:
    gelu = sole_producer(last.args[0], context, "gelu")
    if gelu is None or argument(gelu, 1, "approximate", "none") != "none":
        return None
    first = sole_producer(gelu.args[0], context, "linear")
    if first is None or not isinstance(first.args[0], NodeRef):
        return None
    if not (has_fp32_cpu_weights(first, context) and has_fp32_cpu_weights(last, context)):
        return None
    return _MlpLayers(first.args[0], weights_of(first), weights_of(last))


def weights_of(layer: Node) -> tuple[int, ...]:
    """Return the nodes of a linear layer's weight and bias, if any."""
    return tuple(ref.node for ref in layer.args[1:] if ref is not None)


def has_fp32_cpu_weights(layer: Node, context: RuleContext) -> bool:
    """Whether a layer's weights are the model's own, fp32 and on the CPU.

    There is a faster kernel for these.
    """
    own = [context.graph.tensors.get(one) for one in weights_of(layer)]
    return not layer.kwargs and all(
        one is not None and one.dtype == torch.float32 and one.device.type == "cpu" for one in own
    )


def _mlp_op(
    node: Node, context: RuleContext, layers: _MlpLayers, residual: NodeRef | None
) -> RowOp | None:
    rows = context.row_axis(layers.input_ref)
    input_refs = (layers.input_ref,) if residual is None else (layers.input_ref, residual)
    inputs = tuple(one.node for one in input_refs)
    full_inputs = *layers.first, *layers.second
    if rows is None or rows.dim == len(node.meta.shape) - 1:
        return None
    if len(set(inputs)) < len(inputs) or len(set(full_inputs)) < len(full_inputs):
        return None
    grain = rows.grain
    if residual is not None:
        residual_rows = context.row_axis(residual)
        same_meta = context.meta(residual) == node.meta
        if (
            residual_rows is None
            or not same_meta
            or (residual_rows.dim, residual_rows.size) != (rows.dim, rows.size)
        ):
            return None
        grain = math.lcm(grain, residual_rows.grain)
    in_place_runs = {
        one.node: _mlp_run(place, len(layers.first))
        for place, one in enumerate(input_refs)
        if context.meta(one) == node.meta
    }
    first, second = (
        context.graph.nodes[one[0]].meta.shape for one in (layers.first, layers.second)
    )
    tokens = node.meta.numel // second[0] // rows.size
    return RowOp(
        RowAxis(rows.dim, rows.size, grain),
        inputs,
        full_inputs,
        identity_receptive_field(len(inputs)),
        _mlp_run(None, len(layers.first)),
        in_place_runs=in_place_runs,
        row_workspace_bytes=lambda count: mlp_workspace_bytes(count * tokens, first, second),
    )


def _mlp_run(out_input: int | None, first_count: int) -> Run:
    """Return the run of an MLP that writes into an input's memory if that is possible."""

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        layers = linear_layer(whole[:first_count]), linear_layer(whole[first_count:])
        out = None if out_input is None else pieces[out_input]
        if out is not None:
            out = out if owns_full_storage(out) and out.is_contiguous() else None
        return mlp(pieces[0], *layers, plus=(*pieces, None)[1], out=out)

    return run
