"""Lowering of a graph to operators on rows, or on whole feature maps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_leaves

from lowtide.core.errors import ModelError
from lowtide.streaming.capture.graph import GraphNode, OperatorGraph
from lowtide.streaming.rules import RULES, LoweringContext
from lowtide.streaming.rules.fuse_unfold import fuse_unfold
from lowtide.streaming.rules.fuse_upsample_conv import fuse_upsample_convs, upsample_conv2d
from lowtide.streaming.rules.pointwise import is_pointwise, lower_pointwise
from lowtide.streaming.rules.rule import (
    Reduction,
    RowAxis,
    RowOp,
    RuleResult,
    identity_receptive_field,
    op_name,
)


@dataclass(frozen=True)
class FullTensorOp:
    """Operator run once on whole tensors; its ``inputs`` with rows are gathered."""

    node: GraphNode
    inputs: tuple[int, ...]


_HINT = "run the model whole, or stream that part of it which returns a map of its input"
Step = RowOp | Reduction | FullTensorOp


@dataclass
class StreamProgram:
    """Program of a graph: steps in execution order, with the row axis of each result.

    Attributes:
        graph: Captured graph.
        steps: Steps by the node index of their result, each after its inputs.
        rows: Row axis of each result that has one.
        constants: Results that do not depend on the input.
        unsupported: Operators with row inputs that no rule covers.
        outputs: Node indices of the results, each once.
        constant_digests: Cache of which grains of constants are equal.
    """

    graph: OperatorGraph
    steps: dict[int, Step] = field(default_factory=dict)
    rows: dict[int, RowAxis] = field(default_factory=dict)
    constants: set[int] = field(default_factory=set)
    unsupported: list[int] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    # Cached here because one program is described for many layouts.
    constant_digests: dict[object, Any] = field(default_factory=dict, repr=False)
    _row_bytes: dict[int, int] = field(default_factory=dict, repr=False)

    @cached_property
    def digest(self) -> str:
        """Hash of the operators, their arguments and all shapes, without weights."""
        steps = (f"{index} {type(step).__name__}" for index, step in self.steps.items())
        if self.graph.axes != [2] or self.graph.fixed:
            steps = *steps, f"{self.graph.inputs} along {self.graph.axes}"
        return hashlib.sha256("\n".join((self.graph.digest, *steps)).encode()).hexdigest()[:24]

    @property
    def output(self) -> int:
        """Node index of the first result with rows; -1 if none has."""
        return next((one for one in self.outputs if one in self.rows), -1)

    @cached_property
    def operators_digest(self) -> str:
        """Hash of the operators in order, independent of the image size."""
        names = (
            f"{type(step).__name__} {op_name(self.graph.nodes[index].target)}"
            if index < len(self.graph.nodes)
            else type(step).__name__
            for index, step in self.steps.items()
        )
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    @cached_property
    def constants_digest(self) -> str:
        """Hash of the constants that operators take, without sizes and places, of any image."""
        facts = (f"{op_name(node.target)} {_constants_of(node)}" for node in self.graph.nodes)
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

    def bytes_of(self, index: int) -> int:
        """Return the bytes of a whole result."""
        return self.graph.nodes[index].meta.nbytes

    def row_bytes(self, index: int) -> int:
        """Return the bytes of one row of a result."""
        known = self._row_bytes.get(index)
        if known is None:
            known = self._row_bytes[index] = self.bytes_of(index) // self.rows[index].size
        return known

    def view_base(self, index: int) -> int:
        """Return the index of the result that owns a view's memory."""
        step = self.steps.get(index)
        while isinstance(step, RowOp) and step.view:
            index = step.inputs[0]
            step = self.steps.get(index)
        return index

    def full_inputs(self, index: int) -> tuple[int, ...]:
        """Return the arguments of a step that it takes as whole tensors."""
        step = self.steps[index]
        if isinstance(step, RowOp):
            return step.full_inputs
        return step.inputs if isinstance(step, FullTensorOp) else ()


def _constants_of(node: GraphNode) -> list[object]:
    """Return arguments that are numbers to compute with, rather than sizes and places."""
    values = tree_leaves((node.args, node.kwargs))
    return [
        one
        for one in values
        if isinstance(one, (float, bool, str)) or (type(one) is int and is_pointwise(node))
    ]


