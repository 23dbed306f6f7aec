"""Running a program: segment by segment, band by band."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lowtide.streaming.capture.autocast_state import no_autocast
from lowtide.streaming.engine.arena import reserve_arena
from lowtide.streaming.engine.band_schedule import Band, schedule_bands
from lowtide.streaming.engine.constants import Constants
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import Segment, last_reads
from lowtide.streaming.engine.work_bytes import bytes_of_band, bytes_of_step, step_peak_bytes
from lowtide.streaming.pages.page import MemoryPage, Page
from lowtide.streaming.rules.row_op import Reduction, RowOp
from lowtide.streaming.spans import Span, Spans

MakePage = Callable[[int], Page]
# Bands of all segments whose plans are kept, up to 20 kilobytes each; on the CPU they share the
# memory of what is computed.
_PLANS_KEPT, _PLANS_KEPT_ON_CPU = 4096, 512


class BandExecutor:
    """Runs of a program: each has pages of its own, all share masks and biases.

    A run first takes a ``piece`` of so many bytes and gives it back, for its device's allocator to
    cut up, unless that keeps as much already.
    """

    def __init__(
        self,
        program: StreamProgram,
        segments: list[Segment],
        bands: Sequence[int],
        make_page: MakePage,
        constants: Constants | None = None,
        *,
        piece: int = 0,
    ) -> None:
        self._program, self._segments, self._make_page = program, segments, make_page
        self._bands, self.piece = bands, piece
        self._going = last_reads(segments)
        self._pages: dict[int, Page] = {}
        self._wholes: dict[int, Tensor] = {}
        self._constants = constants or Constants(program)
        # Plans of earlier runs, by segment, if not too many: a card waits while bands are planned.
        # On the CPU they are worth their memory only if runs are repeated.
        self._planned: dict[int, list[Band]] = {}
        on_cpu = program.graph.on_cpu
        self._repeated = set[int]() if on_cpu else set(range(len(segments)))
        self._keeps_plans = sum(bands) <= (_PLANS_KEPT_ON_CPU if on_cpu else _PLANS_KEPT)
        self._on_band: Callable[[float], None] | None = None
        self._before_step: Callable[[int], object] | None = None
        self._work = sum(
            bytes_of_step(program, index) for segment in segments for index in segment.steps
        )

    def constants(self) -> Constants:
        """Those of runs from now on: others than before if what they are made of has changed."""
        self._constants = self._constants.current()
        return self._constants

    def run(
        self,
        source: Page,
        on_band: Callable[[float], None] | None = None,
        before_step: Callable[[int], object] | None = None,
    ) -> Generator[tuple[int, Tensor], None, None]:
        """(first row, rows) of the result, in order. Pages go when it ends, however it does.

        ``on_band`` is told after each band which share of the work it was, ``before_step``
        before each operator about how many bytes it will take; the run stops at what they raise.
        """
        one = copy.copy(self)
        one._pages, one._wholes = {}, {}
        one._on_band, one._before_step = on_band, before_step
        going = one._run(source)
        try:
            # As a decorator, inference mode would hold a band's rows while the next is computed;
            # a variable, while other runs compute theirs.
            while made := _next_in_inference(going, source.device.type):
                yield made.pop()
        finally:
            going.close()
            for page in one._pages.values():
                page.close()
            one._pages.clear()

    def _run(self, source: Page) -> Generator[tuple[int, Tensor], None, None]:
        (given,) = self._program.graph.inputs
        self._pages = {given: source}
        self._device = source.device
        reserve_arena(self.piece, self._device, products=self._program.multiplies)
        for place, (segment, bands) in enumerate(zip(self._segments, self._bands, strict=True)):
            for index in segment.before:
                self._whole(index)
            plan = self._plan(place, segment, bands)
            yield from self._segment(segment, plan, self._going.get(place, set()))
            self._constants.forget()
            self._wholes = {
                index: value
                for index, value in self._wholes.items()
                if index not in self._program.rows
            }

    def _plan(self, place: int, segment: Segment, bands: int) -> Iterator[Band]:
        if place not in self._planned:
            plan = schedule_bands(self._program, segment, bands)
            if not self._keeps_plans or place not in self._repeated:
                self._repeated.add(place)
                return plan
            self._planned[place] = list(plan)
        return iter(self._planned[place])

    def _segment(
        self, segment: Segment, plan: Iterator[Band], going: set[int]
    ) -> Iterator[tuple[int, Tensor]]:
        for index in segment.pages:
            if index != self._program.output:
                self._pages[index] = self._make_page(index)
        states: dict[int, Any] = {}
        buffers: dict[int, MemoryPage] = {}
        ahead = deque[Band]()
        for band in islice(plan, 2):
            self._look_ahead(band, ahead)
        while ahead:
            band = ahead.popleft()
            yield from self._band(segment, band, buffers, states)
            for following in islice(plan, 1):
                self._look_ahead(following, ahead)
            for index in going:
                self._pages[index].keep(band.leaves.get(index, []))
            if self._on_band is not None:
                self._on_band(bytes_of_band(self._program, band) / max(self._work, 1))
        for index in going:
            self._pages.pop(index).close()
        for page in self._pages.values():
            page.expect([])
        for index, state in states.items():
            step = self._program.steps[index]
            assert isinstance(step, Reduction)
            self._wholes[index] = step.finish(state)

    def _look_ahead(self, band: Band, ahead: deque[Band]) -> None:
        """Tell the pages what a band will read of them; not those that this segment makes."""
        ahead.append(band)
        for index, spans in band.reads.items():
            if index in self._pages:
                self._pages[index].expect(spans)

    def _band(
        self, segment: Segment, band: Band, buffers: dict[int, MemoryPage], states: dict[int, Any]
    ) -> Iterator[tuple[int, Tensor]]:
        leaving: dict[int, list[int]] = {}
        for index, user in band.uses.items():
            leaving.setdefault(user, []).append(index)
        for index in segment.steps:
            step = self._program.steps[index]
            if isinstance(step, Reduction):
                if index not in band.targets:
                    continue
                pieces = [self._rows(one, band.targets[index], buffers) for one in step.inputs]
                states[index] = step.add(states.get(index), pieces)
                del pieces
            elif index in band.makes:
                for span in band.makes[index]:
                    self._make(index, span, band, buffers)
            ready = deque[tuple[int, Tensor]]()
            if index == self._program.output:
                for span in band.targets.get(index, ()):
                    ready.append((span[0], self._rows(index, [span], buffers)))
            if index in band.makes and index not in band.uses:
                leaving.setdefault(index, []).append(index)
            for one in leaving.get(index, ()):
                if one in buffers:
                    buffers[one].trim(band.holds.get(one, []))
            while ready:
                yield ready.popleft()

    def _make(self, index: int, span: Span, band: Band, buffers: dict[int, MemoryPage]) -> None:
        """Compute rows of one span, beside those that are taken together with them."""
        step = self._program.steps[index]
        assert isinstance(step, RowOp)
        if index not in buffers:
            buffers[index] = MemoryPage(step.rows.dim, self._device)
        held = buffers[index]
        taken = zip(step.inputs, step.needed(span), strict=True)
        pieces, run = [self._rows(one, spans, buffers) for one, spans in taken], step.run
        if self._before_step is not None and not step.view:
            self._before_step(step_peak_bytes(self._program, index, span, pieces))
        beside = self._beside(step, span)
        if index in band.joined and step.into is not None and index not in self._pages:
            place = held.extended(span)
            if place is not None:
                step.into(span, pieces, beside, place)
                return
        if index in band.over:
            run = step.over[band.over[index]]
        rows = run(span, pieces, beside)
        del pieces
        if index in self._pages:
            self._pages[index].write(span[0], rows)
        held.put(span[0], rows)

    def _rows(self, index: int, spans: Spans, buffers: dict[int, MemoryPage]) -> Tensor:
        dim = self._program.rows[index].dim
        if not spans:
            like = self._program.graph.nodes[index].like
            shape = *like.shape[:dim], 0, *like.shape[dim + 1 :]
            return torch.empty(shape, dtype=like.dtype, device=self._device)
        if index in buffers:
            return buffers[index].gather(spans)
        return self._pages[index].read(spans)

    def _beside(self, step: RowOp, span: Span) -> list[Any]:
        """What a step takes without rows, or the span of it that concerns these rows."""
        found: list[Any] = []
        for index in step.wholes:
            dim, grain = step.sliced.get(index), step.rows.grain
            if index in step.patterned:
                found.append(self._constants.patterns(index, step.patterned[index], span, grain))
            elif dim is None:
                found.append(self._whole(index))
            elif index in self._program.fixed:
                found.append(self._constants.rows(index, dim, span, grain))
            else:
                found.append(self._whole(index).narrow(dim, span[0], span[1] - span[0]))
        return found

    def _whole(self, index: int) -> Tensor:
        """A result without rows, or one with rows as a whole."""
        if index in self._program.fixed:
            return self._constants.whole(index)
        if index not in self._wholes:
            rows = self._program.rows.get(index)
            self._wholes[index] = (
                self._program.graph.nodes[index].call(self._whole)
                if rows is None
                else self._pages[index].read([(0, rows.size)])
            )
        return self._wholes[index]


def _next_in_inference(going: Iterator[tuple[int, Tensor]], kind: str) -> list[tuple[int, Tensor]]:
    # What autocast changed is in the program already.
    with torch.inference_mode(), no_autocast(kind):
        return list(islice(going, 1))


def allocate_result(program: StreamProgram, device: torch.device) -> Tensor:
    """Memory for the result as a whole.

    On a card it is taken before a run: of what a run's piece is cut into it must be none, since
    that could not be used as a whole again while the result is kept.
    """
    like = program.graph.nodes[program.output].like
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def collect_rows(
    program: StreamProgram, made: Iterable[tuple[int, Tensor]], result: Tensor | None = None
) -> Tensor:
    """The result as a whole, of rows as a sweep makes them: in the memory of ``result``, or in some
    that is taken when the first rows come, after the segments that make none."""
    dim = program.rows[program.output].dim
    for first, rows in made:
        if result is None:
            result = allocate_result(program, rows.device)
        result.narrow(dim, first, rows.shape[dim]).copy_(rows)
        del rows  # or they would be held while the next band is computed
    assert result is not None
    return result
