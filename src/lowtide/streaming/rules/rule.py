"""What a rule is given, and what it may answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.graph import (
    Graph,
    Node,
    NodeRef,
    TensorMeta,
    bind_refs,
    iter_refs,
    substitute_refs,
)
from lowtide.streaming.rules.row_op import Needs, Reduction, RowAxis, RowOp, identity_region
from lowtide.streaming.spans import Span

# None: no rule fits, and the operator is run on whole tensors.
# With a reduction: what makes the result of it, by its number.
RuleResult = RowOp | Reduction | tuple[Reduction, Callable[[int], RowOp | Node]] | None


@dataclass
class RuleContext:
    """The graph and which of its results carry rows, as far as it has been walked through.

    ``fixed`` are results that no input changes, ``plain`` those that lie in the order of their
    dimensions, even if not in a whole run, ``idle`` copies that may be left out.
    """

    graph: Graph
    rows: dict[int, RowAxis]
    fixed: AbstractSet[int] = frozenset()
    plain: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> Counter[int]:
        """How many operators take a result, the model's own result once more."""
        found = Counter(one for node in self.graph.nodes for one in node.refs)
        found[self.graph.output] += 1
        return found

    @cached_property
    def readers(self) -> dict[int, list[Node]]:
        """By result the operators that take it."""
        return self.graph.users()

    def like(self, ref: Any) -> TensorMeta:
        """Shape and type of an argument that is a result."""
        return self.graph.nodes[ref.node].like

    def of(self, arg: Any) -> RowAxis | None:
        """The rows of an argument, or None if it has none."""
        return self.rows.get(arg.node) if isinstance(arg, NodeRef) else None


Rule = Callable[[Node, RuleContext], RuleResult]


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by its place or its name."""
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def sole_producer(arg: Any, tracked: RuleContext, *names: str) -> Node | None:
    """The operator of an argument, if nothing else takes its result and, where names are given, it
    has one of these."""
    if not isinstance(arg, NodeRef) or tracked.users[arg.node] != 1:
        return None
    node = tracked.graph.nodes[arg.node]
    fits = node.kind == "call" and (not names or op_name(node.target) in names)
    return node if fits else None


def is_all_of_its_memory(tensor: Tensor) -> bool:
    """Whether nothing else lies in the memory that it is a view of."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def dims_of(dim: Any, count: int) -> list[int]:
    """One dimension, several, or all of them, counted from the front."""
    if dim is None or dim == []:
        return list(range(count))
    return [one % count for one in (dim if isinstance(dim, (list, tuple)) else [dim])]


def aligned_dim(rows: RowAxis, rank: int, shape: Sequence[int]) -> int | None:
    """The dimension of a tensor without rows that runs along those of a result with ``rank``
    dimensions; None where it has none, or is repeated along them."""
    dim = rows.dim - rank + len(shape)
    return dim if dim >= 0 and shape[dim] == rows.size > 1 else None


def banded_op(
    node: Node,
    tracked: RuleContext,
    rows: RowAxis,
    *,
    needed: Callable[[Span], Needs] | None = None,
    change: Callable[[Span, Any, Any], tuple[Any, Any]] | None = None,
    cheap: bool = False,
    view: bool = False,
    slices: dict[int, int] | None = None,
) -> RowOp:
    """The node's own operator with bands where it has tensors with rows.

    ``change`` may put other arguments for a span. ``slices`` names nodes without rows of which
    only the span is given, along a dimension.
    """
    inputs = tuple(one for one in node.refs if one in tracked.rows)
    wholes = tuple(one for one in node.refs if one not in tracked.rows)
    target, bind = node.target, bind_refs(node.args)
    kwargs_have_refs = any(True for _ in iter_refs(node.kwargs))
    assert target is not None

    def run(span: Span, pieces: Sequence[Tensor], whole: Sequence[Tensor]) -> Tensor:
        values = dict(zip((*inputs, *wholes), (*pieces, *whole), strict=True))
        if change is None and not kwargs_have_refs:
            return target(*bind(values), **node.kwargs)
        args, kwargs = node.args, node.kwargs
        if change is not None:
            args, kwargs = change(span, args, kwargs)
        args, kwargs = substitute_refs((args, kwargs), values.__getitem__)
        return target(*args, **kwargs)

    return RowOp(
        rows, inputs, wholes, needed or identity_region(len(inputs)), run, cheap, view, slices or {}
    )


def replace_arg(args: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    """``args`` with another one at ``place``."""
    return (*args[:place], value, *args[place + 1 :])


def op_name(target: Any) -> str:
    """``aten.conv2d.default`` as ``conv2d``."""
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return getattr(target, "__name__", str(target))
