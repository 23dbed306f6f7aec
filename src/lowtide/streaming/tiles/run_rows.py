"""Strategy `streamed`: run a source through a network band by band into a sink.

Rows that a network holds between bands are as long as the image is wide. A wide image runs in
vertical panels, one after another, with rows as long as a panel. What grows with the image is then
on disk: the panels' shares of the file, read once, and their results, until all can be joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from lowtide.core.errors import UsageError
from lowtide.core.heap import trim_heap
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.core.scratch import ScratchFile, ScratchSpace
from lowtide.core.signal import ClosedOnExit, RowSink, RowSource, ValueAdapter
from lowtide.memory.plan import ImageGeometry, StreamedStrategy
from lowtide.streaming.engine.executor import BandExecutor
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.engine.source_run import run_source
from lowtide.streaming.row_window import read_values
from lowtide.streaming.tiles.grid import TileAxis, split_axis
from lowtide.streaming.tiles.network import RunnableNetwork


def run_streamed(
    network: RunnableNetwork,
    adapter: ValueAdapter,
    program: StreamProgram,
    source: RowSource,
    sink: RowSink,
    image: ImageGeometry,
    bands: StreamedStrategy,
    *,
    scratch: ScratchSpace,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """Run a whole source band by band.

    Args:
        network: Network to run.
        adapter: Conversion between source, network and sink.
        program: Program of the network, captured at the size of ``image``.
        source: What to read.
        sink: What to write.
        image: Sizes of the image.
        bands: Segments and bands to run.
        scratch: Disk space for pages that do not fit in memory.
        on_rows: Called with progress as a number of output rows. Rows stand for shares of the work,
            since segments before the last make no output.
        cancel: Checked after each band.
        before_step: Called before each operator with an estimate of the bytes that it needs.

    Raises:
        Cancelled: ``cancel`` was set.
        ModelError: The network failed.
        NotFiniteError: The result has NaN or infinite values.
        UsageError: The plan was made for another network.
        Exception: Whatever the source and the sink raise.
    """
    segments = cut_segments(program, bands.cuts)
    same = bands.graph_digest == program.operators_digest
    if not same or len(segments) != len(bands.bands):
        raise UsageError(
            "the plan was made for another network, or by another version",
            hint="make the plan again",
        )
    meter, device = _Meter(image, on_rows, cancel), torch.device(network.device)
    make_page = page_factory(
        program, bands.pages, device, scratch, resident=frozenset(bands.resident)
    )
    executor = BandExecutor(program, segments, bands.bands, make_page)
    run_source(
        executor,
        program,
        source,
        sink,
        adapter,
        device=device,
        memory_format=network.memory_format,
        on_band=meter.add_band,
        before_step=before_step,
    )
    meter.finish()


class RowProgress:
    """Progress as output rows; the last row is reported only when all is written.

    Args:
        total: Number of output rows.
        on_rows: Called with the number of rows since the last call.
    """

    def __init__(self, total: int, on_rows: Callable[[int], None] | None) -> None:
        self._total, self._on_rows, self._reported = total, on_rows, 0

    def advance_to(self, rows: int) -> None:
        """Report that ``rows`` of all rows are done."""
        self._report(min(rows, self._total - 1))

    def finish(self) -> None:
        """Report that all rows are written."""
        self._report(self._total)

    def _report(self, rows: int) -> None:
        if self._on_rows is not None and rows > self._reported:
            self._on_rows(rows - self._reported)
            self._reported = rows


class _Meter:
    """Progress in shares of the work, reported as rows; checks for cancellation."""

    def __init__(
        self, image: ImageGeometry, on_rows: Callable[[int], None] | None, cancel: Cancel
    ) -> None:
        self._total, self._inputs = image.height * image.scale, image.network_inputs
        self._progress = RowProgress(self._total, on_rows)
        self._cancel = cancel
        self._share = 0.0

    def add_band(self, share: float) -> None:
        """Report a band that was this share of one network input's work."""
        raise_if_cancelled(self._cancel)
        self._share += share / self._inputs
        self._progress.advance_to(int(self._share * self._total))

    def finish(self) -> None:
        """Report that all rows are written."""
        self._progress.finish()


# Rows copied from file to file at once.
COPY_ROWS = 16


def panel_columns(image: ImageGeometry, bands: StreamedStrategy) -> TileAxis:
    """Return the column grid of the panels that a wide image runs in."""
    return split_axis(image.padded_width, bands.panel_width, bands.panel_overlap, align=image.align)


