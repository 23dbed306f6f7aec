"""Order of the loops over chunks and bands, and places of the state: all give the same clip."""

import errno
import random
import tempfile
from dataclasses import replace

import pytest
import torch

from lowtide import BudgetError, OutputError, UsageError
from lowtide.core.scratch import ScratchSpace
from lowtide.streaming.chunk_stream import ChunkStream
from lowtide.streaming.clip_planner import ClipPlanner
from lowtide.streaming.engine.clip_chunks import CarriedStateStore
from support.causal_modules import Later, LaterWithAttention, causal_modules, whole_clip

ALL = 99


def least_budget(first, later, clip, **settings):
    """The bytes that a refusal names: they depend on the processor."""
    with pytest.raises(BudgetError) as refusal:
        ChunkStream(first, later, budget="1MiB", **settings).plan(clip)
    return refusal.value.smallest


@pytest.mark.parametrize(
    ("together", "pages"), [(1, "disk"), (2, "disk"), (3, "memory"), (ALL, "memory")]
)
@torch.no_grad()
def test_all_orders_and_places_give_the_same_clip(together, pages):
    first, later = causal_modules(LaterWithAttention)
    clip = torch.rand(2, 3, 6, 47, 30)
    settings = {"pages": pages, "together": together}
    budget = least_budget(first, later, clip, **settings)
    stream = ChunkStream(first, later, budget=budget, **settings)
    assert (stream(clip) - whole_clip(later, clip)).abs().max() <= 3e-6
    assert "bands: up to 1," not in stream.explain(clip)
    plan, state = stream.plan(clip), 2 * 4 * 30 * 47 * (3 + 4 * 16)
    if together == ALL:
        assert (plan.state_bytes, plan.moved_bytes) == (0, 0)
        assert "6, all in each band" in plan.title
    else:
        runs = -(-6 // together)
        assert (plan.state_bytes, plan.moved_bytes) == (state, 2 * state * (runs - 1))
        assert {"disk": " on disk (", "memory": " in memory;"}[pages] in plan.title


def draw(generator):
    """A clip of random size, and random settings."""
    sizes = [generator.randint(low, high) for low, high in ((1, 9), (9, 40), (8, 24))]
    settings = {
        "together": generator.choice(["auto", 1, 2, 3, 4, ALL]),
        "pages": generator.choice(["auto", "memory", "disk"]),
        "budget": generator.randint(17 << 20, 24 << 20),
    }
    return torch.rand(1, 3, *sizes), settings


@torch.no_grad()
def compare_draws(count, seed):
    """The difference of each draw from the whole clip; refused budgets suffice once raised."""
    generator, refusals = random.Random(seed), 0
    modules = {kind: causal_modules(kind) for kind in (Later, LaterWithAttention)}
    for _ in range(count):
        first, later = modules[generator.choice([*modules])]
        clip, settings = draw(generator)
        try:
            found = ChunkStream(first, later, **settings)(clip)
        except BudgetError as refusal:
            refusals += 1
            settings["budget"] = refusal.smallest
            found = ChunkStream(first, later, **settings)(clip)
        assert (found - whole_clip(later, clip)).abs().max() <= 3e-6, settings
    return refusals


def test_random_orders_places_and_budgets():
    compare_draws(3, seed=1)


@pytest.mark.slow
def test_many_random_orders_places_and_budgets():
    assert 0 < compare_draws(100, seed=2) < 100


@pytest.mark.parametrize("chunks", [5, pytest.param(12, marks=pytest.mark.slow)])
@torch.no_grad()
def test_the_state_leaves_memory_only_where_it_must(chunks):
    first, later = causal_modules()
    clip = torch.rand(1, 3, chunks, 300, 20)
    state = 2 * 4 * 300 * 20 * (3 + 4 * 16)
    whole = whole_clip(later, clip)
    plans = {}
    for name, rows in (("much", 3 * state), ("little", 6 * state // 5)):
        stream = ChunkStream(first, later, budget=whole.nbytes + rows + (16 << 20))
        assert (stream(clip) - whole).abs().max() <= 3e-6
        plans[name] = stream.plan(clip)
        assert plans[name].peak_bytes <= whole.nbytes + rows
    assert "one by one, state of 3.07 MiB in memory;" in plans["much"].title
    assert plans["little"].store.placement == "disk" or not plans["little"].state_bytes
    assert plans["little"].cost > plans["much"].cost


@torch.no_grad()
def test_a_budget_that_is_too_small_is_refused_without_other_orders(monkeypatch):
    first, later = causal_modules(LaterWithAttention)
    clip = torch.rand(1, 3, 4, 81, 20)
    planned, computed = [], []
    plan = ClipPlanner.plan
    monkeypatch.setattr(ClipPlanner, "plan", lambda *args: planned.append(args[1:]) or plan(*args))
    later.register_forward_hook(lambda module, args, result: computed.append(str(type(result[0]))))
    for budget in ("1MiB", "16MiB"):
        with pytest.raises(BudgetError) as refusal:
            ChunkStream(first, later, budget=budget).plan(clip)
    assert planned == 2 * [(1, "memory"), (1, "disk")]
    assert str(torch.Tensor) not in computed  # nothing is certified
    found = ChunkStream(first, later, budget=refusal.value.smallest)
    assert (found(clip) - whole_clip(later, clip)).abs().max() <= 3e-6


@torch.no_grad()
def test_the_state_may_be_in_host_memory():
    first, later = causal_modules(LaterWithAttention)
    clip = torch.rand(2, 3, 5, 31, 14)
    settings = {"pages": "disk", "together": 2}
    budget = least_budget(first, later, clip, **settings)
    stream = ChunkStream(first, later, budget=budget, **settings)
    plan, wanted = stream.plan(clip), stream(clip)
    # as for a GPU, whose transfers this machine may not have
    store = CarriedStateStore("host", 3, clip.device, ScratchSpace())
    stream._prepared = stream._prepared[0], replace(plan, store=store)
    assert torch.equal(stream(clip), wanted)


def test_no_chunks_together_are_refused():
    with pytest.raises(UsageError, match="at least 1"):
        ChunkStream(*causal_modules(), together=0)


class FullAfter:
    """A file on a disk that is full, or a run that is cancelled, at one of the writes."""

    def __init__(self, file, writes, error):
        self._file, self._left, self._error = file, writes, error

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._file.write(data)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OutputError),
        (KeyboardInterrupt("disk"), KeyboardInterrupt),
    ],
)
@torch.no_grad()
def test_a_full_disk_or_a_cancelled_run_leaves_nothing(error, raised, monkeypatch):
    first, later = causal_modules()
    clip = torch.rand(1, 3, 4, 30, 14)
    settings = {"pages": "disk", "together": 1}
    budget = least_budget(first, later, clip, **settings)
    stream = ChunkStream(first, later, budget=budget, **settings)
    wanted = stream(clip)
    stream._scratch.close()
    real = tempfile.TemporaryFile
    with monkeypatch.context() as patched:
        full = lambda **kw: FullAfter(real(**kw), 5, error)  # noqa: E731
        patched.setattr(tempfile, "TemporaryFile", full)
        with pytest.raises(raised, match="disk"):
            stream(clip)
    blocks = stream._scratch.blocks()
    assert len(blocks._free_blocks) == blocks._count
    assert torch.equal(stream(clip), wanted)
