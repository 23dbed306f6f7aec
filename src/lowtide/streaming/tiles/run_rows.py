"""Strategy `streamed`: run a source through a network band by band into a sink."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowtide.core.errors import UsageError
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.scratch import ScratchSpace
from lowtide.core.signal import Adapter, Sink, Source
from lowtide.memory.strategy import ImageGeometry, StreamedStrategy
from lowtide.streaming.engine.executor import BandExecutor
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.engine.source_run import run_source
from lowtide.streaming.tiles.tile_step import NetworkSpec


def run_streamed(
    network: NetworkSpec,
    adapter: Adapter,
    program: StreamProgram,
    source: Source,
    sink: Sink,
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
        check_cancel(self._cancel)
        self._share += share / self._inputs
        self._progress.advance_to(int(self._share * self._total))

    def finish(self) -> None:
        """Report that all rows are written."""
        self._progress.finish()
