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
from lowtide.streaming.rules.fuse_mlp import is_on_cpu, weights_of
from lowtide.streaming.rules.fuse_window_attention import (
    WindowAttentionMatch,
    match_window_attention,
)
from lowtide.streaming.rules.row_op import RowOp, Run, identity_region
from lowtide.streaming.rules.rule import RuleContext, is_all_of_its_memory, op_name, sole_producer
from lowtide.streaming.spans import Span

# Bytes of queries, keys and values that exist at once.
_PART_BYTES = 16 << 20
_VIEWS = ("view", "_unsafe_view", "reshape")


@dataclass(frozen=True)
class _ProjectionLayers:
    """Nodes of the windows, and of weights and biases of both projections."""

    windows: NodeRef
    into: tuple[int, ...]
    out_of: tuple[int, ...]
    heads: int
    attention: WindowAttentionMatch


def fuse_qkv_proj(node: Node, tracked: RuleContext) -> RowOp | None:
    """Lower the output projection of a window attention with everything before it.

    Returns None if the node is none, or if queries, keys and values come from several layers.
    """
    found = _layers(node, tracked) if op_name(node.target) == "linear" else None
    if found is None or tracked.like(found.windows) != node.like:
        return None
    rows = tracked.of(found.windows)
    weights = *found.into, *found.out_of
    wholes = *weights, *found.attention.wholes
    if rows is None or rows.dim != 0 or len(set(wholes)) < len(wholes):
        return None
    windows = found.windows.node
    size = sum(tracked.graph.nodes[one].like.bytes for one in weights)
    # bytes of queries, keys and values of one window
    split = 3 * node.like.bytes // rows.size

    def scratch(count: int) -> int:
        part = min(count * split, _PART_BYTES)
        return part + part // 3 * 2  # plus the results of attention and projection

    return RowOp(
        rows,
        (windows,),
        wholes,
        identity_region(1),
        _run(found, over=False),
        patterned=found.attention.patterned,
        scratch_of=scratch,
        scratch_bytes=2 * size,
        over={windows: _run(found, over=True)},
    )


def _layers(last: Node, tracked: RuleContext) -> _ProjectionLayers | None:
    """Match an output projection back to the QKV projection, or return None."""
    node = sole_producer(last.args[0], tracked, *_VIEWS)
    copied = None if node is None else sole_producer(node.args[0], tracked, "clone")
    turned = None if copied is None else sole_producer(copied.args[0], tracked, "transpose")
    product = None if turned is None else sole_producer(turned.args[0], tracked, "matmul")
    if product is None or turned is None or len(product.like.shape) != 4:
        return None
    if sorted(dim % 4 for dim in turned.args[1:3]) != [1, 2]:
        return None
    attention = match_window_attention(product, tracked)
    if attention is None:
        return None
    first = _source(attention, product, tracked)
    if first is None or not (is_on_cpu(first, tracked) and is_on_cpu(last, tracked)):
        return None
    windows, heads, places, width = product.like.shape
    given = tracked.like(first.args[0]).shape
    if last.like.shape[:2] != given[:2] or given[:2] != (windows, places):
        return None
    into, out_of = weights_of(first), weights_of(last)
    if tracked.graph.nodes[out_of[0]].like.shape[1] != heads * width:
        return None
    return _ProjectionLayers(first.args[0], into, out_of, heads, attention)


def _source(attention: WindowAttentionMatch, product: Node, tracked: RuleContext) -> Node | None:
    """Return the QKV layer that queries, keys and values are thirds of, or None."""
    windows, heads, places, width = product.like.shape
    nodes = tracked.graph.nodes
    thirds = [nodes[one] for one in attention.inputs]
    taken = [tracked.users[one.index] == 1 and op_name(one.target) == "select" for one in thirds]
    if not all(taken) or [one.args[1:] for one in thirds] != [(0, 0), (0, 1), (0, 2)]:
        return None
    ordered = {one.args[0].node for one in thirds}
    if len(ordered) > 1 or tracked.users[min(ordered)] != 3:
        return None
    order = nodes[min(ordered)]
    if op_name(order.target) != "permute" or list(order.args[1]) != [2, 0, 3, 1, 4]:
        return None
    split = sole_producer(order.args[0], tracked, *_VIEWS)
    if split is None or split.like.shape != (windows, places, 3, heads, width):
        return None
    return sole_producer(split.args[0], tracked, "linear")


def _run(layers: _ProjectionLayers, *, over: bool) -> Run:
    """Return the run, which writes into the windows' memory if ``over`` and possible."""
    heads, first = layers.heads, len(layers.into)
    weights = first + len(layers.out_of)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        windows = pieces[0].contiguous()
        before, after = linear_layer(whole[:first]), linear_layer(whole[first:weights])
        width = after[0].shape[1] // heads
        before, after = pad_heads(before, after, heads, padded_head_dim(width) - width)
        added = layers.attention.added(whole[weights:])
        found = windows if over and is_all_of_its_memory(windows) else torch.empty_like(windows)
        some = _at_once(len(windows), windows[:1].nbytes * len(before[0]) // windows.shape[2])
        # a dry run needs only one part: no other takes more memory
        count = some if isinstance(windows, FakeTensor) else len(windows)
        for at in range(0, count, some):
            part = slice(at, at + some)
            split = onednn_linear_any_layout(windows[part], *before)
            joined = _attended(split.unflatten(-1, (3, heads, -1)), added, at, layers)
            found[part] = onednn_linear_any_layout(joined, *after)
        return found

    return run


def _attended(
    split: Tensor,
    added: tuple[Tensor | None, Sequence[MaskPattern]],
    at: int,
    layers: _ProjectionLayers,
) -> Tensor:
    """Run attention of (N, L, 3, heads, D), which returns (N, L, heads · D).

    The first window is window ``at`` of the band.
    """
    bias, patterns = added
    query, key, value = split.permute(2, 0, 3, 1, 4)
    here = patterns_in_range(patterns, at, at + len(split))
    found = attend_windows(query, key, value, bias, here, layers.attention.scale)
    return found.transpose(1, 2).flatten(2)


def _at_once(count: int, window: int) -> int:
    """Return the windows of a part of at most `_PART_BYTES`, with parts nearly equal."""
    most = max(1, _PART_BYTES // window)
    return -(-count // -(-count // most))
