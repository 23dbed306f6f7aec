"""Strategy `streamed`: run a file through a network band by band into a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import NotFiniteError, UsageError
from lowtide.core.progress import Cancel, check_cancel
from lowtide.core.scratch import ScratchSpace
from lowtide.core.signal import RowSource, RowWriter
from lowtide.memory.strategy import ImageGeometry, StreamedStrategy
from lowtide.streaming.engine.executor import BandExecutor, OutputRows
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.tiles.source_page import SourcePage, SourceRows
from lowtide.streaming.tiles.tile_step import NetworkSpec, TileStep

BandIterator = Iterator[OutputRows]
# Result rows converted at once: copies of more would add to the peak of narrow bands.
WRITE_ROWS = 32


def run_streamed(
    network: NetworkSpec,
    program: StreamProgram,
    source: RowSource,
    sink: RowWriter,
    image: ImageGeometry,
    bands: StreamedStrategy,
    *,
    scratch: ScratchSpace,
    on_rows: Callable[[int], None] | None = None,
    cancel: Cancel = None,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """Run a whole image file band by band.

    Color and opacity go through the network as two interleaved runs, each with its own bands.

    Args:
        network: Network to run.
        program: Program of the network, captured at the size of ``image``.
        source: Image file to read.
        sink: Image file to write.
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
    height, width = image.padded_size
    segments = cut_segments(program, bands.cuts, bands.recompute_limit)
    same = bands.graph_digest == program.operators_digest
    if not same or len(segments) != len(bands.bands):
        raise UsageError(
            "the plan was made for another network, or by another version",
            hint="make the plan again",
        )
    step = TileStep(network, source.info)
    samples = SourceRows(source, height, width)
    writer = _Writer(step, samples, sink, image)
    meter = _Meter(image, on_rows, cancel)
    make_page = page_factory(
        program,
        bands.pages,
        torch.device(network.device),
        scratch,
        resident=frozenset(bands.resident),
    )
    executor = BandExecutor(
        program, segments, bands.bands, make_page, arena_bytes=bands.arena_bytes
    )
    pages = [
        SourcePage(samples, step, index, height)
        for index in range(step.channel_plan.inputs_per_tile)
    ]
    runs = [executor.run([page], (), meter.add_band, before_step) for page in pages]
    try:
        for results in _interleave(runs):
            writer.write(results[0][1], [rows for _, _, rows in results])
            del results  # free these rows before the next band is computed
    finally:
        for run in runs:
            run.close()
    meter.finish()


def _interleave(runs: Sequence[BandIterator]) -> Iterator[list[OutputRows]]:
    """Yield the same band of every run.

    `zip` would hold one band's rows while it computes the next two.
    """
    while True:
        made = [band for run in runs for band in islice(run, 1)]
        if not made:
            return
        if len(made) < len(runs):
            raise AssertionError("the runs of one plan have different numbers of bands")
        yield made
        del made


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


class _Writer:
    """Conversion of result rows to samples of the file's type; crops the padding."""

    def __init__(
        self, step: TileStep, samples: SourceRows, sink: RowWriter, image: ImageGeometry
    ) -> None:
        self._step, self._samples, self._sink, self._image = step, samples, sink, image
        self._free_rows_before(0)

    def write(self, first: int, images: list[Tensor]) -> None:
        """Write rows from ``first`` on, one (1, C, H, W) for each image of the network."""
        scale, height = self._image.scale, self._image.height * self._image.scale
        count = min(images[0].shape[2], height - first)
        # A block is a multiple of whole input rows.
        block = -(-WRITE_ROWS // scale) * scale
        start = 0
        while start < count:
            stop = min(count, (first + start) // scale * scale + block - first)
            part = torch.cat([one[:, :, start:stop] for one in images]).float().cpu()
            self._sink.write(self._to_samples(first + start, part))
            start = stop
        self._free_rows_before((first + count) // scale)

    def _to_samples(self, first: int, part: Tensor) -> np.ndarray:
        if not torch.isfinite(part.sum()):
            raise NotFiniteError
        width = self._image.width * self._image.scale
        part = part[..., :width]
        if not self._step.channel_plan.alpha:
            return self._step.to_samples(self._step.from_network(part, None))
        # The conversion of opacity needs one input row above and below.
        scale, last = self._image.scale, -(-(first + part.shape[2]) // self._image.scale)
        low = max(0, first // scale - 1)
        high = min(self._image.height, last + 1)
        rows = self._samples.rows(low, high)[:, : self._image.width]
        above, below = first - low * scale, high * scale - first - part.shape[2]
        padded = torch.nn.functional.pad(part, (0, 0, above, below))
        unit = self._step.from_network(padded, rows)
        return self._step.to_samples(unit[:, above : above + part.shape[2]])

    def _free_rows_before(self, row: int) -> None:
        """Free the file rows that opacity from output row ``row`` on does not need."""
        below = max(0, row - 1), self._image.height
        self._samples.retain(self, [below] if self._step.channel_plan.alpha else [])
