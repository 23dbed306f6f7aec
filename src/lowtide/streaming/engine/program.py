"""Lowering of a graph to row operators: what runs by bands, and what whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowtide.core.errors import ModelError
from lowtide.streaming.capture.graph import Graph, Node
from lowtide.streaming.engine.buffer_reuse import buffer_families
from lowtide.streaming.rules import RULES, RuleContext
from lowtide.streaming.rules.fuse_mlp import fuse_mlp
from lowtide.streaming.rules.fuse_qkv_proj import fuse_qkv_proj
from lowtide.streaming.rules.fuse_unfold import fuse_unfold
from lowtide.streaming.rules.fuse_upsample_conv import fuse_upsample_convs
from lowtide.streaming.rules.pointwise import is_pointwise, pointwise
from lowtide.streaming.rules.redundant_copies import redundant_copies
from lowtide.streaming.rules.row_op import Reduction, RowAxis, RowOp
from lowtide.streaming.rules.rule import RuleResult, op_name
from lowtide.streaming.rules.sum_layout import contiguous_sums


@dataclass(frozen=True)
class FullTensorOp:
    """Operator run once on whole tensors; its ``inputs`` with rows are gathered."""

    node: Node
    inputs: tuple[int, ...]


_HINT = "run the model on the whole image"
Step = RowOp | Reduction | FullTensorOp
_PRODUCTS = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "scaled_dot_product_attention",
    }
)


@dataclass
class StreamProgram:
    """Program of a graph: steps in execution order, with the row axis of each result.

    Attributes:
        graph: Captured graph.
        steps: Steps by the node index of their result, each after its inputs.
        rows: Row axis of each result that has one.
        fixed: Results that do not depend on the input.
        unruled: Operators with row inputs that no rule covers.
        output: Node index of the result.
        told_equal: Cache of which grains of constants are equal.
    """

    graph: Graph
    steps: dict[int, Step] = field(default_factory=dict)
    rows: dict[int, RowAxis] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    unruled: list[int] = field(default_factory=list)
    output: int = -1
    # Cached here because one program is described for many layouts.
    told_equal: dict[object, Any] = field(default_factory=dict, repr=False)
    _row_bytes: dict[int, int] = field(default_factory=dict, repr=False)

    @cached_property
    def digest(self) -> str:
        """Hash of the operators, their arguments and all shapes, without weights."""
        facts = (
            f"{op_name(node.target)} {node.args} {node.kwargs} {node.like}"
            for node in self.graph.nodes
        )
        steps = (f"{index} {type(step).__name__}" for index, step in self.steps.items())
        return hashlib.sha256("\n".join((*facts, *steps)).encode()).hexdigest()[:24]

    @cached_property
    def multiplies(self) -> bool:
        """Whether a step is or contains a matrix product."""
        return any(op_name(node.target) in _PRODUCTS for node in self.graph.nodes)

    @cached_property
    def families(self) -> dict[int, int]:
        """By result the first one of its alias set, which may share its memory."""
        return buffer_families(self.graph, self.steps)

    def bytes_of(self, index: int) -> int:
        """Return the bytes of a whole result."""
        return self.graph.nodes[index].like.bytes

    def row_bytes(self, index: int) -> int:
        """Return the bytes of one row of a result."""
        known = self._row_bytes.get(index)
        if known is None:
            known = self._row_bytes[index] = self.bytes_of(index) // self.rows[index].size
        return known

    def wholes(self, index: int) -> tuple[int, ...]:
        """Return the arguments of a step that it takes as whole tensors."""
        step = self.steps[index]
        if isinstance(step, RowOp):
            return step.wholes
        return step.inputs if isinstance(step, FullTensorOp) else ()


def lower_to_rows(graph: Graph) -> StreamProgram:
    """Lower a graph to a `StreamProgram` by following the image rows through it.

    Raises:
        ModelError: The result does not have the rows of the input, or no rule covers an operator
            on the way.
    """
    graph = fuse_upsample_convs(graph)
    program = StreamProgram(graph, output=graph.output)
    tracked = RuleContext(
        graph,
        program.rows,
        program.fixed,
        frozenset(contiguous_sums(graph)),
        frozenset(redundant_copies(graph)),
    )
    for node in graph.nodes:
        if node.kind == "input":
            program.rows[node.index] = RowAxis(2, node.like.shape[2])
        elif node.kind == "tensor" or all(ref in program.fixed for ref in node.refs):
            program.fixed.add(node.index)
        else:
            _add(program, tracked, node)
    if program.output not in program.rows and program.unruled:
        names = ", ".join(graph.nodes[index].title for index in program.unruled[:3])
        raise ModelError(f"cannot run this model band by band: no rule for {names}", hint=_HINT)
    if program.output not in program.rows:
        raise ModelError(
            "the model's output has no rows that correspond to rows of its input", hint=_HINT
        )
    _forget_unused(program)
    return program


def _forget_unused(program: StreamProgram) -> None:
    """Drop steps whose results nothing reads; models and fusion rules leave some."""
    wanted, waiting = set[int](), [program.output]
    while waiting:
        index = waiting.pop()
        if index in wanted or index not in program.steps:
            continue
        wanted.add(index)
        waiting += [*program.steps[index].inputs, *program.wholes(index)]
    program.steps = {index: step for index, step in program.steps.items() if index in wanted}
    program.unruled = [index for index in program.unruled if index in wanted]


def _add(program: StreamProgram, tracked: RuleContext, node: Node) -> None:
    with_rows = any(ref in program.rows for ref in node.refs)
    found = _rule(node, tracked) if with_rows else None
    if isinstance(found, tuple):
        # The statistics are a separate result, numbered after those of the graph.
        reduction, applied = found
        statistics = len(program.graph.nodes) + len(program.steps)
        program.steps[statistics] = reduction
        found = applied(statistics)
    if isinstance(found, Node):
        program.graph.nodes[node.index] = found
        found = _whole(program, found)
    elif found is None:
        found = _whole(program, node)
        if with_rows:
            program.unruled.append(node.index)
    elif isinstance(found, RowOp):
        program.rows[node.index] = found.rows
    program.steps[node.index] = found


def _whole(program: StreamProgram, node: Node) -> FullTensorOp:
    return FullTensorOp(node, tuple(ref for ref in node.refs if ref not in program.fixed))


def _rule(node: Node, tracked: RuleContext) -> RuleResult:
    for several in (fuse_mlp, fuse_qkv_proj, fuse_unfold):
        if found := several(node, tracked):
            return found
    if is_pointwise(node):
        return pointwise(node, tracked)
    rule = RULES.get(op_name(node.target))
    return None if rule is None else rule(node, tracked)
