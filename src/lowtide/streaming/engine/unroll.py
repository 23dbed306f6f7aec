"""Programs of several chunks as one: the state that a chunk hands on is an intermediate result.

In bands, such a program makes the rows of all its chunks before the rows below, so that of the
state only rows that a band or its halo needs are there. A program of a single chunk needs the whole
state of the chunk before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lowtide.streaming.capture.graph import Graph, Node, NodeRef, substitute_refs
from lowtide.streaming.engine.program import FullTensorOp, StreamProgram, lower_to_rows
from lowtide.streaming.rules.row_op import Reduction

# (chunk, node of its graph)
_Place = tuple[int, int]


def unroll(chunks: Sequence[StreamProgram], *, keep_state: bool) -> StreamProgram:
    """Return one program for several chunks, each of which takes the state of the one before.

    The first input of each program is its chunk, the others are the state; its first result is that
    of the chunk, the others are the new state. The inputs of the program returned are all chunks,
    then the state of the first, and its results those of all chunks, then the last state.

    Args:
        chunks: Program of each chunk, the same object for the same graph.
        keep_state: Whether the last state is among the results.
    """
    unrolling = _Unrolling(chunks, keep_state)
    return lower_to_rows(unrolling.graph())


@dataclass
class _Unrolling:
    """Nodes of all chunks, each computed as late as its first use allows.

    A node's level is the number of segments before the one that it belongs to: it rises where a
    result is taken whole. In the order of the chunks alone, a whole-tensor operator of each chunk
    would begin a segment, and the chunks before it would be over by then.
    """

    chunks: Sequence[StreamProgram]
    keep_state: bool
    # Of nodes that are the same as another: a state, a tensor of the model, or made of these alone.
    same_as: dict[_Place, _Place] = field(default_factory=dict)
    nodes: list[_Place] = field(default_factory=list)

    def graph(self) -> Graph:
        """Return the graph of all chunks, by level, and by chunk within a level."""
        self._find_same_nodes()
        latest = self._latest_levels()
        order = sorted(self.nodes, key=lambda one: (latest[one], *one))
        index_of = {one: index for index, one in enumerate(order)}
        first, last = self.chunks[0].graph, self.chunks[-1].graph
        inputs = [(chunk, one.graph.inputs[0]) for chunk, one in enumerate(self.chunks)]
        inputs += [(0, one) for one in first.inputs[1:]]
        axes = [one.graph.axes[0] for one in self.chunks] + first.axes[1:]
        return Graph(
            nodes=[self._moved(one, index, index_of) for one, index in index_of.items()],
            inputs=[index_of[one] for one in inputs],
            axes=axes,
            fixed=[],
            outputs=[index_of[one] for one in self._outputs],
            tensors={
                index: self._graph(one).tensors[one[1]]
                for one, index in index_of.items()
                if self._node(one).kind == "tensor"
            },
            repack=last.repack,
            written_attributes=first.written_attributes | last.written_attributes,
        )

    def _graph(self, place: _Place) -> Graph:
        return self.chunks[place[0]].graph

    def _node(self, place: _Place) -> Node:
        return self._graph(place).nodes[place[1]]

    def _original(self, place: _Place) -> _Place:
        """Return the node that ``place`` is the same as."""
        while place in self.same_as:
            place = self.same_as[place]
        return place

    @cached_property
    def _outputs(self) -> list[_Place]:
        results = [(chunk, one.graph.outputs[0]) for chunk, one in enumerate(self.chunks)]
        last = len(self.chunks) - 1
        state = [(last, one) for one in self.chunks[-1].graph.outputs[1:]]
        return [self._original(one) for one in (*results, *(state if self.keep_state else ()))]

    def _find_same_nodes(self) -> None:
        """Fill in ``same_as``, and ``nodes`` with all others in the order of the chunks."""
        tensors, chunk_of_program = dict[int, _Place](), dict[int, int]()
        for chunk, program in enumerate(self.chunks):
            graph = program.graph
            same_program = chunk_of_program.setdefault(id(program), chunk)
            for node in graph.nodes:
                place = chunk, node.index
                if node.index in program.constants and same_program < chunk:
                    self.same_as[place] = same_program, node.index
                elif node.kind == "tensor":
                    known = tensors.setdefault(id(graph.tensors[node.index]), place)
                    if known != place:
                        self.same_as[place] = known
                elif node.index in graph.inputs[1:] and chunk:
                    before = self.chunks[chunk - 1].graph.outputs
                    self.same_as[place] = chunk - 1, before[graph.inputs.index(node.index)]
            self.nodes += [
                place for node in graph.nodes if (place := (chunk, node.index)) not in self.same_as
            ]

    def _latest_levels(self) -> dict[_Place, int]:
        """Return the last level in which each node may be computed."""
        needs = {one: dict(self._needs(one)) for one in self.nodes}
        earliest = dict[_Place, int]()
        for one in self.nodes:
            earliest[one] = max(
                (earliest[it] + after for it, after in needs[one].items()), default=0
            )
        latest = {one: earliest[one] for one in self._outputs}
        for one in reversed(self.nodes):
            level = latest.setdefault(one, earliest[one])
            for it, after in needs[one].items():
                latest[it] = min(latest.get(it, level), level - after)
        return latest

    def _needs(self, place: _Place) -> Iterator[tuple[_Place, int]]:
        """Yield what a node takes, and 1 if that must be complete before its segment, else 0."""
        chunk, index = place
        whole = _taken_whole(self.chunks[chunk], index)
        for one in self._node(place).refs:
            yield self._original((chunk, one)), int(one in whole)
        for one in whole:
            yield self._original((chunk, one)), 1

    def _moved(self, place: _Place, index: int, index_of: dict[_Place, int]) -> Node:
        """Return a copy of a node at its index in the new graph."""

        def moved(one: int) -> NodeRef:
            return NodeRef(index_of[self._original((place[0], one))])

        node = self._node(place)
        args, kwargs = substitute_refs((node.args, node.kwargs), moved)
        return Node(
            index, node.name, node.kind, node.meta, node.target, args, kwargs, node.module_path
        )


def _taken_whole(program: StreamProgram, index: int) -> set[int]:
    """Return the results with rows that a step needs whole, or statistics of whole ones."""
    step, found = program.steps.get(index), set[int]()
    if step is None:
        return found
    for one in step.inputs if isinstance(step, FullTensorOp) else program.full_inputs(index):
        made_by = program.steps.get(one)
        found.update(made_by.inputs if isinstance(made_by, Reduction) else {one} & {*program.rows})
    return found
