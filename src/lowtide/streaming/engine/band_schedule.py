"""Schedule of bands: which rows of which result each band computes and holds.

Bands of a segment's outputs are followed back to the rows of every result that they need (their
receptive field). Each row is computed once: where bands overlap, rows that the next one needs are
held until then, or, for a few results on a GPU, computed again. Bands are scheduled in two passes.
The first only finds the last band that reads each row, since the full schedule of a tall image,
thousands of bands, would take more memory than the narrow bands that run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from lowtide.streaming.engine.buffer_reuse import BufferReuse
from lowtide.streaming.engine.halo_recompute import recomputed_results
from lowtide.streaming.engine.last_use import LastUseMap
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.rules.row_op import Reduction, RowAxis, RowOp
from lowtide.streaming.spans import Span, Spans, count, outward, union, without


@dataclass
class Band:
    """Schedule of one band: rows to compute, to hold and to read, by result.

    Attributes:
        makes: Rows that the band computes.
        holds: Rows kept for later bands after the last use.
        uses: The last step of the band that reads the result.
        targets: Rows of reductions and of the output that belong to this band; rows of pages are
            written as soon as they are computed.
        reads: Rows of pages that the band reads.
        leaves: Rows of pages that later bands read.
        over: The input whose memory the result may be written into.
        joined: Results whose new rows are read together with held ones.
        again: Number of rows that a former band computed too.
    """

    makes: dict[int, Spans] = field(default_factory=dict)
    holds: dict[int, Spans] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    targets: dict[int, Spans] = field(default_factory=dict)
    reads: dict[int, Spans] = field(default_factory=dict)
    leaves: dict[int, Spans] = field(default_factory=dict)
    over: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    again: dict[int, int] = field(default_factory=dict)


def schedule_bands(
    program: StreamProgram, segment: Segment, bands: int, *, first: int | None = None
) -> Iterator[Band]:
    """Yield the schedule of a segment, band by band.

    Args:
        program: Program of the segment.
        segment: Segment to schedule.
        bands: Number of bands; fewer are made if there are fewer grains of rows.
        first: Yield only this many bands, of which the last do not know what later bands need.
    """
    numbers = range(min(bands, first or bands))
    last = _LastTaken(program)
    plan = _Planner(program, segment, last, recomputed_results(program, segment, bands))
    for number in numbers:
        last.note(number, plan.band(number, bands)[1])
    plan.restart()
    for number in numbers:
        band, _ = plan.band(number, bands)
        plan.hold(number, band)
        if band.makes or band.targets:
            yield band


def max_bands(program: StreamProgram, segment: Segment) -> int:
    """Return the largest number of bands of a segment.

    Each band has at least one whole grain (row of windows) of every result.
    """
    return min((-(-rows.size // rows.grain) for rows in rows_of(program, segment)), default=1)


def rows_of(program: StreamProgram, segment: Segment) -> Iterator[RowAxis]:
    """Yield the row axis of each result that a segment computes or reduces."""
    for index in segment.steps:
        step = program.steps[index]
        if isinstance(step, (RowOp, Reduction)):
            yield step.rows


class _LastTaken:
    """Last band that reads each row, by result."""

    def __init__(self, program: StreamProgram) -> None:
        self._rows = program.rows
        self._last: dict[int, LastUseMap] = {}

    def note(self, number: int, wanted: dict[int, Spans]) -> None:
        """Record the rows that a band reads; call for all bands in order."""
        for index, spans in wanted.items():
            if index not in self._last:
                self._last[index] = LastUseMap(self._rows[index].size)
            for span in spans:
                self._last[index].put(span, number)

    def after(self, number: int, index: int, spans: Spans | None = None) -> Spans:
        """Return which of these rows, or of all, bands after ``number`` read."""
        last = self._last.get(index)
        if last is None:
            return []
        among = [(0, last.size)] if spans is None else spans
        return [found for span in among for found in last.above(span, number)]


class _Planner:
    """Scheduler of the bands of one segment, in order."""

    def __init__(
        self, program: StreamProgram, segment: Segment, last: _LastTaken, twice: frozenset[int]
    ) -> None:
        self._program, self._segment, self._last = program, segment, last
        self._twice = twice
        self._own = set(segment.steps)
        self._units = max_bands(program, segment)
        self._reuse = BufferReuse(
            program.steps,
            segment.steps,
            program.families,
            (
                *segment.pages,
                *segment.reads,
                *program.graph.inputs,
                program.output,
            ),
        )
        self._made: dict[int, Spans] = {}
        self._held: dict[int, Spans] = {}

    def restart(self) -> None:
        """Start a second pass at the first band."""
        self._made.clear()

    def band(self, number: int, bands: int) -> tuple[Band, dict[int, Spans]]:
        """Return the rows that this band computes, and all rows that it reads."""
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
            whole = outward(asked, rows.grain, rows.size)
            new = without(whole, made)
            if index in self._twice and whole != new:
                band.again[index] = count(whole) - count(new)
                new = whole
            if not new:
                continue
            band.makes[index] = new
            if any(low < new[0][0] < high for low, high in asked):
                band.joined.add(index)
            self._made[index] = union([*made, *new])
            for span in new:
                for one, spans in zip(step.inputs, step.needed(span), strict=True):
                    wanted[one].extend(spans)
        taken = {index: union(spans) for index, spans in wanted.items()}
        band.reads = {index: spans for index, spans in taken.items() if index not in self._own}
        return band, taken

    def hold(self, number: int, band: Band) -> None:
        """Add to a band the rows held for later bands, and the last uses of the others."""
        there = dict(self._held)
        for index, spans in band.makes.items():
            there[index] = union([*there.get(index, []), *spans])
        after = self._last.after
        band.holds = self._held = {
            index: held
            for index, spans in there.items()
            if index not in self._twice and (held := after(number, index, spans))
        }
        band.uses = self._last_uses(band)
        band.over = self._reuse.of(band.makes, band.uses, band.holds)
        band.leaves = {
            index: left for index in self._segment.reads if (left := after(number, index))
        }

    def _targets(self) -> list[int]:
        reductions = [
            index
            for index in self._segment.steps
            if isinstance(self._program.steps[index], Reduction)
        ]
        output = [self._program.output] if self._program.output in self._own else []
        return [*reductions, *(one for one in self._segment.pages if one not in output), *output]

    def _seen_by(self, index: int) -> tuple[int, ...]:
        step = self._program.steps[index]
        return step.inputs if isinstance(step, Reduction) else (index,)

    def _cut(self, index: int, number: int, bands: int) -> Span | None:
        """Return a band's rows of a target: nearly equal parts, in whole grains.

        Cuts are at multiples of the coarsest grain of the segment if there are enough of these.
        """
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
        """Return by result the last step of this band that reads its rows."""
        uses: dict[int, int] = {}
        for index in self._segment.steps:
            step = self._program.steps[index]
            active = band.makes if isinstance(step, RowOp) else band.targets
            if index in active and isinstance(step, (RowOp, Reduction)):
                uses.update(dict.fromkeys(step.inputs, index))
        return uses