def run_panels(
    network: RunnableNetwork,
    adapter: ValueAdapter,
    program: StreamProgram,
    source: RowSource,
    sink: RowSink,
    image: ImageGeometry,
    bands: StreamedStrategy,
    *,
    scratch: ScratchSpace,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """Run an image panel by panel, otherwise as `run_streamed`.

    ``source`` is closed before the first panel runs. Raises what `run_streamed` does, and
    `OutputError` when the disk of ``scratch`` is full.
    """
    columns = panel_columns(image, bands)
    progress, done = RowProgress(image.height * image.scale, on_rows), 0

    def more(rows: int) -> None:
        """Count finished rows of one panel."""
        nonlocal done
        done += rows
        progress.advance_to(done // len(columns.starts))

    height, width, channels = source.shape
    with ExitStack() as files:
        panels = [
            files.enter_context(
                ScratchRowFile((height, each, channels), source.dtype, scratch.folder)
            )
            for _, each in _panel_spans(columns, width)
        ]
        _split_into_panels(source, panels, columns, cancel)
        # The memory of its decoder would stay allocated while every panel runs.
        source.close()
        trim_heap(collect=True)
        results = list[ScratchRowFile]()
        for index, panel in enumerate(panels):
            low, high = columns.span(index)
            owned_width = min(high, image.width) - low
            shape = height * image.scale, owned_width * image.scale, adapter.channels
            result = ScratchRowFile(shape, adapter.dtype, scratch.folder)
            results.append(files.enter_context(result))
            left = (low - columns.starts[index]) * image.scale
            run_streamed(
                network,
                adapter,
                program,
                panel,
                _PanelSink(result, left),
                image.model_copy(
                    update={"width": panel.shape[1], "padded_width": bands.panel_width}
                ),
                bands,
                scratch=scratch,
                on_rows=more,
                cancel=cancel,
                before_step=before_step,
            )
            panel.close()
            # Blocks of the next panel do not fit the gaps that this one left.
            trim_heap(collect=True)
        _join_panels(results, sink, image.height * image.scale, cancel)
    progress.finish()


def _panel_spans(columns: TileAxis, width: int) -> list[tuple[int, int]]:
    """Return (first column, columns) of each panel in the file.

    Padding is not included; it is created again.
    """
    return [(start, min(columns.tile, width - start)) for start in columns.starts]


def _split_into_panels(
    source: RowSource, panels: Sequence[ScratchRowFile], columns: TileAxis, cancel: Cancel
) -> None:
    """Write each panel's columns of every row to its file."""
    shares = _panel_spans(columns, source.shape[1])
    for top in range(0, source.shape[0], COPY_ROWS):
        raise_if_cancelled(cancel)
        rows = read_values(source, top, top + COPY_ROWS)
        for (left, width), panel in zip(shares, panels, strict=True):
            panel.write(top, rows[:, left : left + width])


def _join_panels(
    results: Sequence[ScratchRowFile], sink: RowSink, height: int, cancel: Cancel
) -> None:
    for top in range(0, height, COPY_ROWS):
        raise_if_cancelled(cancel)
        last = min(top + COPY_ROWS, height)
        sink.write(top, np.concatenate([panel.read(top, last) for panel in results], axis=1))


class ScratchRowFile(ClosedOnExit):
    """Scratch file of rows, a sink and then a source; its place on disk is freed by `close`."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic], folder: Path | None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._file = ScratchFile(folder)

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows (N, W, C) from ``first`` on."""
        data = np.ascontiguousarray(values)
        self._file.write(first * self._row_bytes, data.data.cast("B"))

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows from ``first`` to before ``last``."""
        rows = np.empty((last - first, *self.shape[1:]), self.dtype)
        self._file.read(first * self._row_bytes, rows.data.cast("B"))
        return rows

    def close(self) -> None:
        """Free the disk space; may be called more than once."""
        self._file.close()


class _PanelSink:
    """Sink of a panel's results that passes on the columns the panel owns.

    From column ``left`` on, as many as ``target`` is wide.
    """

    def __init__(self, target: ScratchRowFile, left: int) -> None:
        self._target, self._left = target, left

    def write(self, first: int, values: np.ndarray) -> None:
        self._target.write(first, values[:, self._left : self._left + self._target.shape[1]])
