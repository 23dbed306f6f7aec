"""How much memory a run by bands takes at once, told without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.streaming.bands.program import Program
from lowtide.streaming.bands.rows import Reduction, RowOp
from lowtide.streaming.bands.schedule import Band, later_reads, schedule
from lowtide.streaming.bands.segments import Segment, last_reads
from lowtide.streaming.bands.spans import Span, Spans, common, count


@dataclass(frozen=True)
class Weight:
    """``rows_bytes``: the most that bands and pages occupy at once; ``bands_bytes`` without
    pages, ``pages_bytes`` pages alone, ``written_bytes`` all pages one after another. ``calls``
    is how often an operator is run."""

    rows_bytes: int
    bands_bytes: int
    pages_bytes: int
    written_bytes: int
    calls: int


def weigh(program: Program, segments: Sequence[Segment], bands: Sequence[int]) -> Weight:
    """For this many bands of each segment. What operators take for themselves is not in it, nor
    are the input and the result."""
    scale = _Scale(program)
    last = last_reads(segments)
    for place, (part, number) in enumerate(zip(segments, bands, strict=True)):
        scale.segment(part, schedule(program, part, number), last.get(place, set()))
    return Weight(scale.most, scale.most_bands, scale.most_pages, scale.written, scale.calls)


def band_bytes(program: Program, part: Segment, bands: int) -> int:
    """What the bands of one segment take, pages left out."""
    scale = _Scale(program)
    scale.segment(part, schedule(program, part, bands), set())
    return scale.most_bands


class _Scale:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._held: dict[int, int] = {}
        self._pages: dict[int, Spans] = {}
        self._bands_now = self._pages_now = 0
        self.most = self.most_bands = self.most_pages = self.written = self.calls = 0

    def segment(self, part: Segment, bands: list[Band], going: set[int]) -> None:
        """A whole sweep; pages that nothing reads after it go as it reads them."""
        self._held, self._bands_now = {}, 0
        kept = set(part.pages) - {self._program.output}
        gathered = sum(
            self._program.bytes_of(one)
            for index in (*part.steps, *part.before) for one in self._program.wholes(index)
            if one in self._program.rows
        )  # fmt: skip
        self._bands_now = gathered
        for band, needed in zip(bands, later_reads(bands), strict=True):
            self._band(part, band, kept)
            for index in going & self._pages.keys():
                left = common(self._pages[index], needed.get(index, []))
                self._page(index, left)
        for index in going:
            self._page(index, [])

    def _band(self, part: Segment, band: Band, kept: set[int]) -> None:
        ends = self._ends(band)
        for index in part.steps:
            step = self._program.steps[index]
            spans = band.makes.get(index)
            if spans is not None and isinstance(step, RowOp):
                self.calls += len(spans)
                for span in spans:
                    self._run(index, step, span, band)
                if index in kept:
                    self.written += count(spans) * self._program.row_bytes(index)
                    self._page(index, [*self._pages.get(index, []), *spans])
                elif not step.view:
                    self._add(index, count(spans) * self._program.row_bytes(index))
                if _base(self._program, index) not in ends[1]:
                    ends[0].setdefault(index, []).append(index)
            elif index not in band.targets:
                continue
            for one in ends[0].get(index, ()):
                if one in self._held:
                    left = count(band.holds.get(one, [])) * self._program.row_bytes(one)
                    self._add(one, left - self._held[one])

    def _ends(self, band: Band) -> tuple[dict[int, list[int]], set[int]]:
        """By step the results whose memory nothing takes after it, and all such results."""
        last: dict[int, int] = {}
        for index, user in band.uses.items():
            base = _base(self._program, index)
            last[base] = max(user, last.get(base, user))
        ends: dict[int, list[int]] = {}
        for index, user in last.items():
            ends.setdefault(user, []).append(index)
        return ends, set(last)

    def _run(self, index: int, step: RowOp, span: Span, band: Band) -> None:
        """What one call takes beside what is held: its result, scratch, and rows put together."""
        result = 0 if step.view else (span[1] - span[0]) * self._program.row_bytes(index)
        given, copied = 0, 0
        for one, spans in zip(step.inputs, step.needed(span), strict=True):
            size = count(spans) * self._program.row_bytes(one)
            given += size
            # Made just now and as it is wanted, or put together from pieces.
            copied += 0 if spans == band.makes.get(one) else size
        if step.framed and (span[0] == 0) != (span[1] == step.rows.size):
            copied += given
        taken = result + copied + int(step.scratch * (given + result)) + step.scratch_bytes
        self.most_bands = max(self.most_bands, self._bands_now + taken)
        self.most = max(self.most, self._bands_now + self._pages_now + taken)

    def _page(self, index: int, spans: Spans) -> None:
        size = self._program.row_bytes(index) if index in self._program.steps else 0
        before = count(self._pages.get(index, [])) * size
        self._pages[index] = spans
        self._pages_now += count(spans) * size - before
        self._note()

    def _add(self, index: int, more: int) -> None:
        self._held[index] = self._held.get(index, 0) + more
        self._bands_now += more
        self._note()

    def _note(self) -> None:
        self.most_bands = max(self.most_bands, self._bands_now)
        self.most_pages = max(self.most_pages, self._pages_now)
        self.most = max(self.most, self._bands_now + self._pages_now)


def _base(program: Program, index: int) -> int:
    """The result whose memory a view is."""
    step = program.steps.get(index)
    while isinstance(step, RowOp) and step.view:
        index = step.inputs[0]
        step = program.steps.get(index)
    return index


def crossing(program: Program) -> dict[int, int]:
    """Bytes of results with rows that are made before each step and needed by it or later."""
    last: dict[int, int] = {}
    order = {index: at for at, index in enumerate(program.steps)}
    for index, step in program.steps.items():
        if isinstance(step, (RowOp, Reduction)):
            for one in step.inputs:
                last[_base(program, one)] = order[index]
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
