"""Fusion of unfold (im2col) and a permuted copy into one copy from a strided view.

Columns of im2col hold each pixel once per overlapping window, channel after channel, and models
copy them again, element by element, to make the channels of a pixel adjacent. `Tensor.unfold`
gives the same windows as a view of the image, so that one copy is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.conv import lower_unfold, pad_at_borders, size_per_dim
from lowtide.streaming.rules.rule import LoweringContext, RowOp, op_name, sole_producer
from lowtide.streaming.spans import Span

_VIEWS = "view", "reshape", "_unsafe_view"


@dataclass(frozen=True)
class _Chain:
    """Nodes from a copy back to the columns.

    A view splits their channels, a permutation follows, and perhaps one more view.
    """

    columns: GraphNode
    split_view: GraphNode
    permutation: list[int]


def fuse_unfold(node: GraphNode, context: LoweringContext) -> RowOp | None:
    """Lower a permuted copy of im2col columns; None if the node is no such copy."""
    chain = _match_chain(node, context) if op_name(node.target) == "clone" else None
    rows = None if chain is None else context.row_axis(node.args[0])
    unfold_op = None if chain is None else lower_unfold(chain.columns, context)
    if chain is None or rows is None or unfold_op is None:
        return None
    size, dilation, pad, stride = (
        size_per_dim(chain.columns.args[place], 1) for place in range(1, 5)
    )
    height = context.row_axis(chain.columns.args[0])
    split = chain.split_view.meta.shape
    # The last dim of both is the windows of one image, row by row.
    if height is None or split[-3:] != (*size, unfold_op.rows.size) or dilation != (1, 1):
        return None
    windows_per_row = unfold_op.rows.grain
    # one window per row of the result, as spans count windows
    if split[0] != 1 or (rows.size, rows.grain) != (unfold_op.rows.size, windows_per_row):
        return None
    order = _split_last_dim(chain.permutation)
    shape, dim = list(node.meta.shape), rows.dim

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Any]) -> Tensor:
        first = span[0] // windows_per_row * stride[0] - pad[0]
        last = (span[1] // windows_per_row - 1) * stride[0] - pad[0] + size[0]
        piece = pad_at_borders(pieces[0], (first, last), height.size, pad[1])
        cut = piece.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1])
        # (B, C, rows of windows, windows per row, kernel H, kernel W) to the split and its order
        seen = cut.permute(0, 1, 4, 5, 2, 3).unflatten(1, split[1:-3]).permute(order)
        return seen.reshape(*shape[:dim], span[1] - span[0], *shape[dim + 1 :]).contiguous()

    return RowOp(rows, unfold_op.inputs, (), unfold_op.input_spans, run, cheap=True)


def _split_last_dim(order: Sequence[int]) -> list[int]:
    """Return a permutation whose last dim is split into two."""
    last = len(order) - 1
    found: list[int] = []
    for dim in order:
        found += [last, last + 1] if dim == last else [dim]
    return found


def _match_chain(copy: GraphNode, context: LoweringContext) -> _Chain | None:
    node = sole_producer(copy.args[0], context, "permute", *_VIEWS)
    if node is not None and op_name(node.target) in _VIEWS:
        node = sole_producer(node.args[0], context, "permute")
    split = None if node is None else sole_producer(node.args[0], context, *_VIEWS)
    columns = None if split is None else sole_producer(split.args[0], context, "im2col")
    if node is None or split is None or columns is None:
        return None
    rank = len(split.meta.shape)
    return _Chain(columns, split, [dim % rank for dim in node.args[1]])
