"""Run of a program from a source to a sink, both along their leading axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import NotFiniteError
from lowtide.core.signal import Adapter, Sink, Source
from lowtide.streaming.engine.executor import BandExecutor, OutputRows
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.engine.source_page import SourcePage, SourceRows

BandIterator = Iterator[OutputRows]
# Result rows converted at once: copies of more would add to the peak of narrow bands.
WRITE_ROWS = 32


class FloatAdapter:
    """`lowtide.core.signal.Adapter` for values that a network takes and returns as they are."""

    inputs, context, dtype = 1, None, np.dtype(np.float32)

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def to_network(self, values: np.ndarray) -> np.ndarray:
        """Move the channels of (B, N, ..., C) after the batch."""
        return np.array(np.moveaxis(values, -1, 1), np.float32, order="C")

    def from_network(self, results: np.ndarray, values: np.ndarray | None) -> np.ndarray:
        """Move the channels of (B, C, N·s, ...) to the end."""
        return np.moveaxis(results, 1, -1)

    def to_sink(self, floats: np.ndarray) -> np.ndarray:
        """Return the values themselves."""
        return floats


def run_source(
    executor: BandExecutor,
    program: StreamProgram,
    source: Source,
    sink: Sink,
    adapter: Adapter,
    *,
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
    on_band: Callable[[float], None] | None = None,
    before_step: Callable[[int], object] | None = None,
) -> None:
    """Run the program of an executor, of one input (B, C, N, ...) along N, band by band.

    The source is padded by reflection to the size of the program, and the result cropped. Inputs
    that an adapter makes of one source go through the network as interleaved runs, each with its
    own bands.

    Raises:
        NotFiniteError: The result has NaN or infinite values.
        Exception: Whatever the source, the sink and the callbacks raise.
    """
    (given,) = program.graph.inputs
    size = program.graph.nodes[given].meta.shape[2:]
    source_rows = SourceRows(source, size)
    writer = _Writer(program, source_rows, source.shape[:-1], sink, adapter)
    pages = [
        SourcePage(source_rows, adapter, index, device, memory_format)
        for index in range(adapter.inputs)
    ]
    for page in pages:
        page.retain([(0, size[0])])
    runs = [executor.run([page], (), on_band, before_step) for page in pages]
    try:
        for results in _interleave(runs):
            writer.write(results[0][1], [rows for _, _, rows in results])
            del results  # free these rows before the next band is computed
    finally:
        for run in runs:
            run.close()


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


class _Writer:
    """Conversion of result rows to values of the sink; crops the padding.

    ``size`` is that of the source without its channels.
    """

    def __init__(
        self,
        program: StreamProgram,
        source_rows: SourceRows,
        size: Sequence[int],
        sink: Sink,
        adapter: Adapter,
    ) -> None:
        self._source_rows, self._sink, self._adapter = source_rows, sink, adapter
        (given,) = program.graph.inputs
        before, after = (
            program.graph.nodes[index].meta.shape[2:] for index in (given, program.output)
        )
        # A result of fewer rows than the source is converted without context, row by row.
        self._size, self._scale = size, max(1, after[0] // before[0])
        self._cropped = [
            -(-side * made // read) for side, read, made in zip(size, before, after, strict=True)
        ]
        self._free_rows_before(0)

    def write(self, first: int, results: list[Tensor]) -> None:
        """Write rows from ``first`` on, one (1, C, N, ...) for each input of the network."""
        scale = self._scale
        count = min(results[0].shape[2], self._cropped[0] - first)
        # A block is a multiple of whole source rows.
        block = -(-WRITE_ROWS // scale) * scale
        start = 0
        while start < count:
            stop = min(count, (first + start) // scale * scale + block - first)
            part = torch.cat([one[:, :, start:stop] for one in results]).float().cpu()
            self._sink.write(first + start, self._to_sink(first + start, part))
            start = stop
        self._free_rows_before((first + count) // scale)

    def _to_sink(self, first: int, part: Tensor) -> np.ndarray:
        if not torch.isfinite(part.sum()):
            raise NotFiniteError
        for dim, side in enumerate(self._cropped[1:], start=3):
            part = part.narrow(dim, 0, side)
        adapter, scale, count = self._adapter, self._scale, part.shape[2]
        if adapter.context is None:
            return adapter.to_sink(adapter.from_network(part.numpy(), None)[0])
        # Whole source rows, with the context that the conversion reads.
        low = max(0, first // scale - adapter.context)
        high = min(self._size[0], -(-(first + count) // scale) + adapter.context)
        inside = (slice(None), *map(slice, self._size[1:]))
        values = self._source_rows.rows(low, high)[inside]
        above, below = first - low * scale, high * scale - first - count
        around = [(0, 0)] * 2 + [(above, below)] + [(0, 0)] * (part.dim() - 3)
        floats = adapter.from_network(np.pad(part.numpy(), around), values[None])[0]
        return adapter.to_sink(floats[above : above + count])

    def _free_rows_before(self, row: int) -> None:
        """Free the source rows that the conversion from result row ``row`` on does not read."""
        context = self._adapter.context
        kept = [] if context is None else [(max(0, row - context), self._size[0])]
        self._source_rows.retain(self, kept)
