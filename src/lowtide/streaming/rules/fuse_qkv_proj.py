"""Fusion of window attention with its QKV projection and its output projection.

Queries, keys and values have three times the elements of their windows. Here they are computed
for some windows at a time. The QKV layer returns heads zero-padded to the width that CPU kernels
need, which saves copies: zero channels add nothing to scores, and meet zero weights in the
output projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.attention.linear_ops import linear_layer, onednn_linear_any_layout
from lowtide.attention.pad_heads import pad_heads
from lowtide.attention.window_attention import (
    MaskPattern,
    attend_windows,
    padded_head_dim,
    patterns_in_range,
)
from lowtide.streaming.capture.graph import Node, NodeRef
from lowtide.streaming.rules.fuse_mlp import has_fp32_cpu_weights, weights_of
from lowtide.streaming.rules.fuse_window_attention import (
    WindowAttentionMatch,
    match_window_attention,
)
from lowtide.streaming.rules.row_op import RowOp, Run, identity_receptive_field
from lowtide.streaming.rules.rule import RuleContext, op_name, owns_full_storage, sole_producer
from lowtide.streaming.spans import Span

# Bytes of queries, keys and values that exist at once.
_CHUNK_BYTES = 16 << 20
_VIEWS = ("view", "_unsafe_view", "reshape")


@dataclass(frozen=True)
class _ProjectionLayers:
    """Nodes of the windows, and of weights and biases of both projections."""

    windows: NodeRef
    qkv_weights: tuple[int, ...]
    out_weights: tuple[int, ...]
    heads: int
    attention: WindowAttentionMatch


def fuse_qkv_proj(node: Node, context: RuleContext) -> RowOp | None:
    """Lower the output projection of a window attention with everything before it.

    Returns None if the node is none, or if queries, keys and values come from several layers.
    """
    found = _match_layers(node, context) if op_name(node.target) == "linear" else None
    if found is None or context.meta(found.windows) != node.meta:
        return None
    rows = context.row_axis(found.windows)
    weights = *found.qkv_weights, *found.out_weights
    full_inputs = *weights, *found.attention.full_inputs
    if rows is None or rows.dim != 0 or len(set(full_inputs)) < len(full_inputs):
        return None
    windows = found.windows.node
    size = sum(context.graph.nodes[one].meta.nbytes for one in weights)
    # bytes of queries, keys and values of one window
    qkv_bytes_per_window = 3 * node.meta.nbytes // rows.size

    def scratch(count: int) -> int:
        part = min(count * qkv_bytes_per_window, _CHUNK_BYTES)
        return part + part // 3 * 2  # plus the results of attention and projection

    return RowOp(
        rows,
        (windows,),
        full_inputs,
        identity_receptive_field(1),
        _make_run(found, in_place=False),
        pattern_dims=found.attention.pattern_dims,
        row_workspace_bytes=scratch,
        fixed_workspace_bytes=2 * size,
        in_place_runs={windows: _make_run(found, in_place=True)},
    )


def _match_layers(last: Node, context: RuleContext) -> _ProjectionLayers | None:
    """Match an output projection back to the QKV projection, or return None."""
    node = sole_producer(last.args[0], context, *_VIEWS)
    copied = None if node is None else sole_producer(node.args[0], context, "clone")
    transpose = None if copied is None else sole_producer(copied.args[0], context, "transpose")
    product = None if transpose is None else sole_producer(transpose.args[0], context, "matmul")
    if product is None or transpose is None or len(product.meta.shape) != 4:
        return None
    if sorted(dim % 4 for dim in transpose.args[1:3]) != [1, 2]:
        return None
    attention = match_window_attention(product, context)
    if attention is None:
        return None
    first = _match_qkv_layer(attention, product, context)
    if first is None or not (
        has_fp32_cpu_weights(first, context) and has_fp32_cpu_weights(last, context)
    ):
        return None
    windows, heads, places, width = product.meta.shape
    given = context.meta(first.args[0]).shape
    if last.meta.shape[:2] != given[:2] or given[:2] != (windows, places):
        return None
    qkv_weights, out_weights = weights_of(first), weights_of(last)
    if context.graph.nodes[out_weights[0]].meta.shape[1] != heads * width:
        return None
    return _ProjectionLayers(first.args[0], qkv_weights, out_weights, heads, attention)


def _match_qkv_layer(
    attention: WindowAttentionMatch, product: Node, context: RuleContext
) -> Node | None:
    """Return the QKV layer that queries, keys and values are thirds of, or None."""
    windows, heads, places, width = product.meta.shape
    nodes = context.graph.nodes
    qkv = [nodes[one] for one in attention.inputs]
    taken = [context.use_counts[one.index] == 1 and op_name(one.target) == "select" for one in qkv]
    if not all(taken) or [one.args[1:] for one in qkv] != [(0, 0), (0, 1), (0, 2)]:
        return None
    ordered = {one.args[0].node for one in qkv}
    if len(ordered) > 1 or context.use_counts[min(ordered)] != 3:
        return None
    order = nodes[min(ordered)]
    if op_name(order.target) != "permute" or list(order.args[1]) != [2, 0, 3, 1, 4]:
        return None
    split = sole_producer(order.args[0], context, *_VIEWS)
    if split is None or split.meta.shape != (windows, places, 3, heads, width):
        return None
    return sole_producer(split.args[0], context, "linear")


def _make_run(layers: _ProjectionLayers, *, in_place: bool) -> Run:
    """Return the run, which writes into the windows' memory if ``in_place`` and possible."""
    heads, first = layers.heads, len(layers.qkv_weights)
    weights = first + len(layers.out_weights)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        windows = pieces[0].contiguous()
        before, after = linear_layer(whole[:first]), linear_layer(whole[first:weights])
        width = after[0].shape[1] // heads
        before, after = pad_heads(before, after, heads, padded_head_dim(width) - width)
        added = layers.attention.bias_and_patterns(whole[weights:])
        found = windows if in_place and owns_full_storage(windows) else torch.empty_like(windows)
        some = _windows_per_chunk(
            len(windows), windows[:1].nbytes * len(before[0]) // windows.shape[2]
        )
        # a dry run needs only one part: no other takes more memory
        count = some if isinstance(windows, FakeTensor) else len(windows)
        for at in range(0, count, some):
            part = slice(at, at + some)
            split = onednn_linear_any_layout(windows[part], *before)
            joined = _attend(split.unflatten(-1, (3, heads, -1)), added, at, layers)
            found[part] = onednn_linear_any_layout(joined, *after)
        return found

    return run


def _attend(
    split: Tensor,
    bias_and_patterns: tuple[Tensor | None, Sequence[MaskPattern]],
    first_window: int,
    layers: _ProjectionLayers,
) -> Tensor:
    """Run attention within some of a band's windows: (windows, N, heads · head dim).

    ``split`` is (windows, N, 3, heads, head dim). The first window is window ``first_window`` of
    the band.
    """
    bias, patterns = bias_and_patterns
    query, key, value = split.permute(2, 0, 3, 1, 4)
    here = patterns_in_range(patterns, first_window, first_window + len(split))
    found = attend_windows(query, key, value, bias, here, layers.attention.scale)
    return found.transpose(1, 2).flatten(2)


def _windows_per_chunk(count: int, window_bytes: int) -> int:
    """Return the windows of a part of at most `_CHUNK_BYTES`, with parts nearly equal."""
    most = max(1, _CHUNK_BYTES // window_bytes)
    return -(-count // -(-count // most))
