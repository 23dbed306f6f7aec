"""Cutting a program into segments: sweeps over the rows, between which maps are kept as pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowtide.streaming.bands.program import Program, Whole
from lowtide.streaming.bands.rows import Reduction, RowOp


@dataclass
class Segment:
    """One sweep: ``before`` it steps on whole tensors, then ``steps`` band by band.

    ``pages`` are results that it keeps for later segments; ``reads`` are pages of earlier ones.
    A step that is cheap may be in several segments.
    """

    before: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)


def segment(program: Program, cuts: Iterable[int] = ()) -> list[Segment]:
    """Segments in order, cut where something is needed as a whole, and before each of ``cuts``."""
    places = _places(program, set(cuts))
    segments = [Segment() for _ in range(max(places.values(), default=0) + 1)]
    for index, place in places.items():
        step = program.steps[index]
        (segments[place].before if isinstance(step, Whole) else segments[place].steps).append(index)
    _choose_pages(program, segments, places)
    return segments


def _places(program: Program, cuts: set[int]) -> dict[int, int]:
    """The segment of each step, as early as the order of the graph allows."""
    places: dict[int, int] = {}
    now, not_yet = 0, set[int]()
    for index, step in program.steps.items():
        if index in cuts or not_yet.intersection(program.wholes(index)):
            now, not_yet = now + 1, set()
        places[index] = now
        if not isinstance(step, Whole):
            # Whole at the end of this segment: what is reduced, and rows if they are gathered.
            not_yet.add(index)
    return places


def _choose_pages(program: Program, segments: list[Segment], places: dict[int, int]) -> None:
    """Pages for what later segments need; cheap steps are run again where that keeps less."""
    pages: set[int] = set()
    order = {index: at for at, index in enumerate(program.steps)}
    for place in range(len(segments) - 1, -1, -1):
        part = segments[place]
        for index in part.before:
            for needed in program.wholes(index):
                if needed in program.rows:
                    pages.add(needed)
                    part.reads.add(needed)
        again = _needed(program, part, place, places, pages)
        part.steps = sorted({*part.steps, *again}, key=order.__getitem__)
    for index in sorted(pages):
        if index in places:
            segments[places[index]].pages.append(index)


def _needed(
    program: Program, part: Segment, place: int, places: dict[int, int], pages: set[int]
) -> set[int]:
    """Steps to run again in this segment; adds to ``pages`` what is kept instead."""
    again: set[int] = set()
    waiting = list(part.steps)
    while waiting:
        now = waiting.pop()
        step = program.steps[now]
        assert isinstance(step, (RowOp, Reduction))
        gathered = [one for one in program.wholes(now) if one in program.rows]
        pages.update(gathered)
        part.reads.update(gathered)
        for index in step.inputs:
            here = places.get(index)
            if here == place or index in again or index in part.reads:
                continue
            kept = _cheapest(program, index, place, places, pages)
            if index in kept:
                part.reads.add(index)
                if here is not None:
                    pages.add(index)
            else:
                again.add(index)
                waiting.append(index)
    return again


def _cheapest(
    program: Program, index: int, place: int, places: dict[int, int], pages: set[int]
) -> set[int]:
    """What to keep so that a result can be had in a later segment: itself, or what it is
    cheaply made of, whichever is less to keep beside what is kept anyway."""
    step = program.steps.get(index)
    if index in pages or not isinstance(step, RowOp) or not step.cheap:
        return {index}
    if any(places.get(one, -1) >= place for one in step.wholes):
        return {index}
    sources: set[int] = set()
    for one in step.inputs:
        sources |= _cheapest(program, one, place, places, pages)
    more = sum(program.bytes_of(one) for one in sources if one not in pages and one in places)
    return sources if more <= program.bytes_of(index) else {index}


def last_reads(segments: Sequence[Segment]) -> dict[int, set[int]]:
    """By the place of a segment the pages that no later one reads."""
    last = {index: place for place, part in enumerate(segments) for index in part.reads}
    found: dict[int, set[int]] = {}
    for index, place in last.items():
        found.setdefault(place, set()).add(index)
    return found
