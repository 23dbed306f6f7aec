"""Run of a program from a source to a sink, both along their leading axis.

Of a source only the rows that a band or a tile reads are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from lowtide.core.errors import NotFiniteError
from lowtide.core.signal import RowSink, RowSource, ValueAdapter
from lowtide.streaming.engine.executor import BandExecutor, OutputRows
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.pages.page import FeaturePage
from lowtide.streaming.row_window import READ_ROWS, read_values, reflect_index
from lowtide.streaming.spans import Spans


class SourceRowBuffer:
    """Row buffer over a source, read once from the top, reflection-padded to ``size``.

    ``size`` is that of all axes but the channels, and rows are along the first of them. They are
    read at first use and freed when no page and no writer needs them.
    """

    def __init__(self, source: RowSource, size: Sequence[int]) -> None:
        self._source, self._length, self._height = source, source.shape[0], size[0]
        self._padding = [
            (axis, [reflect_index(place, real) for place in range(padded)])
            for axis, (real, padded) in enumerate(zip(source.shape[:-1], size, strict=True))
            if axis and padded > real
        ]
        # The last rows, which the bottom padding reflects, stay until the end.
        self._tail = min(
            (reflect_index(y, self._length) for y in range(self._length, size[0])), default=size[0]
        )
        self._pieces: list[tuple[int, np.ndarray]] = []
        self._next_row = 0
        self._retained: dict[object, Spans] = {}

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the padded rows ``first`` to ``last``, (last - first, ..., C)."""
        while self._next_row < min(last, self._length):
            self._read_next()
        whole = [self._gather(start, stop) for start, stop in self._source_spans(first, last)]
        found = whole[0] if len(whole) == 1 else np.concatenate(whole)
        for axis, places in self._padding:
            found = found.take(places, axis)
        return found

    def retain(self, reader: object, spans: Spans) -> None:
        """Declare that ``reader`` reads only these rows from now on, and free the others."""
        self._retained[reader] = spans
        wanted = [
            *(span for spans in self._retained.values() for span in spans),
            (self._tail, self._height),
        ]
        self._pieces = [
            (first, rows)
            for first, rows in self._pieces
            if any(low < first + len(rows) and first < high for low, high in wanted)
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return sum(rows.nbytes for _, rows in self._pieces)

    def _source_spans(self, first: int, last: int) -> Spans:
        """Return the runs of source rows that padded rows ``first`` to ``last`` show."""
        real = self._length
        runs = [(first, min(last, real))] if first < real else []
        for y in range(max(first, real), last):
            shown = reflect_index(y, real)
            runs.append((shown, shown + 1))
        return runs

    def _gather(self, first: int, last: int) -> np.ndarray:
        parts = []
        for start, rows in self._pieces:
            low, high = max(first, start), min(last, start + len(rows))
            if low < high:
                parts.append(rows[low - start : high - start])
        if sum(map(len, parts)) != last - first:
            raise AssertionError(f"rows {first} to {last} of the source are not all in memory")
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_next(self) -> None:
        rows = read_values(self._source, self._next_row, self._next_row + READ_ROWS)
        self._pieces.append((self._next_row, np.array(rows)))
        self._next_row += len(rows)


class SourcePage(FeaturePage):
    """Read-only page of one network input of a source, such as color or opacity."""

    def __init__(
        self,
        source_rows: SourceRowBuffer,
        adapter: ValueAdapter,
        index: int,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self._source_rows, self._adapter, self._index = source_rows, adapter, index
        self.device, self._memory_format = device, memory_format

    def read(self, spans: Spans) -> Tensor:
        """Return rows of the input on the network's device, (1, C, N, ...)."""
        parts = [self._source_rows.rows(*span) for span in spans]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        inputs = torch.from_numpy(self._adapter.to_network(rows[None]))
        one = inputs[self._index : self._index + 1]
        return one.to(self.device).contiguous(memory_format=self._memory_format)

    def retain(self, spans: Spans) -> None:
        """Declare that only these rows are read from now on."""
        self._source_rows.retain(self, spans)

    def close(self) -> None:
        """Release all rows of this page."""
        self.retain([])

    def write(self, first: int, rows: Tensor) -> None:
        """Raise `AssertionError`: a source is read-only."""
        raise AssertionError("a source page is read-only")


BandIterator = Iterator[OutputRows]
# Result rows converted at once: copies of more would add to the peak of narrow bands.
WRITE_ROWS = 32


class IdentityAdapter:
    """`lowtide.core.signal.ValueAdapter` for values that a network takes and returns unchanged."""

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
    source: RowSource,
    sink: RowSink,
    adapter: ValueAdapter,
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
    source_rows = SourceRowBuffer(source, size)
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
        source_rows: SourceRowBuffer,
        size: Sequence[int],
        sink: RowSink,
        adapter: ValueAdapter,
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
