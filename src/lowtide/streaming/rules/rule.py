"""Operators on bands of rows, and types and helpers of the rules that lower a graph node to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from lowtide.streaming.capture.graph import (
    GraphNode,
    NodeRef,
    OperatorGraph,
    TensorMeta,
    bind_refs,
    iter_refs,
    op_name,
    substitute_refs,
)
from lowtide.streaming.spans import Span, Spans


@dataclass(frozen=True)
class RowAxis:
    """Dim ``dim`` of a tensor that runs down the image, ``size`` long.

    Bands begin and end at multiples of ``grain``: for a tensor of windows, one row of windows is a
    grain.
    """

    dim: int
    size: int
    grain: int = 1


# Rows that a band needs of each input with rows, in the order of the inputs.
InputSpans = tuple[Spans, ...]
# (span, input rows, arguments without rows) -> result rows. Arguments are tensors or lists of
# `MaskPattern`.
Run = Callable[[Span, Sequence[Tensor], Sequence[Any]], Tensor]


def _zero(_: int) -> int:
    return 0


@dataclass(frozen=True)
class RowOp:
    """Operator on a band of rows.

    Attributes:
        rows: Row axis of the result.
        inputs: Nodes with rows.
        full_inputs: Nodes without rows.
        input_spans: Returns the rows of each input that a span of the result needs.
        run: Computes a span from these rows and the full inputs.
        cheap: Recomputing the result takes less time than keeping it.
        view: The result shares the memory of the first input.
        sliced_dims: Full inputs that are sliced to the span, with the dim of each.
        pattern_dims: Constants among them that are passed as `MaskPattern`s of the span, with the
            dim of each.
        workspace_share: Workspace as a share of the bytes of its inputs and result.
        row_workspace_bytes: Workspace bytes for a number of rows.
        fixed_workspace_bytes: Workspace bytes of any band.
        padded: Bands at the image's ends are copied to pad them.
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    full_inputs: tuple[int, ...]
    input_spans: Callable[[Span], InputSpans]
    run: Run
    cheap: bool = False
    view: bool = False
    sliced_dims: Mapping[int, int] = field(default_factory=dict)
    pattern_dims: Mapping[int, int] = field(default_factory=dict)
    workspace_share: float = 0.0
    row_workspace_bytes: Callable[[int], int] = _zero
    fixed_workspace_bytes: int = 0
    padded: bool = False

    def workspace_bytes(self, num_rows: int, input_bytes: int, output_bytes: int) -> int:
        """Estimate the workspace bytes of a band.

        Args:
            num_rows: Rows of the result.
            input_bytes: Bytes of the input rows.
            output_bytes: Bytes of the result rows.
        """
        share = int(self.workspace_share * (input_bytes + output_bytes))
        return share + self.row_workspace_bytes(num_rows) + self.fixed_workspace_bytes


@dataclass(frozen=True)
class Reduction:
    """Reduction over all rows, accumulated band by band.

    Attributes:
        rows: Row axis of the inputs.
        inputs: Nodes with equally many rows.
        add: Returns the state, None at first, updated with the rows of a span, such as (B, C, rows,
            W).
        finish: Returns the result for a state, a tensor without rows, such as (B, C, 1, 1).
    """

    rows: RowAxis
    inputs: tuple[int, ...]
    add: Callable[[Any, Sequence[Tensor]], Any]
    finish: Callable[[Any], Tensor]


def identity_receptive_field(count: int) -> Callable[[Span], InputSpans]:
    """Return the receptive field of a row-wise operator with ``count`` inputs.

    It needs the same rows of each input.
    """

    def needed(span: Span) -> InputSpans:
        return ([span],) * count

    return needed


# None: no rule fits, and the operator runs on whole tensors.
# A tuple: a reduction, and a function from its node index to the operator that uses its result.
RuleResult = RowOp | Reduction | tuple[Reduction, Callable[[int], RowOp | GraphNode]] | None


@dataclass
class LoweringContext:
    """Graph and row axes of the results lowered so far.

    Attributes:
        graph: Graph being lowered.
        rows: Row axis of each result that has one.
        constants: Results that do not depend on the input.
    """

    graph: OperatorGraph
    rows: dict[int, RowAxis]
    constants: AbstractSet[int] = frozenset()

    @cached_property
    def use_counts(self) -> Counter[int]:
        """Number of nodes that take each result, the model's output counted once more."""
        found = Counter(one for node in self.graph.nodes for one in node.refs)
        found.update(self.graph.outputs)
        return found

    def meta(self, ref: Any) -> TensorMeta:
        """Return shape and dtype of an argument that is a `NodeRef`."""
        return self.graph.nodes[ref.node].meta

    def row_axis(self, arg: Any) -> RowAxis | None:
        """Return the row axis of an argument, or None if it has none."""
        return self.rows.get(arg.node) if isinstance(arg, NodeRef) else None


