"""Dry run of a streamed layout on fake tensors: predicts the memory it holds."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from lowtide.core.heap import MMAP_THRESHOLD_BYTES, trim_heap
from lowtide.core.scratch import ScratchSpace
from lowtide.memory.plan import LedgerRow
from lowtide.memory.plan_store import JsonCacheTable, machine_facts
from lowtide.memory.prediction.calibration import NO_MARGIN
from lowtide.memory.prediction.cpu import TOO_LARGE, CpuWorkspaceMeter, predict_cpu
from lowtide.memory.prediction.cuda import CudaWorkspaceMeter, convolution_settings, predict_cuda
from lowtide.memory.profiles import DeviceProfile
from lowtide.memory.tracing.fake import FakeModelConverter, clear_shape_caches
from lowtide.memory.tracing.trace import MemoryTrace, MemoryTracer
from lowtide.streaming.capture.graph import TensorMeta
from lowtide.streaming.engine.constants import ConstantCache
from lowtide.streaming.engine.executor import BandExecutor, allocate_result, collect_rows
from lowtide.streaming.engine.placement import page_factory
from lowtide.streaming.engine.program import StreamProgram
from lowtide.streaming.pages.page import FeaturePage, MemoryPage
from lowtide.streaming.pages.spilled_page import DiskPage
from lowtide.streaming.pages.transfer import (
    CpuHostTransfer,
    HostBuffer,
    PendingCopy,
)
from lowtide.streaming.planner.layout_search import StreamLayout, layout_store
from lowtide.streaming.spans import Spans, count_rows

_NO_DISPATCH = torch._C._DisableTorchDispatch
# Bands of a single segment after which all are alike: more than its halos reach over.
_TRACED_BANDS = 48
# Ledger rows that belong to the run itself, on the CPU and on a GPU, whose allocator keeps what it
# rounds up.
_RUN_ROWS = ("live activations", "workspace"), ("live activations", "workspace", "allocator")


@dataclass(frozen=True)
class DryRunResult:
    """Predicted memory of one streamed run.

    Attributes:
        rows: Ledger rows, without weights and inputs.
        peak_bytes: Peak of bands, pages in memory and workspaces by these rows.
    """

    rows: tuple[LedgerRow, ...]
    peak_bytes: int


def dry_run(
    program: StreamProgram,
    layout: StreamLayout,
    *,
    whole_image: bool,
    profile: DeviceProfile | None = None,
    before_computing: Callable[[], None] = lambda: None,
) -> DryRunResult:
    """Predict the memory of one image's run in addition to weights and input.

    Storages are followed exactly. The workspace of each operator is measured once; for a GPU known
    only by its ``profile``, the profile's workspace counts. On the CPU the row ``allocator`` is
    what is live in blocks that a heap may keep after they are freed. For a GPU, storages pass
    through a simulation of the caching allocator. The result is cached in the cache folder.

    Args:
        program: The captured program.
        layout: Its cuts, bands and pages.
        whole_image: Whether the image is held whole and the result is put together, which then
            counts; otherwise both are files that are read and written by rows.
        profile: The GPU to predict for; None for this machine's CPU.
        before_computing: Called unless the result is stored.
    """
    store = layout_store(program)
    where = ""
    if profile is not None:
        measured = convolution_settings() if program.graph.gpu else "not here"
        where = f" on {profile.name} {measured}"
    key = f"takes {layout.key} {whole_image}{where}"
    kept = store.get(key)
    if kept is None:
        before_computing()
        rows, sure = _predict(program, layout, whole_image, profile)
        if sure:
            store.put(key, [asdict(row) for row in rows])
            store.save()
    else:
        rows = tuple(LedgerRow(**row) for row in kept)
    own = _RUN_ROWS[profile is not None]
    return DryRunResult(rows, sum(row.value for row in rows if row.name in own))


def _predict(
    program: StreamProgram,
    layout: StreamLayout,
    whole_image: bool,
    profile: DeviceProfile | None,
) -> tuple[tuple[LedgerRow, ...], bool]:
    """Return the rows, and whether they may be cached.

    They may not where an operator too large for the memory that is free now counts at its bound.
    """
    trace, sure = trace_stream_run(program, layout, whole_image=whole_image), True
    if profile is None:
        scratch = CpuWorkspaceMeter(JsonCacheTable("operators", *machine_facts()))
        rows = predict_cpu(trace, scratch, NO_MARGIN).rows
        scratch.store.save()
        sure = all(why != TOO_LARGE for _, why in scratch.assumed.values())
        rows = [_with_heap_kept(row, trace) if row.name == "allocator" else row for row in rows]
    else:
        gpu = program.graph.gpu
        measured = CudaWorkspaceMeter(gpu) if gpu else None
        scratch = measured.conv_workspace if measured else None
        rows = predict_cuda(trace, profile, NO_MARGIN, scratch).rows
        if measured:
            measured.store.save()
    # Thousands of events, and what was measured, would count against the run that follows.
    del trace
    clear_shape_caches()
    trim_heap(collect=True)
    kept = (row for row in rows if row.name not in ("weights", "inputs", "margin"))
    return tuple(kept), sure


def _with_heap_kept(row: LedgerRow, trace: MemoryTrace) -> LedgerRow:
    """Return the row with the bytes live at the peak in blocks that the heap keeps."""
    sizes = trace.sizes_during(trace.peak_op(), include_initial=False)
    small = sum(size for size in sizes if size < MMAP_THRESHOLD_BYTES)
    return replace(row, value=small, upper=small)


def trace_stream_run(
    program: StreamProgram, layout: StreamLayout, *, whole_image: bool
) -> MemoryTrace:
    """Trace one image's run: weights, bands, pages in memory, masks and operators."""
    faker = FakeModelConverter()
    twin, weights = _with_fake_weights(program, faker)
    tracer = MemoryTracer(keep_calls=True, call=faker.calls)
    graph = program.graph
    streamed = [(graph.nodes[one].meta, program.rows[one].dim) for one in graph.inputs]
    executor = BandExecutor(
        twin,
        layout.segments,
        layout.bands,
        page_factory(
            twin,
            layout.placement,
            torch.device("cpu"),
            resident=layout.resident,
            disk_page_class=_FakeDiskPage,
            transfer=_FakeTransfer(),
        ),
        _FakeConstants(twin, ConstantCache(program)),
    )
    with faker.fake_mode():
        tracer.label(weights, "weights")
        fixed = [torch.empty(meta.shape, dtype=meta.dtype) for meta in map(graph.meta, graph.fixed)]
        sources: list[FeaturePage] = [_FakeSource(meta, dim) for meta, dim in streamed]
        # kept alive: they are the caller's.
        given = [torch.empty(meta.shape, dtype=meta.dtype) for meta, _ in streamed if whole_image]
        tracer.label([*given, *fixed], "inputs")
        if whole_image:
            dims = (dim for _, dim in streamed)
            sources = [MemoryPage.from_tensor(*one) for one in zip(given, dims, strict=True)]
        with tracer:
            early = whole_image and not program.graph.on_cpu
            result = allocate_result(twin, torch.device("cpu")) if early else None
            made = itertools.islice(executor.run(sources, fixed), _traced_bands(layout))
            if whole_image:
                collect_rows(twin, made, result)
            deque(made, maxlen=0)  # free each band before the next one is computed
    return tracer.trace


