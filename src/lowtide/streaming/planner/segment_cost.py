"""Rough cost of bands from the first few of a segment: for comparing layouts."""

from __future__ import annotations

from lowtide.streaming.engine.band_schedule import Band, schedule_bands
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment
from lowtide.streaming.rules.row_op import RowOp
from lowtide.streaming.spans import Span, count

# Bands that the estimate counts, and further bands that must be scheduled to know what these keep.
_COUNTED_BANDS, _LOOKAHEAD_BANDS = 5, 2
# Seconds to schedule and count one operator of one band.
_OPERATOR_SECONDS = 18e-6


def estimation_seconds(segment: Segment, bands: int) -> float:
    """Return about how long `estimate_segment` takes: by its work, the same each time."""
    scheduled = min(bands, _COUNTED_BANDS + _LOOKAHEAD_BANDS)
    return _OPERATOR_SECONDS * scheduled * len(segment.steps)


def estimate_segment(program: StreamProgram, segment: Segment, bands: int) -> tuple[int, int, int]:
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


class _LiveBytes:
    """Counter of live bytes through a segment; operator workspaces are a guess."""

    def __init__(self, program: StreamProgram) -> None:
        self._program = program
        self._held: dict[int, int] = {}
        self._current = self.peak = self.calls = self.copied = 0

    def segment(self, part: Segment, bands: list[Band]) -> None:
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

    def _band(self, part: Segment, band: Band, kept: set[int]) -> None:
        ends = self._last_uses(band)
        for index in part.steps:
            step = self._program.steps[index]
            spans = band.computed.get(index)
            if spans is not None and isinstance(step, RowOp):
                self.calls += len(spans)
                for span in spans:
                    self._run(index, step, span, band)
                if index not in kept and not step.view:
                    self._add(index, count(spans) * self._program.row_bytes(index))
                if self._program.view_base(index) not in ends[1]:
                    ends[0].setdefault(index, []).append(index)
            elif index not in band.targets:
                continue
            for one in ends[0].get(index, ()):
                if one in self._held:
                    left = count(band.held.get(one, [])) * self._program.row_bytes(one)
                    self._add(one, left - self._held[one])

    def _last_uses(self, band: Band) -> tuple[dict[int, list[int]], set[int]]:
        """Return, by step, the results whose memory has its last use there; and all such."""
        last: dict[int, int] = {}
        for index, user in band.last_uses.items():
            base = self._program.view_base(index)
            last[base] = max(user, last.get(base, user))
        ends: dict[int, list[int]] = {}
        for index, user in last.items():
            ends.setdefault(user, []).append(index)
        return ends, set(last)

    def _run(self, index: int, step: RowOp, span: Span, band: Band) -> None:
        """Count one operator call: its result, workspace and copied rows."""
        result = 0 if step.view else (span[1] - span[0]) * self._program.row_bytes(index)
        given, copied = 0, 0
        for one, spans in zip(step.inputs, step.input_spans(span), strict=True):
            size = count(spans) * self._program.row_bytes(one)
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
