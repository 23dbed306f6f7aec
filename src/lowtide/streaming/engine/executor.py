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
from lowtide.streaming.engine.band_schedule import (
    BandSchedule,
    schedule_bands,
)
from lowtide.streaming.engine.constants import ConstantCache
from lowtide.streaming.engine.program import FullTensorOp, StreamProgram
from lowtide.streaming.engine.segments import ProgramSegment, last_reads
from lowtide.streaming.pages.page import FeaturePage, MemoryPage
from lowtide.streaming.rules.rule import Reduction, RowOp
from lowtide.streaming.spans import Span, Spans

MakePage = Callable[[int], FeaturePage]
# (position of the result, first row, rows), such as (1, C, rows, W) for an image.
OutputRows = tuple[int, int, Tensor]
# Most bands of all segments whose schedules are cached, up to 20 kilobytes each; on the CPU they
# use the memory of the tensors.
_MAX_CACHED_BANDS, _MAX_CACHED_BANDS_ON_CPU = 4096, 512


class BandExecutor:
    """Executor of a program by bands; runs have their own pages and share constants.

    Args:
        program: Program to run.
        segments: Its segments, in order.
        bands: Number of bands of each segment.
        make_page: Returns the page for a result that later segments read.
        refresh_constants: Masks and biases, shared by all runs.
    """

    def __init__(
        self,
        program: StreamProgram,
        segments: list[ProgramSegment],
        bands: Sequence[int],
        make_page: MakePage,
        constants: ConstantCache | None = None,
    ) -> None:
        self._program, self._segments, self._make_page = program, segments, make_page
        self._bands = bands
        self._last_reads = last_reads(segments)
        self._whole_until = _last_whole_uses(program, segments)
        self._pages: dict[int, FeaturePage] = {}
        self._full_tensors: dict[int, Tensor] = {}
        # Pages that the segment at work only takes whole, and no later one reads.
        self._gathered_once = set[int]()
        self._constants = constants or ConstantCache(program)
        # Schedules of earlier runs by segment, if there are few: a GPU is idle while bands are
        # scheduled. On the CPU they are worth their memory only for repeated runs.
        self._schedules: dict[int, list[BandSchedule]] = {}
        on_cpu = program.graph.on_cpu
        self._segments_to_cache = set[int]() if on_cpu else set(range(len(segments)))
        self._caches_schedules = sum(bands) <= (
            _MAX_CACHED_BANDS_ON_CPU if on_cpu else _MAX_CACHED_BANDS
        )
        self._on_band: Callable[[float], None] | None = None
        self._before_step: Callable[[int], object] | None = None
        # Bytes that each segment computes or reduces, the measure of its work.
        self._work = [sum(map(self._bytes_of_step, segment.steps)) for segment in segments]

    def _bytes_of_step(self, index: int) -> int:
        step = self._program.steps[index]
        results = step.inputs if isinstance(step, Reduction) else [index]
        return sum(map(self._program.bytes_of, results))

    def refresh_constants(self) -> None:
        """Make new constants for runs from now on if the model's tensors in them have changed."""
        self._constants = self._constants.refreshed()

    def run(
        self,
        sources: Sequence[FeaturePage],
        fixed: Sequence[Tensor] = (),
        on_band: Callable[[float], None] | None = None,
        before_step: Callable[[int], object] | None = None,
    ) -> Generator[OutputRows, None, None]:
        """Run one sample and yield (result, first row, rows), the rows of each result in order.

        Results are numbered as in ``program.outputs``; one without rows comes last, as a whole. All
        pages are closed when the generator ends, also on an error. Exceptions of the callbacks end
        the run.

        Args:
            sources: Pages of the streamed inputs.
            fixed: The fixed inputs.
            on_band: Called after each band with about its share of the work, 0..1.
            before_step: Called before each operator with an estimate of the bytes that it needs.
        """
        executor = copy.copy(self)
        executor._pages, executor._full_tensors = {}, {}
        executor._on_band, executor._before_step = on_band, before_step
        results = executor._run(sources, fixed)
        try:
            # free a band's rows before the next is computed: inference mode as a decorator would
            # hold them meanwhile, and a variable while other runs compute theirs
            while made := _next_in_inference_mode(results, sources[0].device.type):
                yield made.pop()
        finally:
            results.close()
            for page in executor._pages.values():
                page.close()
            executor._pages.clear()

    def _run(
        self, sources: Sequence[FeaturePage], fixed: Sequence[Tensor]
    ) -> Generator[OutputRows, None, None]:
        graph, outputs = self._program.graph, self._program.outputs
        self._pages = dict(zip(graph.inputs, sources, strict=True))
        self._full_tensors = dict(zip(graph.fixed, fixed, strict=True))
        self._device = sources[0].device
        for segment_index, (segment, bands) in enumerate(
            zip(self._segments, self._bands, strict=True)
        ):
            read = {one for step in segment.steps for one in self._program.steps[step].inputs}
            self._gathered_once = self._last_reads.get(segment_index, set()) - read
            for index in segment.full_steps:
                self._full_tensor(index)
                self._free_whole(self._whole_until.get((segment_index, index), ()))
            schedule = self._schedule(segment_index, segment, bands)
            yield from self._run_segment(
                segment,
                schedule,
                self._last_reads.get(segment_index, set()),
                self._work[segment_index] / max(sum(self._work), 1) / bands,
            )
            self._constants.free_full_tensors()
            self._free_whole(self._whole_until.get((segment_index, None), ()))
            self._free_whole(self._full_tensors.keys() & self._program.rows.keys())
        for position, index in enumerate(outputs):
            if index not in self._program.rows:
                yield position, 0, self._full_tensor(index)

    def _schedule(
        self, segment_index: int, segment: ProgramSegment, bands: int
    ) -> Iterator[BandSchedule]:
        if segment_index not in self._schedules:
            schedule = schedule_bands(self._program, segment, bands)
            if not self._caches_schedules or segment_index not in self._segments_to_cache:
                self._segments_to_cache.add(segment_index)
                return schedule
            self._schedules[segment_index] = list(schedule)
        return iter(self._schedules[segment_index])

    def _run_segment(
        self,
        segment: ProgramSegment,
        schedule: Iterator[BandSchedule],
        last_read_pages: set[int],
        band_share: float,
    ) -> Iterator[OutputRows]:
        for index in segment.pages:
            self._pages[index] = self._make_page(index)
        states: dict[int, Any] = {}
        buffers: dict[int, MemoryPage] = {}
        taken_whole = {one for step in segment.steps for one in self._program.full_inputs(step)}
        ahead = deque[BandSchedule]()
        for band in islice(schedule, 2):
            self._prefetch(band, ahead)
        while ahead:
            band = ahead.popleft()
            yield from self._run_band(segment, band, buffers, states)
            for following in islice(schedule, 1):
                self._prefetch(following, ahead)
            for index in last_read_pages & self._pages.keys():
                # the first band to take a page whole may come later
                if index not in taken_whole or index in self._full_tensors:
                    self._pages[index].retain(band.later_reads.get(index, []))
            if self._on_band is not None:
                self._on_band(band_share)
        for index in last_read_pages & self._pages.keys():
            self._pages.pop(index).close()
        for page in self._pages.values():
            page.prefetch([])
        for index, state in states.items():
            step = self._program.steps[index]
            assert isinstance(step, Reduction)
            self._full_tensors[index] = step.finish(state)

    def _prefetch(self, band: BandSchedule, ahead: deque[BandSchedule]) -> None:
        """Prefetch the page rows that a band reads, of pages of earlier segments."""
        ahead.append(band)
        for index, spans in band.reads.items():
            if index in self._pages:
                self._pages[index].prefetch(spans)

    def _run_band(
        self,
        segment: ProgramSegment,
        band: BandSchedule,
        buffers: dict[int, MemoryPage],
        states: dict[int, Any],
    ) -> Iterator[OutputRows]:
        last_used_by: dict[int, list[int]] = {}
        for index, user in band.last_uses.items():
            last_used_by.setdefault(user, []).append(index)
        for index in segment.steps:
            step = self._program.steps[index]
            if isinstance(step, Reduction):
                if index not in band.targets:
                    continue
                pieces = [
                    self._gather_rows(one, band.targets[index], buffers) for one in step.inputs
                ]
                states[index] = step.add(states.get(index), pieces)
                del pieces
            elif index in band.computed:
                for span in band.computed[index]:
                    self._compute_span(index, span, band, buffers)
            ready = deque[OutputRows]()
            if index in segment.outputs:
                output = self._program.outputs.index(index)
                for span in band.targets.get(index, ()):
                    ready.append((output, span[0], self._gather_rows(index, [span], buffers)))
            if index in band.computed and index not in band.last_uses:
                last_used_by.setdefault(index, []).append(index)
            for one in last_used_by.get(index, ()):
                if one in buffers:
                    buffers[one].trim(band.held.get(one, []))
            while ready:
                yield ready.popleft()

    def _compute_span(
        self, index: int, span: Span, band: BandSchedule, buffers: dict[int, MemoryPage]
    ) -> None:
        """Compute rows of one span, next to held rows if the band reads both together."""
        step = self._program.steps[index]
        assert isinstance(step, RowOp)
        if index not in buffers:
            buffers[index] = MemoryPage(step.rows.dim, self._device)
        buffer = buffers[index]
        input_spans = zip(step.inputs, step.input_spans(span), strict=True)
        pieces = [self._gather_rows(one, spans, buffers) for one, spans in input_spans]
        if self._before_step is not None and not step.view:
            result = (span[1] - span[0]) * self._program.row_bytes(index)
            given = sum(piece.nbytes for piece in pieces)
            self._before_step(result + step.workspace_bytes(span[1] - span[0], given, result))
        full_inputs = self._full_inputs(step, span)
        rows = step.run(span, pieces, full_inputs)
        del pieces
        if index in self._pages:
            self._pages[index].write(span[0], rows)
        buffer.write_without_copy(span[0], rows)

    def _gather_rows(self, index: int, spans: Spans, buffers: dict[int, MemoryPage]) -> Tensor:
        """Return rows of a result from its buffer or page, concatenated along its row dim."""
        dim = self._program.rows[index].dim
        if not spans:
            meta = self._program.graph.nodes[index].meta
            shape = *meta.shape[:dim], 0, *meta.shape[dim + 1 :]
            return torch.empty(shape, dtype=meta.dtype, device=self._device)
        if index in buffers:
            return buffers[index].read_and_merge(spans)
        return self._pages[index].read(spans)

    def _full_inputs(self, step: RowOp, span: Span) -> list[Any]:
        """Return the arguments of a step without rows, sliced to ``span`` where aligned."""
        found: list[Any] = []
        for index in step.full_inputs:
            dim, grain = step.sliced_dims.get(index), step.rows.grain
            if index in step.pattern_dims:
                found.append(
                    self._constants.mask_patterns(index, step.pattern_dims[index], span, grain)
                )
            elif dim is None:
                found.append(self._full_tensor(index))
            elif index in self._program.constants:
                found.append(self._constants.rows(index, dim, span, grain))
            else:
                found.append(self._full_tensor(index).narrow(dim, span[0], span[1] - span[0]))
        return found

    def _full_tensor(self, index: int) -> Tensor:
        """Return a whole tensor: a constant, a result without rows, or a gathered page."""
        if index in self._program.constants:
            return self._constants.full_tensor(index)
        if index not in self._full_tensors:
            step, rows = self._program.steps.get(index), self._program.rows.get(index)
            if rows is not None:
                self._full_tensors[index] = self._pages[index].read([(0, rows.size)])
                if index in self._gathered_once:
                    self._pages.pop(index).close()
            else:
                assert isinstance(step, FullTensorOp)
                self._full_tensors[index] = step.node.call(self._full_tensor)
        return self._full_tensors[index]

    def _free_whole(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._full_tensors.pop(index, None)


def _last_whole_uses(
    program: StreamProgram, segments: Sequence[ProgramSegment]
) -> dict[tuple[int, int | None], list[int]]:
    """Return what nothing takes whole any more after a whole-tensor step of a segment.

    Or after its bands, which None stands for.
    """
    last: dict[int, tuple[int, int | None]] = {}
    for place, segment in enumerate(segments):
        for step in segment.full_steps:
            last |= dict.fromkeys(program.full_inputs(step), (place, step))
        for step in segment.steps:
            last |= dict.fromkeys(program.full_inputs(step), (place, None))
    found: dict[tuple[int, int | None], list[int]] = {}
    for index in last.keys() - set(program.outputs):
        found.setdefault(last[index], []).append(index)
    return found


def _next_in_inference_mode(results: Iterator[OutputRows], device_type: str) -> list[OutputRows]:
    # The casts of autocast are in the program already.
    with torch.inference_mode(), no_autocast(device_type):
        return list(islice(results, 1))


def allocate_result(program: StreamProgram, device: torch.device, output: int = 0) -> Tensor:
    """Allocate a whole result of a program, such as (B, C, H, W).

    On a GPU, allocate it before a run: cut out of memory that the run has freed, it would part the
    allocator's blocks for the next run while it is kept.
    """
    meta = program.graph.nodes[program.outputs[output]].meta
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def collect_rows(
    program: StreamProgram, bands: Iterable[OutputRows], result: Tensor | None = None
) -> list[Tensor]:
    """Return the whole results, such as (B, C, H, W), from the rows that a run yields.

    Args:
        program: Program of the run.
        bands: Rows, (B, C, rows, W) for images, as from `BandExecutor.run`.
        result: Memory for the first result; by default a result is allocated when its first rows
            arrive, after the segments that make none.
    """
    results = {} if result is None else {0: result}
    for output, first, rows in bands:
        axis = program.rows.get(program.outputs[output])
        if axis is None:
            results[output] = rows
            continue
        if output not in results:
            results[output] = allocate_result(program, rows.device, output)
        results[output].narrow(axis.dim, first, rows.shape[axis.dim]).copy_(rows)
        del rows  # free the rows before the next band is computed
    return [results[output] for output in range(len(program.outputs))]