def _traced_bands(layout: StreamLayout) -> int | None:
    """Return how many bands to trace, or None for all.

    Where nothing is kept for a later segment, bands after the first few take the same memory.
    """
    return _TRACED_BANDS if len(layout.segments) == 1 else None


def _with_fake_weights(
    program: StreamProgram, faker: FakeModelConverter
) -> tuple[StreamProgram, list[Tensor]]:
    """Return the program with fake weights, and these weights."""
    fakes = faker.tree({index: tensor.detach() for index, tensor in program.graph.tensors.items()})
    twin = copy.copy(program)
    twin.graph = copy.copy(program.graph)
    twin.graph.tensors = fakes
    return twin, list(fakes.values())


class _FakeConstants(ConstantCache):
    """Fake constants; which of them are equal is looked up in the real ones."""

    def __init__(self, program: StreamProgram, real: ConstantCache) -> None:
        super().__init__(program)
        self._real = real

    def _digests(
        self, part: Tensor, place: tuple[int, ...], *, of_slices: bool
    ) -> list[bytes | None]:
        known, about = self._program.constant_digests, (place, of_slices)
        if about not in known:
            with _NO_DISPATCH():
                known[about] = self._real.grain_digests(*place, of_slices=of_slices)
        return known[about]

    def _record_sources(self, index: int) -> None:
        """Cache nothing: fake tensors have no values."""


class _FakeSource(FeaturePage):
    """Fake rows of a file, created when they are read."""

    def __init__(self, meta: TensorMeta, dim: int) -> None:
        self._meta, self._dim = meta, dim
        self.device = torch.device("cpu")

    def read(self, spans: Spans) -> Tensor:
        """Return new fake rows of these spans."""
        shape = list(self._meta.shape)
        shape[self._dim] = count_rows(spans)
        return torch.empty(shape, dtype=self._meta.dtype)

    def write(self, first: int, rows: Tensor) -> None:
        """Do nothing: a source is read-only."""


class _FakeDiskPage(DiskPage):
    """Page on disk without a file."""

    def _open(self, space: ScratchSpace) -> None:
        pass

    def _write_bytes(self, at: int, raw: Tensor) -> None:
        pass

    def _read_bytes(self, at: int, buffer: Tensor) -> None:
        pass

    def close(self) -> None:
        """Do nothing: there is no file."""


class _FakeTransfer(CpuHostTransfer):
    """Host transfer of a GPU without a GPU: only device memory counts."""

    def allocate(self, nbytes: int) -> HostBuffer:
        """Return an empty buffer: host memory does not count."""
        return HostBuffer(torch.empty(0))

    def store(self, source: Tensor, buffer: HostBuffer, at: int) -> PendingCopy:
        """Hold ``source`` until its memory is released."""
        return PendingCopy(source)

    def fetch(
        self,
        buffer: HostBuffer,
        byte_ranges: Sequence[tuple[int, int]],
        destination: Tensor,
        after: PendingCopy | None = None,
    ) -> PendingCopy:
        """Return ``destination``: its device memory is allocated already."""
        return PendingCopy(destination)
