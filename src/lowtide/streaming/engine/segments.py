"""Cutting of a program into segments: sweeps over the rows with pages in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowtide.streaming.engine.macs import macs_per_element
from lowtide.streaming.engine.program import FullTensorOp, StreamProgram
from lowtide.streaming.rules.row_op import Reduction, RowOp


@dataclass
class Segment:
    """One sweep over the rows: ``before`` on whole tensors, then ``steps`` by bands.

    ``pages`` are results kept for later segments; ``reads`` are pages of earlier ones. A cheap step
    may be in several segments, where it is computed again.
    """

    before: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)


def cut_segments(program: StreamProgram, cuts: Iterable[int] = (), again: int = 0) -> list[Segment]:
    """Cut a program into segments, in order.

    Cuts are where a result is needed as a whole, and before each of ``cuts``.

    Args:
        program: Program to cut.
        cuts: Node indices of steps that begin a segment.
        again: Operators of at most this `macs_per_element` are recomputed in later segments like
            cheap ones, where that keeps fewer bytes.
    """
    places = _places(program, set(cuts))
    segments = [Segment() for _ in range(max(places.values(), default=0) + 1)]
    for index, place in places.items():
        step = program.steps[index]
        (
            segments[place].before if isinstance(step, FullTensorOp) else segments[place].steps
        ).append(index)
    _Pages(program, places, again).choose(segments)
    return segments


def _places(program: StreamProgram, cuts: set[int]) -> dict[int, int]:
    """Return the segment of each step, as early as the order of the graph allows.

    Whole-tensor steps come before the segment in which their inputs are ready. They do not end a
    segment, since later steps that do not need them may still belong to it.
    """
    places: dict[int, int] = {}

    def there(index: int) -> int:
        """Return the first segment in which a result is complete."""
        place = places.get(index)
        if place is None:
            return 0
        return place if isinstance(program.steps[index], FullTensorOp) else place + 1

    now = 0
    for index, step in program.steps.items():
        now += index in cuts
        needed = max(map(there, program.wholes(index)), default=0)
        if isinstance(step, FullTensorOp):
            places[index] = needed
        else:
            places[index] = now = max(now, needed)
    return places


class _Pages:
    """Choice of pages that later segments read; recomputes cheap steps to keep less."""

    def __init__(self, program: StreamProgram, places: dict[int, int], again: int) -> None:
        self._program, self._places, self._again = program, places, again
        self._pages: set[int] = set()
        # Cheapest sources of a result in the current segment, valid until a page is added: in dense
        # blocks millions of paths lead to the same results.
        self._known: dict[int, set[int]] = {}

    def choose(self, segments: list[Segment]) -> None:
        """Fill in the pages, reads and recomputed steps of each segment."""
        order = {index: at for at, index in enumerate(self._program.steps)}
        for place in range(len(segments) - 1, -1, -1):
            part = segments[place]
            self._known.clear()
            for index in part.before:
                for needed in self._program.wholes(index):
                    if needed in self._program.rows:
                        self._keep(needed)
                        part.reads.add(needed)
            again = self._needed(part, place)
            part.steps = sorted({*part.steps, *again}, key=order.__getitem__)
        for index in sorted(self._pages):
            if index in self._places:
                segments[self._places[index]].pages.append(index)

    def _keep(self, *indices: int) -> None:
        if not self._pages.issuperset(indices):
            self._pages.update(indices)
            self._known.clear()

    def _needed(self, part: Segment, place: int) -> set[int]:
        """Return the steps to recompute in this segment; record the pages that it reads."""
        program, again = self._program, set[int]()
        waiting = list(part.steps)
        while waiting:
            now = waiting.pop()
            step = program.steps[now]
            assert isinstance(step, (RowOp, Reduction))
            gathered = [one for one in program.wholes(now) if one in program.rows]
            self._keep(*gathered)
            part.reads.update(gathered)
            for index in step.inputs:
                here = self._places.get(index)
                if here == place or index in again or index in part.reads:
                    continue
                if index in self._cheapest(index, place):
                    part.reads.add(index)
                    if here is not None:
                        self._keep(index)
                else:
                    again.add(index)
                    waiting.append(index)
        return again

    def _cheapest(self, index: int, place: int) -> set[int]:
        """Return the results to keep for a later use of this one: itself or its sources.

        The sources of cheap steps are chosen if they add no more bytes to what is kept anyway.
        """
        if index not in self._known:
            self._known[index] = self._found_cheapest(index, place)
        return self._known[index]

    def _found_cheapest(self, index: int, place: int) -> set[int]:
        program, step = self._program, self._program.steps.get(index)
        if index in self._pages or not isinstance(step, RowOp) or not self._is_cheap(index, step):
            return {index}
        if any(self._places.get(one, -1) >= place for one in step.wholes):
            return {index}
        sources: set[int] = set()
        for one in step.inputs:
            sources |= self._cheapest(one, place)
        new = (one for one in sources if one not in self._pages and one in self._places)
        return sources if sum(map(program.bytes_of, new)) <= program.bytes_of(index) else {index}

    def _is_cheap(self, index: int, step: RowOp) -> bool:
        if step.cheap or not self._again:
            return step.cheap
        return macs_per_element(self._program, self._program.graph.nodes[index]) <= self._again


def readers(segments: Sequence[Segment]) -> dict[int, list[int]]:
    """Return by page the positions of the segments that read it, in order."""
    found: dict[int, list[int]] = {}
    for place, part in enumerate(segments):
        for index in part.reads:
            found.setdefault(index, []).append(place)
    return found


def last_reads(segments: Sequence[Segment]) -> dict[int, set[int]]:
    """Return by segment position the pages that no later segment reads."""
    found: dict[int, set[int]] = {}
    for index, places in readers(segments).items():
        found.setdefault(places[-1], set()).add(index)
    return found
