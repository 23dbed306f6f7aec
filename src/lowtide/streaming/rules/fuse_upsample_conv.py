"""Fusion of nearest 2× upsampling and the 3×3 convolution after it.

Each pixel of the upsampled image occurs four times, so of the nine products of a result the ones
of equal pixels merge, with the sum of their weights. The fused operator runs 2×2 kernels on the
small image, one for each of the four output positions: four ninths of the products, and the
upsampled image is never made. Equality was shown by Aitken et al., Checkerboard artifact free
sub-pixel convolution (2017); rounding differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.streaming.capture.graph import (
    GraphNode,
    NodeRef,
    OperatorGraph,
    TensorMeta,
    substitute_refs,
)
from lowtide.streaming.rules.conv import (
    ONEDNN_REORDER_SHARE,
    non_image_inputs,
    pad_constant,
    size_per_dim,
)
from lowtide.streaming.rules.rule import (
    InputSpans,
    LoweringContext,
    RowAxis,
    RowOp,
    Rule,
    node_argument,
    op_name,
    samplewise_rule,
)
from lowtide.streaming.spans import Span

# In lower precision the sums of weights would be rounded a second time.
_DTYPES = {torch.float32, torch.float64}


def fuse_upsample_convs(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with each such pair fused; the graph itself if there is none."""
    users = graph.users()
    pairs = {
        node.index: before
        for node in graph.nodes
        if (before := _match_upsample(graph, node)) is not None
        and len(users[before.index]) == 1
        and before.index not in graph.outputs
    }
    if not pairs:
        return graph
    gone = {before.index for before in pairs.values()}
    nodes: list[GraphNode] = []
    places: dict[int, int] = {}

    def moved(tree: Any) -> Any:
        return substitute_refs(tree, lambda one: NodeRef(places[one]))

    for node in graph.nodes:
        if node.index in gone:
            continue
        target, args, kwargs = node.target, node.args, node.kwargs
        if node.index in pairs:
            nodes.append(_fold_node(nodes, moved(args[1]), node.name))
            small, bias = pairs[node.index].args[0], node_argument(node, 2, "bias")
            made = moved(small), NodeRef(len(nodes) - 1), moved(bias)
            target, args, kwargs = upsample_conv2d, made, {}
        else:
            args, kwargs = moved(args), moved(kwargs)
        places[node.index] = len(nodes)
        made = GraphNode(
            len(nodes), node.name, node.kind, node.meta, target, args, kwargs, node.module_path
        )
        nodes.append(made)
    return OperatorGraph(
        nodes,
        [places[one] for one in graph.inputs],
        graph.axes,
        [places[one] for one in graph.fixed],
        [places[one] for one in graph.outputs],
        {places[one]: tensor for one, tensor in graph.tensors.items() if one in places},
        graph.repack,
        graph.written_attributes,
    )


def _match_upsample(graph: OperatorGraph, node: GraphNode) -> GraphNode | None:
    """Return the upsampling node that a convolution can be fused with, or None."""
    if node.kind != "call" or op_name(node.target) != "conv2d":
        return None
    image, weight = node.args[0], node.args[1]
    plain = (
        size_per_dim(node_argument(node, 3, "stride"), 1) == (1, 1)
        and node_argument(node, 4, "padding", 0) in ("same", 1, [1], (1,), [1, 1], (1, 1))
        and size_per_dim(node_argument(node, 5, "dilation"), 1) == (1, 1)
        and node_argument(node, 6, "groups", 1) == 1
        and graph.nodes[weight.node].meta.shape[2:] == (3, 3)
    )
    before = graph.nodes[image.node]
    if not plain or before.kind != "call" or node.meta.dtype not in _DTYPES:
        return None
    if op_name(before.target) != "upsample_nearest2d" or len(before.meta.shape) != 4:
        return None
    small = graph.nodes[before.args[0].node].meta.shape
    return before if before.meta.shape[2:] == (2 * small[2], 2 * small[3]) else None


