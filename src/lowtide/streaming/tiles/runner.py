"""Execution of a plan: read rows, run tiles through the network, merge them, write rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.core.scratch import ScratchSpace
from lowtide.core.signal import RowSink, RowSource, ValueAdapter
from lowtide.memory.plan import ImageGeometry, Plan, StreamedStrategy, TileStrategy
from lowtide.streaming.row_window import SlidingRowWindow
from lowtide.streaming.tiles.grid import TileAxis, tile_axes
from lowtide.streaming.tiles.network import RunnableNetwork
from lowtide.streaming.tiles.recovery import RetryingTileRunner, TileWorker, TileWorkerPool
from lowtide.streaming.tiles.tile_runner import make_tile_runner

if TYPE_CHECKING:
    from lowtide.streaming.engine.program import StreamProgram

_WRITE_ROWS = 16  # convert rows in blocks, so that no second strip exists
Retry = Callable[[Callable[[], np.ndarray]], np.ndarray]


@dataclass
class TileRunOutcome:
    """Outcome of a run: tiles run, tiles redone in fp32, and recovery events."""

    tiles: int = 0
    fp32_reruns: int = 0
    events: list[str] = field(default_factory=list)


def execute_plan(
    network: RunnableNetwork,
    adapter: ValueAdapter,
    source: RowSource,
    sink: RowSink,
    plan: Plan,
    *,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    over_budget: Callable[[], bool] | None = None,
    before_step: Callable[[int], object] | None = None,
    program: StreamProgram | None = None,
    scratch: Path | None = None,
    replicas: Sequence[RunnableNetwork] = (),
) -> TileRunOutcome:
    """Run the whole ``source``, (H, W, C), by ``plan``.

    Args:
        network: The model.
        adapter: Conversion between source, network and sink.
        source: What to read.
        sink: Gets the rows of the result.
        plan: The plan to execute.
        on_rows: Called with the number of output rows written since the last call.
        cancel: Cancels the run.
        over_budget: Called after each batch; while it returns True, batches shrink.
        before_step: Called before each operator of a band with the bytes that it needs, roughly.
        program: Captured program of the network, for a streamed plan.
        scratch: Folder of pages on disk.
        replicas: The same network on other devices, for the plan's lanes beyond the first.

    Raises:
        Cancelled: The run was cancelled.
        OutOfMemoryError: Memory ran out on the smallest part.
        Exception: Whatever the source and the sink raise.
    """
    image, strategy = plan.image, plan.strategy
    if isinstance(strategy, StreamedStrategy):
        from lowtide.streaming.tiles.run_rows import run_panels, run_streamed

        assert program is not None
        run_bands = run_panels if strategy.panels > 1 else run_streamed
        with closing(ScratchSpace(scratch)) as scratch_space:
            run_bands(
                network,
                adapter,
                program,
                source,
                sink,
                image,
                strategy,
                scratch=scratch_space,
                on_rows=on_rows,
                cancel=cancel,
                before_step=before_step,
            )
        return TileRunOutcome(tiles=1)
    return _run_tiles(
        network, adapter, source, sink, image, strategy, on_rows, cancel, over_budget, replicas
    )


def _run_tiles(
    network: RunnableNetwork,
    adapter: ValueAdapter,
    source: RowSource,
    sink: RowSink,
    image: ImageGeometry,
    tiles: TileStrategy,
    on_rows: Callable[[int], None] | None,
    cancel: Cancel,
    over_budget: Callable[[], bool] | None,
    replicas: Sequence[RunnableNetwork],
) -> TileRunOutcome:
    rows, columns = tile_axes(image, tiles)
    steps = [
        make_tile_runner(one, adapter, overlapped=tiles.in_flight > 1)
        for one in (network, *replicas[: tiles.device_count - 1])
    ]
    runners = [RetryingTileRunner(step, image, tiles, step.network.device) for step in steps]
    workers = TileWorkerPool(
        [TileWorker(one.network.device, by) for one, by in zip(steps, runners, strict=True)],
        tiles.in_flight,
    )
    window = SlidingRowWindow(source, *image.padded_size, rows.tile)
    retry = runners[0].with_retry
    height, width, _ = source.shape
    merger = StripMerger(rows, columns, adapter, sink, (height, width), network.scale, retry=retry)
    outcome = TileRunOutcome()
    across = len(columns.starts)
    # With several groups in flight, tiles are still read after the window has moved on.
    copy_tiles = tiles.in_flight > 1 or len(steps) > 1
    groups = _groups(window, rows, columns, workers, copy_tiles=copy_tiles)
    try:
        for results in workers.run(groups):
            raise_if_cancelled(cancel)
            row, column = divmod(outcome.tiles, across)
            _merge(merger, row, column, results)
            outcome.tiles += len(results)
            last = column + len(results) == across
            del results
            if over_budget is not None and over_budget():
                workers.shrink("over the budget")
            if last:
                written = merger.finish_row(row)
                if on_rows is not None:
                    on_rows(written)
    finally:
        workers.close()
    outcome.events, outcome.fp32_reruns = workers.events, sum(step.fp32_reruns for step in steps)
    return outcome


def _groups(
    window: SlidingRowWindow,
    rows: TileAxis,
    columns: TileAxis,
    workers: TileWorkerPool,
    *,
    copy_tiles: bool,
) -> Iterator[Sequence[np.ndarray]]:
    """Yield neighboring tiles of a row to run at once, row by row.

    Fewer per group after batches had to shrink. Unless ``copy_tiles``, tiles are views that change
    when the next row is read.
    """
    for top in rows.starts:
        strip, first = window.rows(top, top + rows.tile), 0
        while first < len(columns.starts):
            batch = workers.batch
            tiles = [
                strip[:, left : left + columns.tile]
                for left in columns.starts[first : first + batch]
            ]
            yield [tile.copy() for tile in tiles] if copy_tiles else tiles
            first += batch


def _merge(merger: StripMerger, row: int, column: int, results: Sequence[np.ndarray]) -> None:
    """Merge neighboring results, without keeping any while the next ones are computed."""
    for offset, tile in enumerate(results):
        merger.add(row, column + offset, tile)


def _no_retry(call: Callable[[], np.ndarray]) -> np.ndarray:
    return call()


class StripMerger:
    """Merges one row of tiles at a time and writes settled rows to the sink.

    Without blending, the strip holds values of the sink's own type and each tile is written to its
    own place; with blending, it holds float32 sums, and the rows shared with the next strip are
    carried over. ``size`` is the true (height, width) in input pixels: padding is cut. Conversions,
    which allocate memory but have no side effects, are called through ``retry``.
    """

    def __init__(
        self,
        rows: TileAxis,
        columns: TileAxis,
        adapter: ValueAdapter,
        sink: RowSink,
        size: tuple[int, int],
        scale: int,
        retry: Retry = _no_retry,
    ) -> None:
        self._retry = retry
        self._rows, self._columns, self._adapter, self._sink = rows, columns, adapter, sink
        self._scale, self._written = scale, 0
        self._size = tuple(side * scale for side in size)
        spans = [rows.span(index) for index in range(len(rows.starts))]
        most = max(high - low for low, high in spans) * scale
        self._blended = rows.blended or columns.blended
        self._strip = np.zeros(
            (min(most, self._size[0]), self._size[1], adapter.channels),
            np.float32 if self._blended else adapter.dtype,
        )

    def add(self, row: int, column: int, tile: np.ndarray) -> None:
        """Merge one tile, float32 (H·s, W·s, C)."""
        top, bottom = self._clip(self._rows.span(row), 0)
        left, right = self._clip(self._columns.span(column), 1)
        if top >= bottom or left >= right:
            return
        y, x = self._rows.starts[row] * self._scale, self._columns.starts[column] * self._scale
        part = tile[top - y : bottom - y, left - x : right - x]
        base = self._rows.span(row)[0] * self._scale
        target = self._strip[top - base : bottom - base, left:right]
        if not self._blended:
            for start in range(0, len(part), _WRITE_ROWS):
                block = slice(start, start + _WRITE_ROWS)
                target[block] = self._retry(partial(self._adapter.to_sink, part[block]))
            return
        down = self._rows.weights(row, self._scale)[: bottom - top, None]
        across = self._columns.weights(column, self._scale)[None, : right - left]
        weights = (down * across)[..., None]
        target += self._retry(lambda: part * weights)

    def finish_row(self, row: int) -> int:
        """Write the rows that no later tile changes, and return their number."""
        first = self._rows.span(row)[0] * self._scale
        last = min(self._rows.final_end(row) * self._scale, self._size[0])
        count = max(0, last - first)
        if self._blended:
            for start in range(0, count, _WRITE_ROWS):
                rows = self._strip[start : min(start + _WRITE_ROWS, count)]
                self._write(self._retry(partial(self._adapter.to_sink, rows)))
            end = min(self._rows.span(row)[1] * self._scale, self._size[0])  # without padding
            self._carry_over(count, end - last)
        elif count:
            self._write(self._strip[:count])
        return count

    def _write(self, rows: np.ndarray) -> None:
        self._sink.write(self._written, rows)
        self._written += len(rows)

    def _carry_over(self, written_rows: int, shared_rows: int) -> None:
        """Move the sums shared with the next strip to its top, and clear the rest."""
        if shared_rows > 0:
            self._strip[:shared_rows] = self._strip[written_rows : written_rows + shared_rows]
        self._strip[max(shared_rows, 0) :] = 0

    def _clip(self, span: tuple[int, int], axis: int) -> tuple[int, int]:
        return span[0] * self._scale, min(span[1] * self._scale, self._size[axis])
