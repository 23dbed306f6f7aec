"""Chunks of a clip: their state carried from run to run, or within a program of several of them.

Carried state is freed and made band by band. In a program of several chunks, the state that a chunk
hands on is an intermediate result. In bands, such a program makes the rows of all its chunks before
the rows below, so that of the state only rows that a band or its halo needs are there. A program of
a single chunk needs the whole state of the chunk before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO

import torch
from torch import Tensor

from lowtide.core.scratch import ScratchSpace
from lowtide.streaming.capture.graph import (
    GraphNode,
    NodeRef,
    OperatorGraph,
    TensorMeta,
    substitute_refs,
)
from lowtide.streaming.engine.placement import Placement
from lowtide.streaming.engine.program import FullTensorOp, StreamProgram, lower_to_rows
from lowtide.streaming.engine.segments import ProgramSegment, page_readers
from lowtide.streaming.pages.page import FeaturePage, MemoryPage, memory_order
from lowtide.streaming.pages.spilled_page import DiskPage, HostPage
from lowtide.streaming.pages.transfer import HostTransfer, host_transfer_for
from lowtide.streaming.rules.rule import Reduction

# Pieces of a state tensor in memory: what no band reads any more is freed piece by piece.
_PIECES = 64
# Bands whose rows a page in host memory has on the device: its own and the next.
_PREFETCHED_BANDS = 2


class CarriedStateStore:
    """Where the tensors are kept that a run hands to the next, such as caches (1, C, 2, H, W).

    Args:
        placement: Device memory, host memory (pinned if the device is a GPU), or files.
        dim: Dim of the rows.
        device: Device of the runs.
        space: Scratch space of the files.
    """

    def __init__(
        self, placement: Placement, dim: int, device: torch.device, space: ScratchSpace
    ) -> None:
        self.placement: Placement = placement
        self._dim, self._device, self._space = dim, device, space
        # kept for all runs: pinning takes longer than copying
        self._transfer: HostTransfer | None = (
            host_transfer_for(device) if placement == "host" else None
        )

    def empty(self, metas: Sequence[TensorMeta]) -> CarriedState:
        """Return a state of tensors of these shapes, without rows."""
        state = CarriedState([], self._dim, metas)
        try:
            for meta in metas:
                state.pages.append(self._page(meta))
        except BaseException:
            state.close()
            raise
        return state

    def load(self, metas: Sequence[TensorMeta], file: BinaryIO) -> CarriedState:
        """Return the state of these shapes that `CarriedState.save` wrote to ``file``."""
        state = self.empty(metas)
        try:
            for index, meta in enumerate(metas):
                for first in range(0, meta.shape[self._dim], state.piece_rows(index)):
                    state.write(index, first, _read_rows(file, meta.dtype).to(self._device))
        except BaseException:
            state.close()
            raise
        return state

    def _page(self, meta: TensorMeta) -> FeaturePage:
        if self.placement == "disk":
            return DiskPage(meta.shape, meta.dtype, self._dim, self._device, self._space)
        if self._transfer is not None:
            return HostPage(meta.shape, meta.dtype, self._dim, self._transfer)
        return MemoryPage(self._dim, self._device)


@dataclass(frozen=True)
class CarriedState:
    """Pages of the tensors that a run hands to the next.

    Attributes:
        pages: Page of each tensor.
        dim: Dim of their rows.
        metas: Shape and dtype of the tensors.
    """

    pages: list[FeaturePage]
    dim: int
    metas: Sequence[TensorMeta]

    def piece_rows(self, index: int) -> int:
        """Return the rows of a tensor that are kept in one piece of memory."""
        return -(-self.metas[index].shape[self.dim] // _PIECES)

    def write(self, index: int, first: int, rows: Tensor) -> None:
        """Keep a copy of rows from row ``first`` on, such as (1, C, 2, rows, W)."""
        page = self.pages[index]
        if not isinstance(page, MemoryPage):
            page.write(first, rows)
            return
        for part in rows.split(self.piece_rows(index), self.dim):
            page.write(first, part.clone())
            first += part.shape[self.dim]

    def save(self, file: BinaryIO) -> None:
        """Write all rows to ``file`` in pieces; `CarriedStateStore.load` makes the same of it.

        Raises:
            OSError: They cannot be written.
        """
        for index, (page, meta) in enumerate(zip(self.pages, self.metas, strict=True)):
            count, step = meta.shape[self.dim], self.piece_rows(index)
            for first in range(0, count, step):
                _write_rows(file, page.read([(first, min(first + step, count))]))

    def take_pages(self) -> list[FeaturePage]:
        """Hand the pages over to a run, which closes them."""
        pages = [*self.pages]
        self.pages.clear()
        return pages

    def close(self) -> None:
        """Free the memory and disk space of the pages that no run has taken."""
        for page in self.take_pages():
            page.close()


def _write_rows(file: BinaryIO, rows: Tensor) -> None:
    """Write rows and their order in memory, which decides what kernels run on them."""
    order = memory_order(rows)
    stored = rows.permute(order).contiguous()
    header = {"order": order, "shape": list(stored.shape)}
    file.write(json.dumps(header).encode() + b"\n")
    file.write(stored.flatten().view(torch.uint8).cpu().numpy().data)


def _read_rows(file: BinaryIO, dtype: torch.dtype) -> Tensor:
    """Return rows as `_write_rows` got them."""
    header = json.loads(file.readline())
    stored = torch.empty(header["shape"], dtype=dtype)
    file.readinto(stored.flatten().view(torch.uint8).numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
    return stored.permute([header["order"].index(place) for place in range(stored.dim())])


@dataclass(frozen=True)
class CarriedStateBytes:
    """Bytes on the device that chunks, result and state take while a program of ``chunks`` runs.

    The first ``chunks`` inputs and results of the program are those of its chunks, and the others
    the state. ``result_bytes`` are those of the result of all runs, held from the start; None where
    results of earlier runs are gone.
    """

    chunks: int
    placement: Placement
    result_bytes: int | None

    def __call__(
        self, program: StreamProgram, segments: Sequence[ProgramSegment], bands: Sequence[int]
    ) -> int:
        """Return the most bytes for a layout, apart from the rows at work."""
        if self.placement == "memory":
            old = program.graph.inputs[self.chunks :]
            more = _overlap_bytes(program, segments, bands, old)
        else:
            more = self._transfer_bytes(program, segments, bands)
        graph = program.graph
        copies = sum(map(program.bytes_of, graph.inputs[: self.chunks]))
        results = self.result_bytes
        if results is None:
            results = sum(map(program.bytes_of, graph.outputs[: self.chunks]))
        state = graph.outputs[self.chunks :] if self.placement == "memory" else []
        return copies + results + sum(map(program.bytes_of, state)) + more

    def _transfer_bytes(
        self, program: StreamProgram, segments: Sequence[ProgramSegment], bands: Sequence[int]
    ) -> int:
        """Return the bytes of rows on their way to the pages and from them, at the most."""
        graph, most = program.graph, 0
        old, new = {*graph.inputs[self.chunks :]}, {*graph.outputs[self.chunks :]}
        for segment, count in zip(segments, bands, strict=True):
            read = [program.bytes_of(one) // count for one in old & segment.reads]
            written = [program.bytes_of(one) // count for one in new & {*segment.outputs}]
            if self.placement == "host":  # two bands are there, and what was written last
                moved = _PREFETCHED_BANDS * sum(read) + sum(written)
            else:
                moved = max([*read, *written], default=0)
            most = max(most, moved)
        return most


def _overlap_bytes(
    program: StreamProgram,
    segments: Sequence[ProgramSegment],
    bands: Sequence[int],
    old: Sequence[int],
) -> int:
    """Return the most bytes of an old state in memory while the new one is made.

    Old rows are freed while new ones are made, so that both are there only for the band at work,
    and where several segments read them.
    """
    readers, overlap = page_readers(segments), [0.0] * len(segments)
    twice = 0
    for index in old:
        size, at = program.bytes_of(index), readers.get(index, [])
        if len(at) == 1:
            overlap[at[0]] += size * min(1.0, 1 / bands[at[0]] + 1 / _PIECES)
        else:
            twice += size
    return twice + int(max(overlap, default=0))


# (chunk, node of its graph)
_Place = tuple[int, int]


def unroll_chunks(chunks: Sequence[StreamProgram], *, keep_state: bool) -> StreamProgram:
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

    def graph(self) -> OperatorGraph:
        """Return the graph of all chunks, by level, and by chunk within a level."""
        self._find_same_nodes()
        latest = self._latest_levels()
        order = sorted(self.nodes, key=lambda one: (latest[one], *one))
        index_of = {one: index for index, one in enumerate(order)}
        first, last = self.chunks[0].graph, self.chunks[-1].graph
        inputs = [(chunk, one.graph.inputs[0]) for chunk, one in enumerate(self.chunks)]
        inputs += [(0, one) for one in first.inputs[1:]]
        axes = [one.graph.axes[0] for one in self.chunks] + first.axes[1:]
        return OperatorGraph(
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

    def _graph(self, place: _Place) -> OperatorGraph:
        return self.chunks[place[0]].graph

    def _node(self, place: _Place) -> GraphNode:
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

    def _moved(self, place: _Place, index: int, index_of: dict[_Place, int]) -> GraphNode:
        """Return a copy of a node at its index in the new graph."""

        def moved(one: int) -> NodeRef:
            return NodeRef(index_of[self._original((place[0], one))])

        node = self._node(place)
        args, kwargs = substitute_refs((node.args, node.kwargs), moved)
        return GraphNode(
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
