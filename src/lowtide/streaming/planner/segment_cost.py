"""Rough cost of bands from the first few of a segment: for comparing layouts."""

from __future__ import annotations

from lowtide.streaming.engine.band_schedule import Band, schedule_bands
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.rules.row_op import Reduction, RowOp
from lowtide.streaming.spans import Span, count

# Bands that the estimate counts, and further bands that must be scheduled to know what these keep.
_SEEN, _BEYOND = 5, 2


def estimate_segment(program: StreamProgram, part: Segment, bands: int) -> tuple[int, int, int]:
    """Estimate the cost of one segment in ``bands`` bands, without pages.

    Extrapolated from the first bands; later ones are much alike. A long segment has thousands of
    operators, and scheduling all bands for every candidate height took a minute.

    Returns:
        (peak bytes of the bands, operator calls, bytes copied for them).
    """
    scale = _LiveBytes(program)
    plan = list(schedule_bands(program, part, bands, first=_SEEN + _BEYOND))[:_SEEN]
    scale.segment(part, plan)
    calls, copied = (-(-one * bands // max(len(plan), 1)) for one in (scale.calls, scale.copied))
    return scale.most, calls, copied


class _LiveBytes:
    """Counter of live bytes through a segment; operator workspaces are a guess."""

    def __init__(self, program: StreamProgram) -> None:
        self._program = program
        self._held: dict[int, int] = {}
        self._now = self.most = self.calls = self.copied = 0

    def segment(self, part: Segment, bands: list[Band]) -> None:
        """Count the segment's bands, or the first of them; pages are left out."""
        kept = set(part.pages) - {self._program.output}
        # Feature maps that some operator needs whole.
        self._now = sum(
            self._program.bytes_of(one)
            for index in (*part.steps, *part.before)
            for one in self._program.wholes(index)
            if one in self._program.rows
        )
        for band in bands:
            self._band(part, band, kept)

    def _band(self, part: Segment, band: Band, kept: set[int]) -> None:
        ends = self._ends(band)
        for index in part.steps:
            step = self._program.steps[index]
            spans = band.makes.get(index)
            if spans is not None and isinstance(step, RowOp):
                self.calls += len(spans)
                for span in spans:
                    self._run(index, step, span, band)
                if index in band.again and step.overlap:
                    # About as slow as a copy, where the operator is light enough to be recomputed.
                    touched = sum(map(self._program.row_bytes, (index, *step.inputs)))
                    self.copied += band.again[index] * touched
                if index not in kept and not step.view:
                    # The rows that it overwrites are freed as soon as it is computed.
                    size = count(spans) * self._program.row_bytes(index)
                    self._add(index, size, new=index not in band.over)
                if _base(self._program, index) not in ends[1]:
                    ends[0].setdefault(index, []).append(index)
            elif index not in band.targets:
                continue
            for one in ends[0].get(index, ()):
                if one in self._held:
                    left = count(band.holds.get(one, [])) * self._program.row_bytes(one)
                    self._add(one, left - self._held[one])

    def _ends(self, band: Band) -> tuple[dict[int, list[int]], set[int]]:
        """Return, by step, the results whose memory has its last use there; and all such."""
        last: dict[int, int] = {}
        for index, user in band.uses.items():
            base = _base(self._program, index)
            last[base] = max(user, last.get(base, user))
        ends: dict[int, list[int]] = {}
        for index, user in last.items():
            ends.setdefault(user, []).append(index)
        return ends, set(last)

    def _run(self, index: int, step: RowOp, span: Span, band: Band) -> None:
        """Count one operator call: its result, workspace and copied rows."""
        own = not step.view and index not in band.over
        result = (span[1] - span[0]) * self._program.row_bytes(index) if own else 0
        given, copied = 0, 0
        for one, spans in zip(step.inputs, step.needed(span), strict=True):
            size = count(spans) * self._program.row_bytes(one)
            given += size
            # Used as it was just computed, or concatenated from pieces.
            copied += 0 if spans == band.makes.get(one) else size
        if step.framed and (span[0] == 0) != (span[1] == step.rows.size):
            copied += given
        self.copied += copied
        taken = result + copied + step.beside(span[1] - span[0], given, result)
        self.most = max(self.most, self._now + taken)

    def _add(self, index: int, more: int, *, new: bool = True) -> None:
        self._held[index] = self._held.get(index, 0) + more
        self._now += more
        if new:
            self.most = max(self.most, self._now)


def _base(program: StreamProgram, index: int) -> int:
    """Return the index of the result that owns a view's memory."""
    step = program.steps.get(index)
    while isinstance(step, RowOp) and step.view:
        index = step.inputs[0]
        step = program.steps.get(index)
    return index


def live_bytes_at_cuts(program: StreamProgram) -> dict[int, int]:
    """Return, by step, the bytes of row results made before it and needed from it on."""
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
