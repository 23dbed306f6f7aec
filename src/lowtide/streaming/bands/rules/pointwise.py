"""Operators whose result at a place depends on their inputs at that place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.attention.layouts import in_order
from lowtide.streaming.bands.graph import Node
from lowtide.streaming.bands.rows import RowOp, Rows
from lowtide.streaming.bands.rules.in_place import into_given, over_inputs
from lowtide.streaming.bands.rules.laying import plainly
from lowtide.streaming.bands.rules.rule import (
    Rule,
    Tracked,
    alongside,
    argument,
    dims_of,
    mapped,
    short,
)
from lowtide.streaming.bands.spans import Span

# Not tagged as pointwise by PyTorch, or so only for some of their arguments.
ALSO = {
    "alias",
    "clone",
    "contiguous",
    "copy",
    "detach",
    "dropout",
    "empty_like",
    "feature_dropout",
    "fill",
    "full_like",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
    "lift_fresh_copy",
    "nan_to_num",
    "ones_like",
    "relu6",
    "to",
    "zeros_like",
    "_to_copy",
    "selu",
}
_VIEWS = {"alias", "detach", "contiguous"}


def is_pointwise(node: Node) -> bool:
    """Whether `pointwise` is this operator's rule."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or short(node.target) in ALSO


def pointwise(node: Node, tracked: Tracked) -> RowOp | None:
    """With broadcasting: dimensions are aligned at the end."""
    rank = len(node.like.shape)
    found: Rows | None = None
    slices: dict[int, int] = {}
    for place in node.refs:
        shape = tracked.graph.nodes[place].like.shape
        rows = tracked.rows.get(place)
        if rows is None:
            continue
        at = Rows(rows.dim + rank - len(shape), rows.size, rows.grain)
        if found is not None:
            if (found.dim, found.size) != (at.dim, at.size):
                return None
            at = Rows(at.dim, at.size, math.lcm(at.grain, found.grain))
        found = at
    if found is None or node.like.shape[found.dim] != found.size:
        return None
    for place in node.refs:
        dim = alongside(found, rank, tracked.graph.nodes[place].like.shape)
        if place not in tracked.rows and dim is not None:
            slices[place] = dim
    step = mapped(
        node, tracked, found, cheap=True, view=short(node.target) in _VIEWS, slices=slices
    )
    if node.index in tracked.idle:
        return replace(step, run=_as_it_is, view=True)
    order = node.kwargs.get("memory_format")
    if short(node.target) == "clone" and order is torch.contiguous_format:
        step = replace(step, run=_in_order)
    plain = node.index in tracked.plain
    if plain:
        step = replace(step, run=plainly(node, step.inputs))
    over = over_inputs(node, step.inputs, step.run, tracked.graph, plain=plain)
    return replace(step, over=over, into=None if plain else into_given(node, step.inputs))


def _as_it_is(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
    return pieces[0]


def _in_order(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
    """A copy is made for its order alone: nothing changes what a segment still reads."""
    return in_order(pieces[0])


def by_channel(node: Node, tracked: Tracked) -> RowOp | None:
    """PReLU, and batch norm with the statistics it was trained to: by channel."""
    rows = tracked.of(node.args[0])
    if rows is None or rows.dim < 2 or any(tracked.of(arg) for arg in node.args[1:]):
        return None
    if short(node.target) == "batch_norm" and argument(node, 5, "training"):
        return None
    return mapped(node, tracked, rows, cheap=True)


def along_others(node: Node, tracked: Tracked) -> RowOp | None:
    """Softmax and the like: over dimensions that are not the rows'."""
    rows = tracked.of(node.args[0])
    if rows is None:
        return None
    rank = len(node.like.shape)
    dim = argument(node, 1, "dim")
    return None if rows.dim in dims_of(dim, rank) else mapped(node, tracked, rows, cheap=True)


def over_last(node: Node, tracked: Tracked) -> RowOp | None:
    """Norms over the last dimensions."""
    rows = tracked.of(node.args[0])
    if rows is None or rows.dim >= len(node.like.shape) - len(node.args[1]):
        return None
    return mapped(node, tracked, rows, cheap=True)


def put_slice(node: Node, tracked: Tracked) -> RowOp | None:
    """A tensor with some of its channels or columns replaced."""
    dim = argument(node, 2, "dim", 0) % len(node.like.shape)
    base, other = (tracked.of(arg) for arg in node.args[:2])
    if base is None or other is None or (base.dim, base.size) != (other.dim, other.size):
        return None
    if dim == base.dim:
        return None
    rows = Rows(base.dim, base.size, math.lcm(base.grain, other.grain))
    return mapped(node, tracked, rows, cheap=True)


RULES: dict[str, Rule] = {
    "prelu": by_channel,
    "batch_norm": by_channel,
    "_native_batch_norm_legit_no_training[0]": by_channel,
    "softmax": along_others,
    "_softmax": along_others,
    "log_softmax": along_others,
    "cumsum": along_others,
    "layer_norm": over_last,
    "rms_norm": over_last,
    "slice_scatter": put_slice,
}
