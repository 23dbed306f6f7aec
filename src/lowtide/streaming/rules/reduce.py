"""Rules of reductions: row-wise over other dims, accumulated over the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import GraphNode
from lowtide.streaming.rules.norm import GroupMoments, accumulate_moments
from lowtide.streaming.rules.rule import (
    LoweringContext,
    Reduction,
    RowAxis,
    Rule,
    RuleResult,
    banded_op,
    node_argument,
    normalize_dims,
    op_name,
)

# Reduction of a band over dims with keepdim, and the merge of two bands.
_REDUCTIONS: dict[str, tuple[Callable[[Tensor, list[int]], Tensor], Callable[..., Tensor]]] = {
    "sum": (
        lambda band, dims: band.sum(
            dims, True, dtype=torch.promote_types(band.dtype, torch.float32)
        ).double(),
        torch.add,
    ),
    "norm": (
        lambda band, dims: torch.linalg.vector_norm(band, 2, dims, True).double().square(),
        torch.add,
    ),
    "amax": (lambda band, dims: band.amax(dims, True), torch.maximum),
    "amin": (lambda band, dims: band.amin(dims, True), torch.minimum),
}

_MEAN_OPS = {"mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"}


def lower_reduction(node: GraphNode, context: LoweringContext) -> RuleResult:
    """Lower mean, sum, amax, amin, var, std and the 2-norm of vectors.

    Others, such as argmax over the channels, where the rows are not among their dims.
    """
    rows = context.row_axis(node.args[0])
    if rows is None:
        return None
    name = op_name(node.target)
    shape = context.meta(node.args[0]).shape
    place = 2 if name == "linalg_vector_norm" else 1
    dims = normalize_dims(node_argument(node, place, "dim"), len(shape))
    keepdim = len(node.meta.shape) == len(shape)
    if rows.dim not in dims:
        dim = rows.dim if keepdim else rows.dim - sum(one < rows.dim for one in dims)
        found = RowAxis(dim, rows.size, rows.grain)
        if name in ("var", "std"):
            own = _variance_within_rows(node, dims, keepdim)
            return replace(banded_op(own, context, found, cheap=True), workspace_share=1.0)
        return banded_op(node, context, found, cheap=True)
    if name in ("var", "std"):
        return _variance_over_rows(node, context, rows, dims)
    kind = {"mean": "sum", "linalg_vector_norm": "norm"}.get(name, name)
    if kind not in _REDUCTIONS or (kind == "norm" and node_argument(node, 1, "ord", 2) != 2):
        return None
    return _reduce_over_rows(node, rows, kind, dims, shape)


def _reduce_over_rows(
    node: GraphNode, rows: RowAxis, kind: str, dims: list[int], shape: tuple[int, ...]
) -> Reduction:
    """Return a reduction of ``_REDUCTIONS`` over rows, finished to a mean or a norm."""
    reduce_band, merge = _REDUCTIONS[kind]
    mean = op_name(node.target) in _MEAN_OPS
    num_elements = _numel([shape[dim] for dim in dims])

    def add(state: Tensor | None, pieces: Sequence[Tensor]) -> Tensor:
        found = reduce_band(pieces[0], dims)
        return found if state is None else merge(state, found)

    def finish(state: Tensor) -> Tensor:
        if mean:
            state = state / num_elements
        elif kind == "norm":
            state = state.sqrt()
        return state.to(node.meta.dtype).reshape(node.meta.shape)

    return Reduction(rows, (node.args[0].node,), add, finish)


def _variance_within_rows(node: GraphNode, dims: list[int], keepdim: bool) -> GraphNode:
    """Return a two-pass var or std over dims without the rows.

    PyTorch's own updates mean and squares with every element, at a quarter of the speed of a sum.
    """
    correction, is_std = _correction(node), op_name(node.target) == "std"

    def spread(given: Tensor) -> Tensor:
        exact = torch.promote_types(given.dtype, torch.float32)
        numbers = _numel([given.shape[dim] for dim in dims])
        centered = given - given.mean(dims, True, dtype=exact)
        squares = centered.square_().sum(dims, keepdim)
        found = squares.div_(max(numbers - correction, 0))
        return (found.sqrt_() if is_std else found).to(given.dtype)

    return replace(node, target=spread, args=node.args[:1], kwargs={})


def _variance_over_rows(
    node: GraphNode, context: LoweringContext, rows: RowAxis, dims: list[int]
) -> Reduction:
    """Return var or std over the rows as a `Reduction`."""
    correction, shape = _correction(node), context.meta(node.args[0]).shape
    rest = [dim for dim in range(len(shape)) if dim not in dims]

    def group(band: Tensor) -> Tensor:
        ordered = band.permute(*rest, *dims)
        return ordered.flatten(len(rest)).reshape(-1, _numel(ordered.shape[len(rest) :]))

    def finish(state: GroupMoments) -> Tensor:
        found = state.variance(correction)
        found = found.sqrt() if op_name(node.target) == "std" else found
        return found.to(node.meta.dtype).reshape(node.meta.shape)

    return Reduction(rows, (node.args[0].node,), accumulate_moments(group, context), finish)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _correction(node: GraphNode) -> float:
    """Return the correction of the count: ``correction`` or ``unbiased``, by overload."""
    given: Any = node.kwargs.get("correction")
    if given is not None:
        return float(given)
    unbiased = node_argument(node, 2, "unbiased", True)
    return 1.0 if unbiased is None else float(unbiased)


def lower_adaptive_pool(node: GraphNode, context: LoweringContext) -> RuleResult:
    """Lower adaptive average or max pooling to size 1 to a reduction."""
    rows, name = context.row_axis(node.args[0]), op_name(node.target)
    shape = context.meta(node.args[0]).shape
    dims = range(len(shape))[-int(name[len("adaptive_avg_pool")]) :]
    if rows is None or any(node.meta.shape[dim] != 1 for dim in dims):
        return None
    if rows.dim not in dims:
        return banded_op(node, context, rows) if rows.dim < dims[0] - 1 else None
    kind = "amax" if name.startswith("adaptive_max") else "sum"
    return _reduce_over_rows(node, rows, kind, list(dims), shape)


_OTHERS = "argmax argmin max[0] max[1] min[0] min[1] any all prod logsumexp".split()
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "var", "std", "linalg_vector_norm"), lower_reduction
    ),
    **dict.fromkeys(_OTHERS, lower_reduction),
    **{
        f"adaptive_{kind}_pool{count}d{which}": lower_adaptive_pool
        for count in (1, 2, 3)
        for kind, which in (("avg", ""), ("max", ""), ("max", "[0]"))
    },
}
