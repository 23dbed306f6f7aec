"""Cutting of a program into segments: sweeps over the rows with pages in between."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lowtide.streaming.engine.program import FullTensorOp, StreamProgram
from lowtide.streaming.rules.rule import Reduction, RowOp


@dataclass
class ProgramSegment:
    """One sweep over the rows: ``full_steps`` on whole tensors, then ``steps`` by bands.

    ``pages`` are results kept for later segments; ``reads`` are pages of earlier ones; ``outputs``
    are results of the program. A cheap step may be in several segments, where it is computed again.
    """

    full_steps: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)


def cut_segments(program: StreamProgram, cuts: Iterable[int] = ()) -> list[ProgramSegment]:
    """Cut a program into segments, in order.

    Cuts are where a result is needed as a whole, and before each of ``cuts``.

    Args:
        program: Program to cut.
        cuts: Node indices of steps that begin a segment.
    """
    segment_of = _assign_segments(program, set(cuts))
    segments = [ProgramSegment() for _ in range(max(segment_of.values(), default=0) + 1)]
    for index, segment_index in segment_of.items():
        step = program.steps[index]
        (
            segments[segment_index].full_steps
            if isinstance(step, FullTensorOp)
            else segments[segment_index].steps
        ).append(index)
    for index in program.outputs:
        if index in program.rows:
            segments[segment_of[index]].outputs.append(index)
    _Pages(program, segment_of).choose(segments)
    return segments


def _assign_segments(program: StreamProgram, cuts: set[int]) -> dict[int, int]:
    """Return the segment of each step, as early as the order of the graph allows.

    Whole-tensor steps come before the segment in which their inputs are ready. They do not end a
    segment, since later steps that do not need them may still belong to it.
    """
    segment_of: dict[int, int] = {}

    def there(index: int) -> int:
        """Return the first segment in which a result is complete."""
        place = segment_of.get(index)
        if place is None:
            return 0
        return place if isinstance(program.steps[index], FullTensorOp) else place + 1

    now = 0
    for index, step in program.steps.items():
        now += index in cuts
        needed = max(map(there, program.full_inputs(index)), default=0)
        if isinstance(step, FullTensorOp):
            segment_of[index] = needed
        else:
            segment_of[index] = now = max(now, needed)
    return segment_of


class _Pages:
    """Choice of pages that later segments read; recomputes cheap steps to keep less."""

    def __init__(self, program: StreamProgram, segment_of: dict[int, int]) -> None:
        self._program, self._segment_of = program, segment_of
        self._pages: set[int] = set()
        # Cheapest sources of a result in the current segment, valid until a page is added: in dense
        # blocks millions of paths lead to the same results.
        self._cheapest_sources: dict[int, set[int]] = {}

    def choose(self, segments: list[ProgramSegment]) -> None:
        """Fill in the pages, reads and recomputed steps of each segment."""
        order = {index: at for at, index in enumerate(self._program.steps)}
        for segment_index in range(len(segments) - 1, -1, -1):
            segment = segments[segment_index]
            self._cheapest_sources.clear()
            for index in segment.full_steps:
                for needed in self._program.full_inputs(index):
                    if needed in self._program.rows:
                        self._add_pages(needed)
                        segment.reads.add(needed)
            recomputed = self._choose_recomputed(segment, segment_index)
            segment.steps = sorted({*segment.steps, *recomputed}, key=order.__getitem__)
        for index in sorted(self._pages):
            if index in self._segment_of:
                segments[self._segment_of[index]].pages.append(index)

    def _add_pages(self, *indices: int) -> None:
        if not self._pages.issuperset(indices):
            self._pages.update(indices)
            self._cheapest_sources.clear()

    def _choose_recomputed(self, segment: ProgramSegment, segment_index: int) -> set[int]:
        """Return the steps to recompute in this segment; record the pages that it reads."""
        program, recomputed = self._program, set[int]()
        waiting = list(segment.steps)
        while waiting:
            now = waiting.pop()
            step = program.steps[now]
            assert isinstance(step, (RowOp, Reduction))
            gathered = [one for one in program.full_inputs(now) if one in program.rows]
            self._add_pages(*gathered)
            segment.reads.update(gathered)
            for index in step.inputs:
                here = self._segment_of.get(index)
                if here == segment_index or index in recomputed or index in segment.reads:
                    continue
                if index in self._cheapest(index, segment_index):
                    segment.reads.add(index)
                    if here is not None:
                        self._add_pages(index)
                else:
                    recomputed.add(index)
                    waiting.append(index)
        # What another step takes whole is a page by now.
        return recomputed - segment.reads

    def _cheapest(self, index: int, segment_index: int) -> set[int]:
        """Return the results to keep for a later use of this one: itself or its sources.

        The sources of cheap steps are chosen if they add no more bytes to what is kept anyway.
        """
        if index not in self._cheapest_sources:
            self._cheapest_sources[index] = self._find_cheapest(index, segment_index)
        return self._cheapest_sources[index]

    def _find_cheapest(self, index: int, segment_index: int) -> set[int]:
        program, step = self._program, self._program.steps.get(index)
        if index in self._pages or not isinstance(step, RowOp) or not step.cheap:
            return {index}
        if any(self._segment_of.get(one, -1) >= segment_index for one in step.full_inputs):
            return {index}
        sources: set[int] = set()
        for one in step.inputs:
            sources |= self._cheapest(one, segment_index)
        new = (one for one in sources if one not in self._pages and one in self._segment_of)
        return sources if sum(map(program.bytes_of, new)) <= program.bytes_of(index) else {index}


def page_readers(segments: Sequence[ProgramSegment]) -> dict[int, list[int]]:
    """Return by page the positions of the segments that read it, in order."""
    found: dict[int, list[int]] = {}
    for place, part in enumerate(segments):
        for index in part.reads:
            found.setdefault(index, []).append(place)
    return found


def last_reads(segments: Sequence[ProgramSegment]) -> dict[int, set[int]]:
    """Return by segment position the pages that no later segment reads."""
    found: dict[int, set[int]] = {}
    for index, segment_indices in page_readers(segments).items():
        found.setdefault(segment_indices[-1], set()).add(index)
    return found


class CutFinder:
    """Finds cuts before steps where fewer bytes are live than around them."""

    def __init__(self, program: StreamProgram) -> None:
        self._bytes = _live_bytes(program)
        self._work, total = dict[int, int](), 0
        for index, step in program.steps.items():
            total += program.bytes_of(index) if isinstance(step, RowOp) and not step.view else 0
            self._work[index] = total
        self._total = total

    @cached_property
    def candidates(self) -> list[int]:
        """Steps before which a cut keeps fewer live bytes than around them."""
        steps = list(self._bytes)
        return [
            step
            for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
            if self._bytes[before] >= self._bytes[step] < self._bytes[after]
        ]

    def cuts(self, parts: int) -> tuple[int, ...]:
        """Return cuts into about ``parts`` segments of equal work, at few live bytes."""
        at = [self._work[place] for place in self.candidates]
        cuts = set()
        for part in range(1, parts):
            middle, half_width = self._total * part / parts, self._total / parts / 2
            near = self.candidates[
                bisect.bisect_left(at, middle - half_width) : bisect.bisect_right(
                    at, middle + half_width
                )
            ]
            if near:
                cuts.add(self._best(near, middle))
        return tuple(sorted(cuts))

    def _best(self, places: Sequence[int], middle: float) -> int:
        return min(places, key=lambda place: (self._bytes[place], abs(self._work[place] - middle)))


def _live_bytes(program: StreamProgram) -> dict[int, int]:
    """Return, by step, the bytes of row results made before it and needed from it on."""
    last: dict[int, int] = {}
    order = {index: at for at, index in enumerate(program.steps)}
    for index, step in program.steps.items():
        if isinstance(step, (RowOp, Reduction)):
            for one in step.inputs:
                last[program.view_base(one)] = order[index]
    change = [0] * (len(order) + 1)
    for index, until in last.items():
        made = order.get(index)
        if made is not None and made < until:
            size = program.bytes_of(index)
            change[made + 1] += size
            change[until + 1] -= size
    found, total = {}, 0
    for index, at in order.items():
        total += change[at]
        found[index] = total
    return found
