"""Schedule of bands: which rows of which result each band computes and holds.

Bands of a segment's outputs are followed back to the rows of every result that they need (their
receptive field). Each row is computed once: where bands overlap, rows that the next one needs are
held until then. Bands are scheduled in two passes. The first only finds the last band that reads
each row, since the full schedule of a tall image, thousands of bands, would take more memory than
the narrow bands that run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import ProgramSegment
from lowtide.streaming.rules.rule import Reduction, RowAxis, RowOp
from lowtide.streaming.spans import Span, Spans, align_outward, subtract_spans, union_spans


@dataclass
class BandSchedule:
    """Schedule of one band: rows to compute, to hold and to read, by result.

    Attributes:
        computed: Rows that the band computes.
        held: Rows kept for later bands after the last use.
        last_uses: The last step of the band that reads the result.
        targets: Rows of reductions and of the output that belong to this band; rows of pages are
            written as soon as they are computed.
        reads: Rows of pages that the band reads.
        later_reads: Rows of pages that later bands read.
    """

    computed: dict[int, Spans] = field(default_factory=dict)
    held: dict[int, Spans] = field(default_factory=dict)
    last_uses: dict[int, int] = field(default_factory=dict)
    targets: dict[int, Spans] = field(default_factory=dict)
    reads: dict[int, Spans] = field(default_factory=dict)
    later_reads: dict[int, Spans] = field(default_factory=dict)


def schedule_bands(
    program: StreamProgram, segment: ProgramSegment, bands: int, *, first: int | None = None
) -> Iterator[BandSchedule]:
    """Yield the schedule of a segment, band by band.

    Args:
        program: Program of the segment.
        segment: Segment to schedule.
        bands: Number of bands; fewer are made if there are fewer grains of rows.
        first: Yield only this many bands, of which the last do not know what later bands need.
    """
    band_indices = range(min(bands, first or bands))
    last_reads = _LastReads(program)
    scheduler = _BandScheduler(program, segment, last_reads)
    for band_index in band_indices:
        last_reads.record(band_index, scheduler.band(band_index, bands)[1])
    scheduler.start_second_pass()
    for band_index in band_indices:
        band, _ = scheduler.band(band_index, bands)
        scheduler.set_lifetimes(band_index, band)
        if band.computed or band.targets:
            yield band


def max_bands(program: StreamProgram, segment: ProgramSegment) -> int:
    """Return the largest number of bands of a segment.

    Each band has at least one whole grain (row of windows) of every result.
    """
    return min((-(-rows.size // rows.grain) for rows in rows_of(program, segment)), default=1)


def rows_of(program: StreamProgram, segment: ProgramSegment) -> Iterator[RowAxis]:
    """Yield the row axis of each result that a segment computes or reduces."""
    for index in segment.steps:
        step = program.steps[index]
        if isinstance(step, (RowOp, Reduction)):
            yield step.rows


class _LastReads:
    """Last band that reads each row, by result."""

    def __init__(self, program: StreamProgram) -> None:
        self._rows = program.rows
        self._last: dict[int, LastUseMap] = {}

    def record(self, band_index: int, rows_read: dict[int, Spans]) -> None:
        """Record the rows that a band reads; call for all bands in order."""
        for index, spans in rows_read.items():
            if index not in self._last:
                self._last[index] = LastUseMap(self._rows[index].size)
            for span in spans:
                self._last[index].put(span, band_index)

    def read_after(self, band_index: int, index: int, spans: Spans | None = None) -> Spans:
        """Return which of these rows, or of all, bands after ``band_index`` read."""
        last = self._last.get(index)
        if last is None:
            return []
        among = [(0, last.size)] if spans is None else spans
        return [found for span in among for found in last.above(span, band_index)]


class _BandScheduler:
    """Scheduler of the bands of one segment, in order."""

    def __init__(
        self, program: StreamProgram, segment: ProgramSegment, last_reads: _LastReads
    ) -> None:
        self._program, self._segment, self._last_reads = program, segment, last_reads
        self._segment_steps = set(segment.steps)
        self._max_bands = max_bands(program, segment)
        self._computed: dict[int, Spans] = {}
        self._held: dict[int, Spans] = {}

    def start_second_pass(self) -> None:
        """Start a second pass at the first band."""
        self._computed.clear()

    def band(self, band_index: int, bands: int) -> tuple[BandSchedule, dict[int, Spans]]:
        """Return the rows that this band computes, and all rows that it reads."""
        band = BandSchedule()
        wanted: dict[int, Spans] = defaultdict(list)
        page_rows: dict[int, Spans] = defaultdict(list)
        for index in self._targets():
            span = self._target_span(index, band_index, bands)
            if span is None:
                continue
            if index in self._segment.pages:
                page_rows[index].append(span)
            if index in self._segment.outputs or index not in self._segment.pages:
                band.targets[index] = [span]
                for one in self._results_read_by(index):
                    wanted[one].append(span)
        for index in reversed(self._segment.steps):
            step = self._program.steps[index]
            requested = [*wanted.get(index, ()), *page_rows.get(index, ())]
            if not isinstance(step, RowOp) or not requested:
                continue
            rows = self._program.rows[index]
            computed = self._computed.get(index, [])
            aligned = align_outward(requested, rows.grain, rows.size)
            new = subtract_spans(aligned, computed)
            if not new:
                continue
            band.computed[index] = new
            self._computed[index] = union_spans([*computed, *new])
            for span in new:
                for one, spans in zip(step.inputs, step.input_spans(span), strict=True):
                    wanted[one].extend(spans)
        rows_read = {index: union_spans(spans) for index, spans in wanted.items()}
        band.reads = {
            index: spans for index, spans in rows_read.items() if index not in self._segment_steps
        }
        return band, rows_read

    def set_lifetimes(self, band_index: int, band: BandSchedule) -> None:
        """Add to a band the rows held for later bands, and the last uses of the others."""
        available = dict(self._held)
        for index, spans in band.computed.items():
            available[index] = union_spans([*available.get(index, []), *spans])
        read_after = self._last_reads.read_after
        band.held = self._held = {
            index: held
            for index, spans in available.items()
            if (held := read_after(band_index, index, spans))
        }
        band.last_uses = self._last_uses(band)
        band.later_reads = {
            index: left for index in self._segment.reads if (left := read_after(band_index, index))
        }

    def _targets(self) -> list[int]:
        reductions = [
            index
            for index in self._segment.steps
            if isinstance(self._program.steps[index], Reduction)
        ]
        outputs = self._segment.outputs
        return [*reductions, *(one for one in self._segment.pages if one not in outputs), *outputs]

    def _results_read_by(self, index: int) -> tuple[int, ...]:
        step = self._program.steps[index]
        return step.inputs if isinstance(step, Reduction) else (index,)

    def _target_span(self, index: int, band_index: int, bands: int) -> Span | None:
        """Return a band's rows of a target: nearly equal parts, in whole grains.

        Cuts are at multiples of the coarsest grain of the segment if there are enough of these.
        """
        step = self._program.steps[index]
        rows = step.rows if isinstance(step, Reduction) else self._program.rows[index]
        grains = -(-rows.size // rows.grain)
        parts = self._max_bands if bands <= self._max_bands else grains
        first, last = (
            min(rows.size, round(grains * round(parts * part / bands) / parts) * rows.grain)
            for part in (band_index, band_index + 1)
        )
        return (first, last) if first < last else None

    def _last_uses(self, band: BandSchedule) -> dict[int, int]:
        """Return by result the last step of this band that reads its rows."""
        last_uses: dict[int, int] = {}
        for index in self._segment.steps:
            step = self._program.steps[index]
            active = band.computed if isinstance(step, RowOp) else band.targets
            if index in active and isinstance(step, (RowOp, Reduction)):
                last_uses.update(dict.fromkeys(step.inputs, index))
        return last_uses


class LastUseMap:
    """Last number put at each of ``size`` rows, -1 at first; stored as runs.

    Only runs of equal numbers are stored, since there may be a million rows.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # First row and number of each run; a run ends where the next one starts.
        self._starts, self._numbers = array("q", [0]), array("q", [-1])

    def put(self, span: Span, number: int) -> None:
        """Set the number of all rows of ``span``, which must not be empty."""
        first, last = span
        starts, numbers = self._starts, self._numbers
        low, high = bisect_left(starts, first), bisect_left(starts, last)
        new_starts, new_numbers = [first], [number]
        if last < self.size and (high == len(starts) or starts[high] != last):
            # keep the rest of the run that extends beyond the end
            new_starts.append(last)
            new_numbers.append(numbers[high - 1])
        starts[low:high] = array("q", new_starts)
        numbers[low:high] = array("q", new_numbers)

    def above(self, span: Span, number: int) -> Spans:
        """Return the spans of rows within ``span`` whose number is larger than ``number``."""
        first, last = span
        low = bisect_right(self._starts, first) - 1
        high = bisect_left(self._starts, last, low)
        if high - low == 1:  # nearly always
            return [span] if self._numbers[low] > number else []
        larger = np.frombuffer(self._numbers, np.int64)[low:high] > number
        edges = np.flatnonzero(np.diff(larger, prepend=False, append=False)) + low
        rows = [max(self._starts[at], first) if at < high else last for at in edges]
        return list(zip(rows[::2], rows[1::2], strict=True))
