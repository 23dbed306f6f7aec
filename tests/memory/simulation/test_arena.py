"""The arena that a GPU's allocator splits: its size, and that runs use it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.units import MIB
from lowtide.memory.prediction.calibration import NO_MARGIN
from lowtide.memory.prediction.cuda import _events, predict_cuda
from lowtide.memory.prediction.estimate import trace_step
from lowtide.memory.profiles import load_profile
from lowtide.memory.simulation.arena_search import best_arena_bytes, replay_with_arena
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.memory.tracing.tracer import Tracer
from lowtide.streaming.capture.export_graph import capture
from lowtide.streaming.capture.graph import Graph
from lowtide.streaming.engine import arena
from lowtide.streaming.engine.executor import BandExecutor, collect_rows
from lowtide.streaming.engine.placement import memory_page_factory
from lowtide.streaming.engine.program import lower_to_rows
from lowtide.streaming.engine.segments import cut_segments
from lowtide.streaming.pages.page import MemoryPage
from lowtide.streaming.planner.dry_run import dry_run, trace_run
from lowtide.streaming.planner.layout_search import LayoutSearch

HELD = [(-10, 30 * MIB)]


def growing(steps=40):
    """Maps of many sizes, of which two live at once."""
    sizes = [(11 + 2 * step) * MIB for step in range(steps)]
    events = [(0, sizes[0])]
    for step, size in enumerate(sizes[1:], 1):
        events += [(step, size), (step - 1, -sizes[step - 1])]
    return [*events, (steps - 1, -sizes[-1])]


def drawn(seed):
    source, events, alive = random.Random(seed), list[tuple[int, int]](), list[int]()
    for storage in range(300):
        events.append((storage, source.randint(1, 40 * MIB)))
        alive.append(storage)
        while len(alive) > source.randint(1, 6):
            gone = alive.pop(source.randrange(len(alive)))
            events.append((gone, -dict(events)[gone]))
    return events


def test_one_piece_leaves_fewer_gaps_than_segments_of_all_sizes():
    events = growing()
    best, without = best_arena_bytes(HELD, events), replay_with_arena(HELD, events)
    assert without.peak_reserved - 30 * MIB > 2 * (without.peak_allocated - 30 * MIB)
    assert 0 < best < 1.35 * (without.peak_allocated - 30 * MIB)
    assert replay_with_arena(HELD, events, best).peak_reserved < 0.7 * without.peak_reserved


@pytest.mark.parametrize("seed", range(8))
def test_a_piece_is_only_taken_where_less_is_reserved(seed):
    events = drawn(seed)
    best, without = best_arena_bytes(HELD, events), replay_with_arena(HELD, events).peak_reserved
    with_it = replay_with_arena(HELD, events, best).peak_reserved
    assert with_it < without if best else with_it == without


def test_equal_sizes_need_no_arena():
    equal = [event for step in range(9) for event in ((step, 20 * MIB), (step, -20 * MIB))]
    assert best_arena_bytes(HELD, equal) == best_arena_bytes(HELD, []) == 0


def test_a_ledger_counts_its_arena():
    widths = (8, 11, 17, 23, 31, 8)
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
    trace = trace_step(nn.Sequential(*layers), InferenceStep((torch.rand(1, 8, 512, 512),)))
    profile = load_profile("rtx3060-12gb")
    usual, one = (
        predict_cuda(trace, profile, NO_MARGIN, arena_phase=way) for way in (None, "inference")
    )
    assert usual.arena_bytes == 0 < one.arena_bytes
    assert sum(row.value for row in one.rows) < sum(row.value for row in usual.rows)


def test_workspaces_that_stay_are_none_of_a_piece():
    layers = [nn.Linear(64 * side, 64 * (side + 1)) for side in range(3, 12)]
    model, image = nn.Sequential(*layers).eval().requires_grad_(False), torch.rand(1 << 14, 192)
    profile = load_profile("rtx3060-12gb")
    trace = trace_step(model, InferenceStep((image,)))
    priced = predict_cuda(trace, profile, NO_MARGIN, arena_phase="inference")
    held = [*trace.initial.items(), (-1, profile.workspaces.blas_bytes[0])]
    events = [(event.storage, event.size) for event in trace.events]
    assert priced.arena_bytes == best_arena_bytes(held, events) > 0
    reserved = replay_with_arena(held, events, priced.arena_bytes).peak_reserved
    rows = {row.name: row.value for row in priced.rows}
    assert sum(rows.values()) - rows["context"] - rows["margin"] == reserved


def test_a_program_knows_whether_it_multiplies():
    layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.SiLU()), nn.Sequential(nn.Linear(20, 30))
    found = [
        lower_to_rows(capture(net.eval(), torch.rand(1, 3, 24, 20))).has_matmul for net in layers
    ]
    assert found == [False, True]


def test_a_run_says_whether_it_multiplies(monkeypatch):
    offered = []
    monkeypatch.setattr(
        "lowtide.streaming.engine.executor.reserve_arena",
        lambda size, _, *, has_matmul: offered.append((size, has_matmul)),
    )
    image = torch.rand(1, 3, 24, 20)
    for net in nn.Conv2d(3, 8, 1), nn.Sequential(nn.Conv2d(3, 8, 1), nn.Linear(20, 30)):
        program = lower_to_rows(capture(net.eval(), image))
        pages = memory_page_factory(program, image.device)
        sweep = BandExecutor(program, cut_segments(program), (2,), pages, arena_bytes=MIB)
        collect_rows(program, sweep.run([MemoryPage.from_tensor(image, 2)]))
    assert offered == [(MIB, False), (MIB, True)]


@pytest.mark.parametrize("part", [False, True])
def test_the_image_of_a_convolution_is_copied_before_its_result(part):
    model, image = nn.Conv2d(8, 4, 3, padding=1), torch.rand(1, 8, 40, 30)
    given = image[:, :, 5:25] if part else image
    tracer = Tracer(keep_calls=True)
    tracer.label([*model.parameters(), image], "inputs")
    with tracer, torch.no_grad():
        result = model(given)
    own = [size for _, size in _events(tracer.trace, 0, lambda *_: given.nbytes + 512, 0)]
    rest = 512 if part else given.nbytes + 512
    run = [result.nbytes, rest, -rest]
    assert own == ([given.nbytes, *run, -given.nbytes] if part else run)


def test_bytes_taken_before_a_run_are_not_in_its_arena():
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise((8, 11, 17, 23, 8))]
    model, image = nn.Sequential(*layers).eval().requires_grad_(False), torch.rand(1, 8, 512, 512)
    found = []
    for before in 0, 50 * MIB:
        tracer = Tracer(keep_calls=True)
        tracer.label(model.parameters(), "weights")
        tracer.label([image], "inputs")
        with tracer:
            tracer.mark("result")
            result = torch.empty(before, dtype=torch.uint8)
            tracer.mark("bands")
            model(image)
        del result
        profile = load_profile("rtx3060-12gb")
        found.append(predict_cuda(tracer.trace, profile, NO_MARGIN, arena_phase="bands"))
    assert found[0].arena_bytes == found[1].arena_bytes > 0
    totals = [sum(row.value for row in priced.rows) for priced in found]
    assert totals[1] - totals[0] == 50 * MIB


def test_the_result_is_taken_before_all_bands(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(Graph, "on_cpu", property(lambda _: False))
    model, image = nn.Conv2d(3, 5, 3, padding=1).eval(), torch.rand(1, 3, 64, 48)
    program = lower_to_rows(capture(model, image))
    layout = next(LayoutSearch(program).drafts((MIB,), ("memory",)))
    trace = trace_run(program, layout, whole_image=True)
    start = next(op for op, name in trace.marks if name == "bands")
    early = [event.size for event in trace.events if event.op < start]
    assert early == [5 * 64 * 48 * 4]
    # The image is the caller's.
    assert not any(event.storage in trace.initial for event in trace.events)


def test_settings_that_keep_blocks_whole_have_none(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    widths = (3, 11, 17, 23, 31, 3)
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
    program = lower_to_rows(capture(nn.Sequential(*layers).eval(), torch.rand(1, 3, 512, 512)))
    profile = load_profile("rtx3060-12gb")
    for layout in LayoutSearch(program).drafts((16 * MIB,), ("memory", "host")):
        usual = dry_run(program, layout, whole_image=True, profile=profile)
        with monkeypatch.context() as patch:
            patch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
            own = dry_run(program, layout, whole_image=True, profile=profile)
        assert own.arena_bytes == 0 and usual.peak_bytes <= own.peak_bytes


def test_a_cached_arena_is_not_allocated_again(monkeypatch):
    cpu, taken = torch.device("cpu"), []
    monkeypatch.setattr(arena, "_cached_bytes", lambda _: 10 * MIB)
    for size in (0, 9 * MIB, 12 * MIB, 20 * MIB):
        with Tracer() as tracer:
            arena.reserve_arena(size, cpu)
        taken.append(tracer.trace.peak_bytes)
    assert taken == [0, 0, 0, 20 * MIB]


def test_a_result_is_not_allocated_in_the_arena_of_an_earlier_run(monkeypatch):
    cuda, made = torch.device("cuda", 0), []
    monkeypatch.setattr(torch, "empty", lambda size, **_: made.append(size) or torch.zeros(1))

    def gpu(*free, device=0, pool=(0, 0)):
        blocks = [{"size": size * MIB, "state": "inactive"} for size in free]
        blocks.append({"size": 99 * MIB, "state": "active_allocated"})
        segment = {"device": device, "segment_pool_id": pool, "blocks": blocks}
        monkeypatch.setattr(arena, "_cached_bytes", lambda _: sum(free) * MIB)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])

    for free, facts, aside in (
        ((50,), {}, True),  # the piece alone: the result would be cut out of it
        ((50, 20), {}, False),  # there is a block for the result
        ((30, 30), {}, False),  # the piece was parted: a new one would be one more
        ((40,), {}, False),
        ((50,), {"device": 1}, False),
        ((50,), {"pool": (0, 7)}, False),
    ):
        made.clear()
        gpu(*free, **facts)
        assert (arena.hold_arena(50 * MIB, cuda, 20 * MIB) is not None) == aside
        assert made == [50 * MIB] * aside
    assert arena.hold_arena(0, cuda, 20 * MIB) is None


@pytest.mark.parametrize("products", [False, True])
def test_the_workspace_of_products_comes_before_the_piece(products):
    with Tracer() as tracer:
        arena.reserve_arena(MIB, torch.device("cpu"), has_matmul=products)
    names = [op.name for op in tracer.trace.ops]
    assert ("mm.default" in names[:-1]) == products
    taken = [event for event in tracer.trace.events if event.size > 0]
    assert taken[-1].size == MIB and taken[-1].op == len(names) - 1


@pytest.mark.parametrize("settings", ["max_split_size_mb:128", "backend:cudaMallocAsync"])
def test_an_allocator_that_splits_no_blocks_gets_no_arena(settings, monkeypatch):
    assert arena.splits_large_blocks()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:False,{settings}")
    assert not arena.splits_large_blocks()


def test_where_a_piece_cannot_be_had_the_run_goes_on(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    arena.reserve_arena(MIB, torch.device("cpu"))


def test_a_run_takes_the_piece_before_all_else():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)).eval()
    image = torch.rand(1, 3, 64, 48)
    program = lower_to_rows(capture(model, image))
    peaks = {}
    for size in 0, 3 * MIB:
        sweep = BandExecutor(
            program,
            cut_segments(program),
            (4,),
            memory_page_factory(program, image.device),
            arena_bytes=size,
        )
        tracer = Tracer()
        with tracer, torch.inference_mode():
            (found,) = collect_rows(program, sweep.run([MemoryPage.from_tensor(image, 2)]))
        assert torch.allclose(found, model(image), atol=1e-6)
        assert tracer.trace.events[0].size == size or not size
        peaks[size] = tracer.trace.peak_bytes
    assert peaks[0] < 3 * MIB <= peaks[3 * MIB] < 4 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reserves_what_is_predicted(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    widths = (3, 32, 96, 64, 48, 12)
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*layers).eval().to("cuda", dtype)
    image = torch.rand(1, 3, 1024, 768, device="cuda", dtype=dtype)
    small = lowtide.stream(model, budget="160MiB")
    predicted = small.prepare(image).layout.peak_bytes
    small(image)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with torch.inference_mode():
        small(image)
    seen = torch.cuda.max_memory_reserved() - before
    # Some of it may be in segments that weights take a part of.
    assert 0.8 * predicted <= seen <= 1.01 * predicted
    # Results that are kept are none of what the next run is cut out of.
    results = [small(image) for _ in range(4)]
    more = torch.cuda.max_memory_reserved() - before - seen
    assert more <= sum(result.nbytes for result in results) + 8 * MIB
