"""Executor of a streamed program: segment by segment, band by band."""

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
# Most bands of all segments whose schedules are cached, up to 20 kilobytes each; on the CPU they
# use the memory of the tensors.
_PLANS_KEPT, _PLANS_KEPT_ON_CPU = 4096, 512


class BandExecutor:
    """Executor of a program by bands; runs have their own pages and share constants.

    Args:
        program: Program to run.
        segments: Its segments, in order.
        bands: Number of bands of each segment.
        make_page: Returns the page for a result that later segments read.
        constants: Masks and biases, shared by all runs.
        piece: Bytes of the arena that each run reserves first, unless the allocator of its device
            has cached as much.
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
        # Schedules of earlier runs by segment, if there are few: a GPU is idle while bands are
        # scheduled. On the CPU they are worth their memory only for repeated runs.
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
        """Return the constants for runs from now on.

        They are new ones if tensors of the model that they depend on have changed.
        """
        self._constants = self._constants.current()
        return self._constants

    def run(
        self,
        source: Page,
        on_band: Callable[[float], None] | None = None,
        before_step: Callable[[int], object] | None = None,
    ) -> Generator[tuple[int, Tensor], None, None]:
        """Run one image and yield (first row, rows) of the result, in order.

        All pages are closed when the generator ends, also on an error. Exceptions of the callbacks
        end the run.

        Args:
            source: Page of the input.
            on_band: Called after each band with its share of the work, 0..1.
            before_step: Called before each operator with an estimate of the bytes that it needs.
        """
        one = copy.copy(self)
        one._pages, one._wholes = {}, {}
        one._on_band, one._before_step = on_band, before_step
        going = one._run(source)
        try:
            # free a band's rows before the next is computed: inference mode as a decorator would
            # hold them meanwhile, and a variable while other runs compute theirs
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
        """Prefetch the page rows that a band reads, of pages of earlier segments."""
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
        """Compute rows of one span, next to held rows if the band reads both together."""
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
        """Return rows of a result from its buffer or page, concatenated along its row dim."""
        dim = self._program.rows[index].dim
        if not spans:
            like = self._program.graph.nodes[index].like
            shape = *like.shape[:dim], 0, *like.shape[dim + 1 :]
            return torch.empty(shape, dtype=like.dtype, device=self._device)
        if index in buffers:
            return buffers[index].gather(spans)
        return self._pages[index].read(spans)

    def _beside(self, step: RowOp, span: Span) -> list[Any]:
        """Return the arguments of a step without rows, sliced to ``span`` where aligned."""
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
        """Return a whole tensor: a constant, a result without rows, or a gathered page."""
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
    # The casts of autocast are in the program already.
    with torch.inference_mode(), no_autocast(kind):
        return list(islice(going, 1))


def allocate_result(program: StreamProgram, device: torch.device) -> Tensor:
    """Allocate the whole result of a program.

    On a GPU, allocate it before a run: if it were cut out of the run's arena, the arena could
    not be used as one block again while the result is kept.
    """
    like = program.graph.nodes[program.output].like
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def collect_rows(
    program: StreamProgram, made: Iterable[tuple[int, Tensor]], result: Tensor | None = None
) -> Tensor:
    """Return the whole result from the (first row, rows) that a run yields.

    Args:
        program: Program of the run.
        made: Rows, as from `BandExecutor.run`.
        result: Memory for the result; by default it is allocated when the first rows arrive, after
            the segments that make no output.
    """
    dim = program.rows[program.output].dim
    for first, rows in made:
        if result is None:
            result = allocate_result(program, rows.device)
        result.narrow(dim, first, rows.shape[dim]).copy_(rows)
        del rows  # free the rows before the next band is computed
    assert result is not None
    return result
