"""Rough cost of a layout: its segments by their numbers of bands, and its pages by their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.memory.plan_store import JsonCacheTable
from lowtide.streaming.engine.band_schedule import BandSchedule, max_bands, rows_of, schedule_bands
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import ProgramSegment, page_readers
from lowtide.streaming.rules.rule import RowOp
from lowtide.streaming.spans import Span, count_rows

# Bands that the estimate counts, and further bands that must be scheduled to know what these keep.
_COUNTED_BANDS, _LOOKAHEAD_BANDS = 5, 2
# Bands of a single segment fill their cap except for one part in this many.
_FILL_TOLERANCE = 16
# Four times the bands must shrink the peak to this share, or the search ends.
_MIN_IMPROVEMENT = 0.8


def estimate_segment(
    program: StreamProgram, segment: ProgramSegment, bands: int
) -> tuple[int, int, int]:
    """Estimate the cost of one segment in ``bands`` bands, without pages.

    Extrapolated from the first bands; later ones are much alike. A long segment has thousands of
    operators, and scheduling all bands for every candidate height took a minute.

    Returns:
        (peak bytes of the bands, operator calls, bytes copied for them).
    """
    scale = _LiveBytes(program)
    plan = list(schedule_bands(program, segment, bands, first=_COUNTED_BANDS + _LOOKAHEAD_BANDS))[
        :_COUNTED_BANDS
    ]
    scale.segment(segment, plan)
    calls, copied = (-(-one * bands // max(len(plan), 1)) for one in (scale.calls, scale.copied))
    return scale.peak, calls, copied


class SegmentCostEstimator:
    """Estimated cost of one segment by number of bands, each estimated once and stored."""

    def __init__(
        self,
        program: StreamProgram,
        segment: ProgramSegment,
        name: str,
        store: JsonCacheTable,
        *,
        only_segment: bool,
    ) -> None:
        self._program, self._segment, self.only_segment = program, segment, only_segment
        self._name, self._store = name, store
        self._costs: dict[int, tuple[int, int, int]] = {}
        self._window_count = max_bands(program, segment)
        self._most = max((rows.size // rows.grain for rows in rows_of(program, segment)), default=1)

    def cost(self, number: int) -> tuple[int, int, int]:
        """Return (bytes, operator calls, copied bytes) for ``number`` bands."""
        if number not in self._costs:
            even = self._round_to_windows(number)
            key = f"band count {self._name} {even}"
            found = self._store.get(key)
            if found is None:
                found = estimate_segment(self._program, self._segment, even)
                self._store.put(key, found)
            self._costs[number] = found[0], found[1], found[2]
        return self._costs[number]

    def _round_to_windows(self, number: int) -> int:
        """Round ``number`` so that bands are whole windows of equal height.

        Returns at least ``number`` where windows must be cut, otherwise possibly fewer bands of the
        same height.
        """
        if number > self._window_count:
            return -(-number // self._window_count) * self._window_count
        return -(-self._window_count // -(-self._window_count // number))

    def _reduce(self, number: int, cap: int) -> int:
        """Return a number of bands in (``number`` / 2, ``number``] that fills ``cap``.

        Half of ``number`` is known to be too few. With filled caps, images of any size take nearly
        the same memory.
        """
        low = number // 2
        while number - low > max(1, number // _FILL_TOLERANCE):
            middle = (low + number) // 2
            if self.cost(middle)[0] <= cap:
                number = middle
            else:
                low = middle
        return number

    def fewest(self, cap: int) -> int:
        """Return the smallest number of bands whose peak stays within ``cap``.

        If none does, the number with the least peak.
        """
        number, seen = 1, list[int]()
        while True:
            size, *_ = self.cost(number)
            if size <= cap:
                return self._round_to_windows(
                    self._reduce(number, cap) if self.only_segment else number
                )
            seen.append(size)
            if number >= self._most or (len(seen) > 2 and size > seen[-3] * _MIN_IMPROVEMENT):
                least = min(self._costs, key=lambda one: (self._costs[one][0], one))
                return self._round_to_windows(least)
            more = min(2 * number, self._most)
            # Try bands of one whole window before cutting any window.
            number = self._window_count if number < self._window_count < more else more


class _LiveBytes:
    """Counter of live bytes through a segment; operator workspaces are a guess."""

    def __init__(self, program: StreamProgram) -> None:
        self._program = program
        self._held: dict[int, int] = {}
        self._current = self.peak = self.calls = self.copied = 0

    def segment(self, part: ProgramSegment, bands: list[BandSchedule]) -> None:
        """Count the segment's bands, or the first of them; pages are left out."""
        kept = set(part.pages) - {self._program.output}
        # Feature maps that some operator needs whole.
        self._current = sum(
            self._program.bytes_of(one)
            for index in (*part.steps, *part.full_steps)
            for one in self._program.full_inputs(index)
            if one in self._program.rows
        )
        for band in bands:
            self._band(part, band, kept)

    def _band(self, part: ProgramSegment, band: BandSchedule, kept: set[int]) -> None:
        ends = self._last_uses(band)
        for index in part.steps:
            step = self._program.steps[index]
            spans = band.computed.get(index)
            if spans is not None and isinstance(step, RowOp):
                self.calls += len(spans)
                for span in spans:
                    self._run(index, step, span, band)
                if index not in kept and not step.view:
                    self._add(index, count_rows(spans) * self._program.row_bytes(index))
                if self._program.view_base(index) not in ends[1]:
                    ends[0].setdefault(index, []).append(index)
            elif index not in band.targets:
                continue
            for one in ends[0].get(index, ()):
                if one in self._held:
                    left = count_rows(band.held.get(one, [])) * self._program.row_bytes(one)
                    self._add(one, left - self._held[one])

    def _last_uses(self, band: BandSchedule) -> tuple[dict[int, list[int]], set[int]]:
        """Return, by step, the results whose memory has its last use there; and all such."""
        last: dict[int, int] = {}
        for index, user in band.last_uses.items():
            base = self._program.view_base(index)
            last[base] = max(user, last.get(base, user))
        ends: dict[int, list[int]] = {}
        for index, user in last.items():
            ends.setdefault(user, []).append(index)
        return ends, set(last)

    def _run(self, index: int, step: RowOp, span: Span, band: BandSchedule) -> None:
        """Count one operator call: its result, workspace and copied rows."""
        result = 0 if step.view else (span[1] - span[0]) * self._program.row_bytes(index)
        given, copied = 0, 0
        for one, spans in zip(step.inputs, step.input_spans(span), strict=True):
            size = count_rows(spans) * self._program.row_bytes(one)
            given += size
            # Used as it was just computed, or concatenated from pieces.
            copied += 0 if spans == band.computed.get(one) else size
        if step.padded and (span[0] == 0) != (span[1] == step.rows.size):
            copied += given
        self.copied += copied
        taken = result + copied + step.workspace_bytes(span[1] - span[0], given, result)
        self.peak = max(self.peak, self._current + taken)

    def _add(self, index: int, more: int) -> None:
        self._held[index] = self._held.get(index, 0) + more
        self._current += more
        self.peak = max(self.peak, self._current)


