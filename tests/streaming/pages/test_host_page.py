"""Pages in a GPU's host memory: what is fetched when, and what waits for what."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide import BudgetError, UsageError
from lowtide.core.units import MIB
from lowtide.memory.profiles import load_profile
from lowtide.streaming.engine.band_schedule import schedule_bands
from lowtide.streaming.engine.executor import BandExecutor, collect_rows
from lowtide.streaming.engine.placement import allowed_placements, memory_page_factory, page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import CutFinder, cut_segments
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.pages.spilled_page import HostPage
from lowtide.streaming.pages.transfer import (
    CpuHostTransfer,
    CudaHostTransfer,
    PendingCopy,
    PinnedMemoryAllocator,
)
from lowtide.streaming.planner.dry_run import dry_run, trace_stream_run
from lowtide.streaming.planner.layout_search import draft_layouts
from support.band_runs import by_bands, program_of
from support.cuda_streams import Event, Streams

CPU = torch.device("cpu")


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        layers += [nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers).eval().requires_grad_(False)


class Late(CpuHostTransfer):
    """Copies begin when somebody waits for them, and not before."""

    def __init__(self):
        self.begun = self.fetched_late = 0

    def store(self, source, buffer, at):
        late = self

        class Leaving(PendingCopy):
            def wait(self):
                if buffer.write_event is self:
                    buffer.write_event = None
                    CpuHostTransfer.store(late, self.data, buffer, at)

        if buffer.write_event is not None:
            buffer.write_event.wait()
        buffer.write_event = Leaving(source)
        return buffer.write_event

    def fetch(self, buffer, byte_ranges, destination, after=None):
        late, found = self, []
        self.begun += 1
        destination.fill_(255)  # so that nobody finds what was there

        class Coming(PendingCopy):
            def result(self):
                if not found:
                    if buffer.write_event is not None:
                        buffer.write_event.wait()
                    found.append(
                        CpuHostTransfer.fetch(late, buffer, byte_ranges, self.data).result()
                    )
                return found[0]

        return Coming(destination)


@pytest.mark.parametrize("bands", [1, 2, 5, 9])
@pytest.mark.parametrize("carrier", [CpuHostTransfer, Late])
def test_pages_on_the_host_give_the_same_rows(bands, carrier):
    image = torch.rand(1, 3, 61, 40)
    program = program_of(net(), image)
    make_page = page_factory(program, "host", CPU, transfer=carrier())
    found = by_bands(program, image, bands, 4, make_page)
    assert torch.equal(found, by_bands(program, image, bands, 4))


def test_all_bands_were_fetched_ahead(monkeypatch):
    fetched = []

    class Watched(HostPage):
        def read(self, spans):
            before = carrier.begun
            rows = super().read(spans)
            fetched.append(carrier.begun - before)
            return rows

    monkeypatch.setattr("lowtide.streaming.engine.placement.HostPage", Watched)
    image, carrier = torch.rand(1, 3, 61, 40), Late()
    program = program_of(net(), image)
    pages = 3  # one before each norm
    by_bands(program, image, 6, 1, page_factory(program, "host", CPU, transfer=carrier))
    assert sum(fetched) == 0
    assert len(fetched) >= 6 * pages
    assert carrier.begun == 6 * pages


def test_no_page_keeps_rows_on_the_gpu_between_segments(monkeypatch):
    open_pages, kept = [], []

    class Watched(HostPage):
        def __init__(self, *args):
            # A segment begins: what the one before read is not here any longer.
            kept.extend(len(page._prefetched) for page in open_pages)
            super().__init__(*args)
            open_pages.append(self)

        def close(self):
            open_pages.remove(self)
            super().close()

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Conv2d(3, 16, 3, padding=1), net()[1:]

        def forward(self, x):
            found = self.first(x)
            return self.rest(found) + found  # a page from the first segment to the last

    monkeypatch.setattr("lowtide.streaming.engine.placement.HostPage", Watched)
    image = torch.rand(1, 3, 61, 40)
    program = program_of(Skips().eval(), image)
    by_bands(program, image, 6, 1, page_factory(program, "host", CPU, transfer=CpuHostTransfer()))
    assert len(kept) >= 2 and not any(kept)


def test_rows_in_any_order_of_memory_come_back_in_it():
    rows = torch.rand(1, 8, 12, 5).contiguous(memory_format=torch.channels_last)
    page = HostPage(rows.shape, rows.dtype, 2, CpuHostTransfer())
    page.write(0, rows[:, :, :7])
    page.write(7, rows[:, :, 7:])
    page.prefetch([(0, 4), (6, 12)])
    for spans in ([(1, 3)], [(0, 2), (7, 9)], [(6, 12)], [(3, 6)]):
        found = page.read(spans)
        wanted = torch.cat([rows[:, :, first:last] for first, last in spans], 2)
        assert torch.equal(found, wanted)
        assert found.is_contiguous(memory_format=torch.channels_last)


class Noted(CudaHostTransfer):
    """A carrier whose runs were just made by the computing stream, and are read by it."""

    def __init__(self, streams):
        self.streams = streams
        super().__init__(CPU)

    def store(self, source, buffer, at):
        self.streams.access(source, writes=True)
        self.streams.follow(source)
        return super().store(source, buffer, at)

    def fetch(self, buffer, byte_ranges, destination, after=None):
        self.streams.follow(destination)
        return NotedComing(super().fetch(buffer, byte_ranges, destination, after), self.streams)


class NotedComing:
    def __init__(self, coming, streams):
        self._coming, self._streams = coming, streams

    @property
    def reads_done(self):
        return self._coming.reads_done

    def result(self):
        run = self._coming.result()
        self._streams.access(run, writes=False)
        return run

    def end_reads(self):
        self._coming.end_reads()


def test_no_copy_is_in_the_way_of_another_or_of_the_computation(monkeypatch):
    image = torch.rand(1, 3, 61, 40)
    program = program_of(net(), image)
    expected = by_bands(program, image, 5, 4)
    streams = Streams(monkeypatch, frees=True)
    carrier = Noted(streams)
    found = by_bands(program, image, 5, 4, page_factory(program, "host", CPU, transfer=carrier))
    assert torch.equal(found, expected)
    assert len(streams.log) > 60
    assert streams.freed > 20
    assert streams.races == []
    assert streams.recorded == []  # what is freed is free at once


@pytest.mark.parametrize(
    "missing",
    [
        "nothing",
        "out waits",
        "back waits",
        "there waits",
        "here waits",
        "over waits",
    ],
)
def test_a_missing_wait_is_a_race(monkeypatch, missing):
    streams = Streams(monkeypatch, frees=True)
    carrier = Noted(streams)
    if missing in ("out waits", "back waits"):
        stream = carrier._store_stream if missing == "out waits" else carrier._fetch_stream
        monkeypatch.setattr(stream, "wait_event", lambda event: None)
    if missing == "here waits":
        monkeypatch.setattr(PendingCopy, "wait", lambda self: None)
    if missing == "over waits":
        monkeypatch.setattr(
            PendingCopy, "end_reads", lambda self: setattr(self, "reads_done", nothing)
        )
    nothing = Event({}, streams)
    carrier.allocate(64)  # so that rooms are kept, and not unlocked
    rooms, former, memory = [], None, torch.empty(64, dtype=torch.uint8)
    for number in range(2):
        room, run = carrier.allocate(64), torch.full((64,), number, dtype=torch.uint8)
        leaving = carrier.store(run, room, 0)
        if missing != "there waits":
            leaving.wait()
        del run, leaving
        rooms.append(room)
    for room in rooms:
        former = carrier.fetch(room, [(0, 64)], memory, former)
        former.result()
        former.end_reads()
        carrier.release(room)
    del former, memory
    assert streams.freed == 3
    assert bool(streams.races) == (missing != "nothing")


def locked(monkeypatch, image):
    """Sizes of the rooms that each of three runs by one carrier takes anew."""
    Streams(monkeypatch)
    taken: list[int] = []
    monkeypatch.setattr(
        PinnedMemoryAllocator,
        "empty",
        lambda self, nbytes: taken.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8),
    )
    program, carrier, found = program_of(net(), image), CudaHostTransfer(CPU), []
    for _ in range(3):
        before = len(taken)
        by_bands(program, image, 5, 4, page_factory(program, "host", CPU, transfer=carrier))
        found.append(taken[before:])
    return found


def test_host_buffers_are_kept_for_the_next_run(monkeypatch):
    first, *others = locked(monkeypatch, torch.rand(1, 3, 61, 40))
    assert first
    assert others == [[], []]


def test_large_host_buffers_are_freed_with_the_run(monkeypatch):
    monkeypatch.setattr("lowtide.streaming.pages.transfer.total_host_bytes", lambda: 1000)
    first, *others = locked(monkeypatch, torch.rand(1, 3, 61, 40))
    assert first
    assert others == [first, first]


def test_a_gpu_does_not_wait_for_plans_again(monkeypatch):
    planned = []

    def noted(program, segment, bands):
        planned.append(segment)
        return schedule_bands(program, segment, bands)

    monkeypatch.setattr("lowtide.streaming.engine.executor.schedule_bands", noted)
    image = torch.rand(1, 3, 61, 40)
    program = program_of(net(), image)
    program.graph.on_cpu = False  # as for a model on a GPU
    segments = cut_segments(program, CutFinder(program).cuts(3))
    sweep = BandExecutor(program, segments, [5] * len(segments), memory_page_factory(program, CPU))
    results = [
        collect_rows(program, sweep.run([MemoryPage.from_tensor(image, 2)]))[0] for _ in range(2)
    ]
    assert len(planned) == len(segments) > 1
    assert torch.equal(*results)


def test_a_gpu_waits_for_copies_and_python_for_nothing(monkeypatch):
    streams, made = Streams(monkeypatch), []
    carrier = CudaHostTransfer(CPU)
    page = HostPage((1, 1, 64, 8), torch.float32, 2, carrier)
    for first in range(0, 64, 8):
        page.write(first, torch.rand(1, 1, 8, 8))
        # All but the last copy are done before anything else is computed.
        assert streams.computing.clock.get("copies 1", 0) >= 2 * (first // 8)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or torch.zeros(*a, **k))
    page.prefetch([(0, 7)])
    assert made == []  # as much for both: the second may need more
    page.prefetch([(6, 15)])
    assert made == [(9 * 32,), (9 * 32,)]
    for first in range(0, 48, 8):
        page.read([(first, first + 7)])
        read = streams.computing.begin()["computing"]
        assert carrier._fetch_stream.clock["computing"] < read
        page.prefetch([(first + 14, first + 23)])
        # Into the memory of what was just read.
        assert carrier._fetch_stream.clock["computing"] >= read
    assert len(made) == 2
    page.prefetch([])
    assert not page._prefetched
    assert streams.host == {}


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_held_rows_survive_reuse_of_their_memory(format):
    rows = torch.rand(1, 4, 24, 5).contiguous(memory_format=format)
    page = HostPage(rows.shape, rows.dtype, 2, CpuHostTransfer())
    page.write(0, rows)
    held = []
    page.prefetch([(0, 8)])
    page.prefetch([(8, 16)])
    for first in range(0, 16, 8):
        held.append(page.read([(first, first + 8)]))
        page.prefetch([(first + 8, first + 16)])
    assert torch.equal(torch.cat(held, 2), rows[:, :, :16])
    page.close()


def test_gpu_memory_is_predicted_without_a_gpu():
    image = torch.rand(1, 3, 256, 192)
    program = lower_to_rows(program_of(net(), image).graph)
    drafts = list(draft_layouts(program, (MIB,), ("memory", "host", "disk")))
    by_place = {one.placement: one for one in drafts}
    assert set(by_place) == {"memory", "host", "disk"}
    assert by_place["memory"].overhead_seconds < by_place["host"].overhead_seconds
    assert by_place["host"].overhead_seconds < by_place["disk"].overhead_seconds
    lives = {
        place: trace_stream_run(program, layout, whole_image=True).peak_bytes
        for place, layout in by_place.items()
    }
    assert lives["host"] < lives["memory"] - by_place["memory"].pages_bytes / 2
    # Rows on their way, both for this band and for the next one.
    assert lives["disk"] <= lives["host"]
    profile = load_profile("rtx3060-12gb")
    predicted = {
        place: dry_run(program, layout, whole_image=True, profile=profile).peak_bytes
        for place, layout in by_place.items()
    }
    assert predicted["host"] < predicted["memory"]
    assert allowed_placements(torch.device("cuda"), "auto") == ("memory", "host", "disk")
    assert allowed_placements(CPU, "auto") == ("memory", "disk")


def test_the_host_of_a_cpu_is_itself():
    with torch.no_grad(), pytest.raises(UsageError, match="pages are in host memory anyway"):
        lowtide.stream(net(), budget="1GiB", pages="host")(torch.rand(1, 3, 32, 32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_pinned_memory_is_exact_and_limited():
    pinned = PinnedMemoryAllocator()
    memory = pinned.empty(5 * MIB + 1)
    assert memory.is_pinned()
    assert pinned.pinned_bytes == 5 * MIB + 1
    pinned.limit_bytes = 6 * MIB
    assert not pinned.empty(2 * MIB).is_pinned()
    pinned.close()
    assert not memory.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("pages", ["memory", "host", "disk"])
def test_a_gpu_gives_the_same_rows(pages, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = net().cuda().requires_grad_(False)
    image = torch.rand(1, 3, 261, 190, device="cuda")
    small = lowtide.stream(model, budget="1GiB", pages=pages)
    assert (small(image) - model(image)).abs().max() <= 2e-5
    assert (small(image) - model(image)).abs().max() <= 2e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reserves_what_is_predicted_for_host_pages(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    model = net().to("cuda", dtype)
    image = torch.rand(1, 3, 1536, 1024, device="cuda", dtype=dtype)
    with pytest.raises(BudgetError) as error:
        lowtide.stream(model, budget="8MiB", pages="host").prepare(image)
    assert error.value.smallest is not None
    small = lowtide.stream(model, budget=int(1.2 * error.value.smallest), pages="host")
    predicted = small.prepare(image).layout.peak_bytes
    with torch.inference_mode():
        small(image)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        small(image)
    assert torch.cuda.max_memory_reserved() - before <= 1.02 * predicted