def _fold_node(nodes: Sequence[GraphNode], weight: NodeRef, name: str) -> GraphNode:
    meta = nodes[weight.node].meta
    shape = 4 * meta.shape[0], meta.shape[1], 2, 2
    return GraphNode(
        len(nodes),
        f"{name}_folded",
        "call",
        TensorMeta(shape, meta.dtype),
        fold_upsample_weight,
        (weight,),
    )


def fold_upsample_weight(weight: Tensor) -> Tensor:
    """Fold a 3×3 weight (O, C, 3, 3) to four 2×2 kernels, (4 · O, C, 2, 2).

    They are for the upper left, upper right, lower left and lower right output pixel; O is the
    number of output channels.
    """
    across = _fold_dim(weight, 3)  # (right, out, in, 3, 2)
    return _fold_dim(across, 3).flatten(0, 2)  # of (down, right, out, in, 2, 2)


def _fold_dim(weight: Tensor, dim: int) -> Tensor:
    """Fold three weights along ``dim`` to two, for each of two output positions.

    The positions are a new leading dim.
    """
    before, at, after = weight.unbind(dim)
    first, second = (before, at + after), (before + at, after)
    return torch.stack([torch.stack(first, dim), torch.stack(second, dim)])


def upsample_conv2d(image: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Upsample by 2 (nearest) and convolve (B, C, H, W) to (B, O, 2 · H, 2 · W).

    Args:
        image: Input, (B, C, H, W).
        weight: Folded weight from `fold_upsample_weight`, (4 · O, C, 2, 2).
        bias: Bias, (O,).
    """
    return _convolve_inner_rows(pad_constant(image, 2, 1, 1, 0.0), weight, bias)


def _convolve_inner_rows(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the result for all rows of ``image`` but the first and the last."""
    height, width = image.shape[2:]
    channels = len(weight) // 4
    doubled_bias = None if bias is None else bias.repeat(2)
    found: Tensor | None = None
    for down, kernels in enumerate(weight.split(2 * channels)):
        # both columns at once: the right neighbor of a pixel is the left one of the next
        both = F.conv2d(image.narrow(2, down, height - 1), kernels, doubled_bias, padding=(0, 1))
        if found is None:
            found = _empty_in_format(both, (len(image), channels, 2 * (height - 2), 2 * width))
        found[:, :, down::2, 0::2] = both[:, :channels, :, :width]
        found[:, :, down::2, 1::2] = both[:, channels:, :, 1:]
        del both
    assert found is not None
    return found


def _empty_in_format(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Allocate a result in the memory format of ``like``."""
    is_contiguous = like.is_contiguous() or not like.is_contiguous(
        memory_format=torch.channels_last
    )
    memory_format = torch.contiguous_format if is_contiguous else torch.channels_last
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def lower_upsample_convolution(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower the fused operator: two result rows from three rows of the small image."""
    rows = context.row_axis(node.args[0])
    if rows is None or rows.dim != 2:
        return None
    has_bias = node.args[2] is not None

    def seen(span: Span) -> Span:
        return span[0] // 2 - 1, span[1] // 2 + 1

    def needed(span: Span) -> InputSpans:
        first, last = seen(span)
        return ([(max(0, first), min(rows.size, last))],)

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        first, last = seen(span)
        piece = pad_constant(pieces[0], 2, max(0, -first), max(0, last - rows.size), 0.0)
        return _convolve_inner_rows(piece, whole[0], whole[1] if has_bias else None)

    weight = context.meta(node.args[1])
    full_inputs = non_image_inputs(node, context)
    if full_inputs is None:
        return None
    return RowOp(
        RowAxis(2, node.meta.shape[2], 2),
        (node.args[0].node,),
        full_inputs,
        needed,
        run,
        workspace_share=ONEDNN_REORDER_SHARE,
        fixed_workspace_bytes=weight.nbytes,
        padded=True,
    )


RULES: dict[str, Rule] = {"upsample_conv2d": samplewise_rule(lower_upsample_convolution)}