def lower_to_rows(graph: OperatorGraph) -> StreamProgram:
    """Lower a graph to a `StreamProgram` by following its rows from the inputs on.

    Raises:
        ModelError: The result does not have the rows of the input, or no rule covers an operator
            on the way.
    """
    program = _lower(fuse_upsample_convs(graph))
    if any(program.graph.nodes[index].target is upsample_conv2d for index in program.unsupported):
        program = _lower(graph)  # the fused form goes by height, and here rows are not
    if program.output < 0 and program.unsupported:
        program = _lower(graph, rows_again=True)
    if program.output < 0 and program.unsupported:
        names = ", ".join(program.graph.nodes[index].title for index in program.unsupported[:3])
        raise ModelError(f"cannot run this model band by band: no rule for {names}", hint=_HINT)
    if program.output < 0:
        raise ModelError(
            "the model's output has no rows that correspond to rows of its input", hint=_HINT
        )
    _drop_unused_steps(program)
    return program


def _lower(graph: OperatorGraph, *, rows_again: bool = False) -> StreamProgram:
    """Lower a graph; with ``rows_again``, whole results of the image's rank have rows again."""
    program = StreamProgram(graph, outputs=tuple(dict.fromkeys(graph.outputs)))
    context = LoweringContext(graph, program.rows, program.constants)
    for index, dim in zip(graph.inputs, graph.axes, strict=True):
        program.rows[index] = RowAxis(dim, graph.nodes[index].meta.shape[dim])
    for node in graph.nodes:
        if node.kind in ("input", "fixed"):
            continue
        if node.kind == "tensor" or all(ref in program.constants for ref in node.refs):
            program.constants.add(node.index)
        else:
            _add_step(program, context, node, rows_again=rows_again)
    return program


def _drop_unused_steps(program: StreamProgram) -> None:
    """Drop steps whose results nothing reads; models and fusion rules leave some."""
    wanted, waiting = set[int](), [*program.outputs]
    while waiting:
        index = waiting.pop()
        if index in wanted or index not in program.steps:
            continue
        wanted.add(index)
        waiting += [*program.steps[index].inputs, *program.full_inputs(index)]
    program.steps = {index: step for index, step in program.steps.items() if index in wanted}
    program.unsupported = [index for index in program.unsupported if index in wanted]


def _add_step(
    program: StreamProgram, context: LoweringContext, node: GraphNode, *, rows_again: bool
) -> None:
    with_rows = any(ref in program.rows for ref in node.refs)
    found = _apply_rule(node, context) if with_rows else None
    if isinstance(found, tuple):
        # The statistics are a separate result, numbered after those of the graph.
        reduction, applied = found
        statistics = len(program.graph.nodes) + len(program.steps)
        program.steps[statistics] = reduction
        found = applied(statistics)
    if isinstance(found, GraphNode):
        program.graph.nodes[node.index] = found
        found = _full_tensor_op(program, found)
    elif found is None:
        found = _full_tensor_op(program, node)
        if with_rows:
            program.unsupported.append(node.index)
    if rows_again and isinstance(found, FullTensorOp):
        found = _rows_of_whole(program, node, found)
    if isinstance(found, RowOp):
        program.rows[node.index] = found.rows
    program.steps[node.index] = found


def _rows_of_whole(
    program: StreamProgram, node: GraphNode, whole: FullTensorOp
) -> FullTensorOp | RowOp:
    """Return a step that hands out a whole result by rows, if it may be a map of the image.

    Any dim would be exact; that of the image's rows is most likely one of rows here too.
    """
    shape, dim = node.meta.shape, program.graph.axes[0]
    if len(shape) != len(program.graph.meta(program.graph.inputs[0]).shape) or shape[dim] < 2:
        return whole
    index = len(program.graph.nodes) + len(program.steps)
    program.steps[index] = whole
    return RowOp(
        RowAxis(dim, shape[dim]),
        inputs=(),
        full_inputs=(index,),
        input_spans=identity_receptive_field(0),
        run=lambda _, pieces, full: full[0],
        cheap=True,
        sliced_dims={index: dim},
    )


def _full_tensor_op(program: StreamProgram, node: GraphNode) -> FullTensorOp:
    return FullTensorOp(node, tuple(ref for ref in node.refs if ref not in program.constants))


def _apply_rule(node: GraphNode, context: LoweringContext) -> RuleResult:
    if found := fuse_unfold(node, context):
        return found
    if is_pointwise(node):
        return lower_pointwise(node, context)
    rule = RULES.get(op_name(node.target))
    return None if rule is None else rule(node, context)
