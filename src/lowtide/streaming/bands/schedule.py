"""Which rows of which result are made in which band: decided before anything runs.

Bands of what a segment is to make are followed back to the rows of every result that they need.
Each row is made once: where bands overlap, what the next one needs is held until then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.reuse import Reuse
from lowtide.streaming.bands.rows import Reduction, RowOp, Rows
from lowtide.streaming.bands.segments import Segment
from lowtide.streaming.bands.spans import Span, Spans, common, outward, union, without


@dataclass
class Band:
    """What is done for one band, by result and in order.

    ``makes`` has the rows that are computed now, ``holds`` those that are kept for later bands
    after the last use (``uses``: by result the step that is the last to need it). ``targets`` has
    the rows of reductions and of the output that belong to this band; rows of pages are kept as
    soon as they are made. ``over`` names by result the one whose memory it may be put into.
    """

    makes: dict[int, Spans] = field(default_factory=dict)
    holds: dict[int, Spans] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    targets: dict[int, Spans] = field(default_factory=dict)
    reads: dict[int, Spans] = field(default_factory=dict)
    over: dict[int, int] = field(default_factory=dict)


def schedule(
    program: Program, segment: Segment, bands: int, *, first: int | None = None
) -> list[Band]:
    """The segment's sweep in so many bands, or fewer where rows do not suffice; of ``first``
    only that many, of which the last do not know what they leave to others."""
    plan = _Planner(program, segment)
    found = [plan.band(number, bands) for number in range(min(bands, first or bands))]
    plan.hold(found)
    return [band for band in found if band.makes or band.targets]


def units(program: Program, segment: Segment) -> int:
    """Into how many bands a segment can be cut of which each is whole windows, however large."""
    return min((-(-rows.size // rows.grain) for rows in rows_of(program, segment)), default=1)


def rows_of(program: Program, segment: Segment) -> Iterator[Rows]:
    """Of all that a segment makes or reduces."""
    for index in segment.steps:
        step = program.steps[index]
        if isinstance(step, (RowOp, Reduction)):
            yield step.rows


class _Planner:
    def __init__(self, program: Program, segment: Segment) -> None:
        self._program, self._segment = program, segment
        self._own = set(segment.steps)
        self._units = units(program, segment)
        self._reuse = Reuse(program.steps, segment.steps, program.families, (
            *segment.pages, *segment.reads, *program.graph.inputs, program.output,
        ))  # fmt: skip
        self._made: dict[int, Spans] = {}
        self._wanted: list[dict[int, Spans]] = []
        self._after: dict[int, int] = {}

    def band(self, number: int, bands: int) -> Band:
        """Rows that this band makes; those of former bands are there."""
        band = Band()
        wanted: dict[int, Spans] = defaultdict(list)
        kept: dict[int, Spans] = defaultdict(list)
        for index in self._targets():
            span = self._cut(index, number, bands)
            if span is None:
                continue
            if index in self._segment.pages:
                kept[index].append(span)
            else:
                band.targets[index] = [span]
                for one in self._seen_by(index):
                    wanted[one].append(span)
        for index in reversed(self._segment.steps):
            step = self._program.steps[index]
            asked = [*wanted.get(index, ()), *kept.get(index, ())]
            if not isinstance(step, RowOp) or not asked:
                continue
            rows = self._program.rows[index]
            made = self._made.get(index, [])
            new = without(outward(asked, rows.grain, rows.size), made)
            if not new:
                continue
            band.makes[index] = new
            self._made[index] = union([*made, *new])
            for span in new:
                for one, spans in zip(step.inputs, step.needed(span), strict=True):
                    wanted[one].extend(spans)
        self._wanted.append({index: union(spans) for index, spans in wanted.items()})
        for index, spans in self._wanted[-1].items():
            if index not in self._own:
                band.reads[index] = spans
        return band

    def hold(self, bands: list[Band]) -> None:
        """Add what each band leaves to the next ones, and when the rest can go."""
        made: list[dict[int, Spans]] = []
        known: dict[int, Spans] = {}
        for band in bands:
            for index, spans in band.makes.items():
                known[index] = union([*known.get(index, []), *spans])
            made.append(dict(known))
        later: dict[int, Spans] = {}
        for number in range(len(bands) - 1, -1, -1):
            band = bands[number]
            band.holds = {
                index: held for index, spans in made[number].items()
                if (held := common(spans, later.get(index, [])))
            }  # fmt: skip
            band.uses = self._last_uses(band)
            band.over = self._reuse.of(band.makes, band.uses, band.holds)
            for index, spans in self._wanted[number].items():
                later[index] = union([*later.get(index, []), *spans])

    def _targets(self) -> list[int]:
        reductions = [
            index for index in self._segment.steps
            if isinstance(self._program.steps[index], Reduction)
        ]  # fmt: skip
        output = [self._program.output] if self._program.output in self._own else []
        return [*reductions, *(one for one in self._segment.pages if one not in output), *output]

    def _seen_by(self, index: int) -> tuple[int, ...]:
        step = self._program.steps[index]
        return step.inputs if isinstance(step, Reduction) else (index,)

    def _cut(self, index: int, number: int, bands: int) -> Span | None:
        """The band's rows of a target: as nearly equal parts as its grain allows, cut where the
        coarsest grain is if there are as many of that."""
        step = self._program.steps[index]
        rows = step.rows if isinstance(step, Reduction) else self._program.rows[index]
        grains = -(-rows.size // rows.grain)
        parts = self._units if bands <= self._units else grains
        first, last = (
            min(rows.size, round(grains * round(parts * part / bands) / parts) * rows.grain)
            for part in (number, number + 1)
        )
        return (first, last) if first < last else None

    def _last_uses(self, band: Band) -> dict[int, int]:
        """By result the last step of this band that takes rows of it."""
        uses: dict[int, int] = {}
        for index in self._segment.steps:
            step = self._program.steps[index]
            active = band.makes if isinstance(step, RowOp) else band.targets
            if index in active and isinstance(step, (RowOp, Reduction)):
                uses.update(dict.fromkeys(step.inputs, index))
        return uses


def later_reads(bands: list[Band]) -> list[dict[int, Spans]]:
    """For each band the rows of pages that the ones after it read."""
    later: dict[int, Spans] = {}
    found = []
    for band in reversed(bands):
        found.append(dict(later))
        for index, spans in band.reads.items():
            later[index] = union([*later.get(index, []), *spans])
    return found[::-1]