@dataclass(frozen=True)
class PageLifetime:
    """A page's size in bytes, the segments that write and last read it, and its reads.

    ``first`` is the segment that writes it, ``last`` the last that reads it, ``reads`` the number
    of segments that read it.
    """

    size: int
    first: int
    last: int
    reads: int

    @property
    def transfers_saved(self) -> float:
        """Transfers saved per segment for which the page would occupy memory."""
        return (1 + self.reads) / (self.last - self.first + 1)


def page_lifetimes(
    program: StreamProgram, segments: Sequence[ProgramSegment]
) -> dict[int, PageLifetime]:
    """Return the lifetimes of all pages except the result.

    The result is stored where the caller wants it.
    """
    found, read = dict[int, PageLifetime](), page_readers(segments)
    for place, part in enumerate(segments):
        for index in part.pages:
            if index != program.output:
                # A page that nothing reads stays to the end.
                places = read.get(index, [])
                last = places[-1] if places else len(segments)
                found[index] = PageLifetime(program.bytes_of(index), place, last, len(places))
    return found


class PageOccupancy:
    """Bytes of pages while each of ``count`` segments runs."""

    def __init__(self, count: int, pages: Iterable[PageLifetime] = ()) -> None:
        # Pages that are read for the last time shrink while those that are written grow.
        self._before, self._after, self._touched = ([0] * count for _ in range(3))
        for life in pages:
            self.add(life)

    def add(self, life: PageLifetime) -> None:
        """Add one page."""
        for place, before, after in self._bytes_with(life):
            self._before[place], self._after[place] = before, after
            self._touched[place] += life.size

    def _bytes_with(self, life: PageLifetime) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, bytes before, bytes after) if the page were added."""
        for place in range(life.first, min(life.last + 1, len(self._before))):
            before = self._before[place] + life.size * (place > life.first)
            yield place, before, self._after[place] + life.size * (place < life.last)

    def bytes_at(self, place: int) -> int:
        """Return the peak while a segment runs."""
        return max(self._before[place], self._after[place])

    def peak_with(self, life: PageLifetime) -> int:
        """Return the peak over a page's lifetime if it were added."""
        return max(max(before, after) for _, before, after in self._bytes_with(life))

    @property
    def peak_bytes(self) -> int:
        """Peak over all segments."""
        return max(map(max, self._before, self._after), default=0)

    @property
    def disk_peak_bytes(self) -> int:
        """Peak over all segments where each page is freed only after its last reader ends."""
        return max(self._touched, default=0)


def select_resident_pages(
    pages: Mapping[int, PageLifetime], count: int, limit: int
) -> frozenset[int]:
    """Select pages to keep in ``limit`` bytes of memory to save most transfers.

    Pages that are read soon and often come before those that wait.
    """
    found, occupied = set[int](), PageOccupancy(count)
    for index, life in sorted(
        pages.items(), key=lambda one: (-one[1].transfers_saved, one[1].first)
    ):
        if occupied.peak_with(life) <= limit:
            occupied.add(life)
            found.add(index)
    return frozenset(found)