Rule = Callable[[GraphNode, LoweringContext], RuleResult]


def node_argument(node: GraphNode, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a node by position or name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def sole_producer(arg: Any, context: LoweringContext, *names: str) -> GraphNode | None:
    """Return the node that makes an argument, if nothing else takes its result.

    Returns None otherwise, or if ``names`` are given and its operator is none of them.
    """
    if not isinstance(arg, NodeRef) or context.use_counts[arg.node] != 1:
        return None
    node = context.graph.nodes[arg.node]
    fits = node.kind == "call" and (not names or op_name(node.target) in names)
    return node if fits else None


def swaps_last_dims(node: GraphNode) -> bool:
    """Return whether a node swaps the last two dims of a tensor, and no others."""
    rank = len(node.meta.shape)
    if op_name(node.target) == "transpose":
        return {dim % rank for dim in node.args[1:3]} == {rank - 2, rank - 1}
    if op_name(node.target) != "permute":
        return False
    return [dim % rank for dim in node.args[1]] == [*range(rank - 2), rank - 1, rank - 2]


def normalize_dims(dim: Any, rank: int) -> list[int]:
    """Return a dim, several, or all for None, as non-negative dims."""
    if dim is None or dim == []:
        return list(range(rank))
    return [one % rank for one in (dim if isinstance(dim, (list, tuple)) else [dim])]


def aligned_dim(rows: RowAxis, rank: int, shape: Sequence[int]) -> int | None:
    """Return the dim of a tensor that broadcasting aligns with the rows of a result.

    Args:
        rows: Row axis of the result.
        rank: Number of dims of the result.
        shape: Shape of the tensor, which has no row axis.

    Returns:
        The dim, or None if the tensor has none or is broadcast along it.
    """
    dim = rows.dim - rank + len(shape)
    return dim if dim >= 0 and shape[dim] == rows.size > 1 else None


def banded_op(
    node: GraphNode,
    context: LoweringContext,
    rows: RowAxis,
    *,
    input_spans: Callable[[Span], InputSpans] | None = None,
    change_args: Callable[[Span, Any, Any], tuple[Any, Any]] | None = None,
    cheap: bool = False,
    view: bool = False,
    sliced_dims: dict[int, int] | None = None,
) -> RowOp:
    """Return the node's own operator, run on bands of its inputs with rows.

    Args:
        node: Node to lower.
        context: Graph and row axes.
        rows: Row axis of the result.
        input_spans: Input rows for a span of the result; by default the same rows.
        change_args: Returns other args and kwargs for a span.
        cheap: As in `RowOp`.
        view: As in `RowOp`.
        sliced_dims: Nodes without rows that are sliced to the span, with the dim of each.
    """
    inputs = tuple(one for one in node.refs if one in context.rows)
    full_inputs = tuple(one for one in node.refs if one not in context.rows)
    target, bind = node.target, bind_refs(node.args)
    kwargs_have_refs = any(True for _ in iter_refs(node.kwargs))
    assert target is not None

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values = dict(zip((*inputs, *full_inputs), (*pieces, *whole), strict=True))
        if change_args is None and not kwargs_have_refs:
            return target(*bind(values), **node.kwargs)
        args, kwargs = node.args, node.kwargs
        if change_args is not None:
            args, kwargs = change_args(span, args, kwargs)
        args, kwargs = substitute_refs((args, kwargs), values.__getitem__)
        return target(*args, **kwargs)

    return RowOp(
        rows,
        inputs,
        full_inputs,
        input_spans or identity_receptive_field(len(inputs)),
        run,
        cheap,
        view,
        sliced_dims or {},
    )


def replace_arg(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    """Return ``args`` with ``value`` at ``position``."""
    return (*args[:position], value, *args[position + 1 :])


def samplewise_rule(rule: Rule) -> Rule:
    """Return the rule of an operator that treats the samples of (B, C, ...) alike.

    Where rows are the batch, as frames often are, a band is a smaller batch.
    """

    def lowered(node: GraphNode, context: LoweringContext) -> RuleResult:
        rows = context.row_axis(node.args[0])
        if rows is None or rows.dim or any(map(context.row_axis, node.args[1:])):
            return rule(node, context)
        return banded_op(node, context, rows)

    return lowered


@dataclass(frozen=True)
class RowKernel:
    """Receptive field along one dim: ``extent`` rows from ``row · stride - pad`` on."""

    extent: int
    stride: int
    pad: int

    def receptive_field(self, span: Span) -> Span:
        """Return the input rows of a span of the result, unclipped at the image's ends."""
        first, last = span
        return first * self.stride - self.pad, (last - 1) * self.stride - self.pad + self.extent
