"""Tiles on their way to a card and back while others are run: a card that is not there."""

import numpy as np
import pytest
import torch

from lowtide import Cancelled, NotFiniteError
from lowtide.jobs.images.planning import with_most_in_flight
from lowtide.memory.budget import Budget
from lowtide.streaming.planner.model_facts import ModelGeometry, PlanOverrides
from lowtide.streaming.planner.tile_candidates import tile_candidates
from lowtide.streaming.planner.tile_variants import with_prefetch
from lowtide.streaming.tiles import tile_step
from lowtide.streaming.tiles.grid import tile_axes
from lowtide.streaming.tiles.tile_step import AsyncTileTransfer, SyncTileTransfer
from support.cuda_streams import Streams
from support.toy_models import (
    conv_net,
    costs,
    image_task,
    make_plan,
    network,
    pictures,
    run_array,
)

picture = pictures()


@pytest.fixture
def array():
    return picture(130, 170, 3, "uint8")


def plan_of(array, most=3, **wishes):
    plan = make_plan(array, 4, tile=40, **wishes)
    return plan.with_strategy(in_flight=most)


class Logged(SyncTileTransfer):
    """Notes what is asked for; nothing is there before it is waited for."""

    def __init__(self, device):
        super().__init__(device)
        self.__dict__["log"] = []

    def to_device(self, images):
        self.log.append("there")
        return super().to_device(images.clone())

    def to_host(self, result):
        landing = super().to_host(result)
        if not result.dim():
            return landing
        self.log.append("back")
        log = self.log

        class Late:
            def wait(self):
                log.append("wait")
                return landing.wait()

        return Late()


@pytest.fixture
def flights(monkeypatch):
    """Crossings of the runs of a test."""
    made = []

    def beside(device):
        made.append(Logged(device))
        return made[-1]

    monkeypatch.setattr(tile_step, "AsyncTileTransfer", beside)
    return made


@pytest.mark.parametrize(
    ("most", "wishes"),
    [(2, {}), (3, {"batch": 2}), (2, {"hann_blend": True}), (100, {"batch": 4})],
    ids=str,
)
def test_the_same_bytes_however_many_are_in_flight(flights, array, wishes, most):
    plan = plan_of(array, most, **wishes)
    alone, _ = run_array(network(conv_net()), array, plan_of(array, 1, **wishes))
    result, outcome = run_array(network(conv_net()), array, plan)
    assert np.array_equal(result, alone)
    assert outcome.tiles == plan.strategy.tiles and len(flights) == 1


def test_so_many_are_begun_before_the_first_is_waited_for_rows_or_not(flights, array):
    plan = plan_of(array, 3, batch=4)
    run_array(network(conv_net()), array, plan)
    rows, columns = tile_axes(plan.image, plan.strategy)
    batches = len(rows.starts) * -(-len(columns.starts) // 4)
    assert batches > len(rows.starts) > 3
    begun = ["there", "back"]
    ahead = begun * 3 + ["wait", *begun] * (batches - 3) + ["wait"] * 3
    assert flights[0].log == ahead


def test_an_opacity_beside_colors(flights):
    array = picture(90, 120, 4, "uint8")
    alone, _ = run_array(network(conv_net()), array, plan_of(array, 1))
    result, _ = run_array(network(conv_net()), array, plan_of(array, 3))
    assert np.array_equal(result, alone)


class Failing(torch.nn.Module):
    """Raises ``error`` on calls of these numbers."""

    def __init__(self, error, *calls):
        super().__init__()
        self.inner, self.error, self.calls, self.count = conv_net(), error, calls, 0

    def forward(self, x):
        self.count += 1
        if self.count in self.calls:
            raise self.error
        return self.inner(x)


LACK = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("call", [1, 2, 5, 24])
def test_memory_that_runs_out_once_is_waited_for(flights, array, call):
    plan = plan_of(array)
    alone, _ = run_array(network(conv_net()), array, plan)
    result, outcome = run_array(network(Failing(LACK, call)), array, plan)
    assert np.array_equal(result, alone)
    assert outcome.events == ["out of memory once: the failed step was repeated and succeeded"]
    # What was begun before was finished first, and nothing was begun beside it.
    log = flights[1].log
    failed = [place for place, what in enumerate(log) if what == "there"][call - 1]
    waiting = log[:failed].count("back") - log[:failed].count("wait")
    assert log[failed + 1 : failed + 2 + waiting] == ["wait"] * waiting + ["there"]


def test_a_batch_that_is_too_large_shrinks(flights, array):
    tight = conv_net()

    def one(x):
        if len(x) > 1:
            raise LACK
        return tight(x)

    plan = plan_of(array, batch=2)
    result, outcome = run_array(network(one), array, plan)
    alone, _ = run_array(network(conv_net()), array, plan)
    assert np.abs(result.astype(int) - alone).max() <= 1
    assert outcome.tiles == plan.strategy.tiles
    assert "out of memory: batch size 1 from here on" in outcome.events


def test_what_is_not_finite_is_computed_again(flights, array):
    class Half(torch.nn.Module):
        def forward(self, x):
            return conv_net()(x) * torch.inf

    exact = conv_net()
    low = network(Half(), precision="fp16", make_fp32_forward=lambda: exact)
    result, outcome = run_array(low, array, plan_of(array))
    alone, _ = run_array(network(conv_net()), array, plan_of(array))
    assert np.array_equal(result, alone) and outcome.fp32_reruns == 24
    with pytest.raises(NotFiniteError):
        run_array(network(Half()), array, plan_of(array))


def test_a_stop_is_heard(flights, array):
    seen = []

    def stop():
        seen.append(1)
        return len(seen) > 2

    with pytest.raises(Cancelled):
        run_array(network(conv_net()), array, plan_of(array), cancel=stop)
    assert flights[0].log.count("wait") == 3


class Watched(torch.nn.Module):
    """Notes what a network reads and writes, as a card's kernels do."""

    def __init__(self, streams):
        super().__init__()
        self.inner, self.streams = conv_net(), streams

    def forward(self, x):
        self.streams.access(x, writes=False)
        result = self.inner(x)
        self.streams.access(result, writes=True)
        return result


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(
        tile_step, "_empty_pinned", lambda like: torch.empty_like(like, device="cpu")
    )
    return Streams(monkeypatch)


def test_no_copy_meets_what_a_card_computes(streams, array):
    plan = plan_of(array)
    result, _ = run_array(network(Watched(streams)), array, plan)
    assert len(streams.log) > 4 * plan.strategy.tiles
    assert streams.races == []
    # The allocator was told of every tensor that a second stream touches.
    told = {one.data_ptr() for one, _ in streams.recorded}
    moved = {one.tensor.data_ptr() for one in streams.log if one.stream == "computing"}
    assert moved <= told
    # Copies there and back are of two streams.
    assert {one.stream for one in streams.log} == {"computing", "copies 1", "copies 2"}
    assert result.shape == (260, 340, 3)


@pytest.mark.parametrize("missing", ["nothing", "there", "back"])
def test_a_missing_wait_is_a_race(monkeypatch, streams, missing):
    beside = AsyncTileTransfer("cpu")
    if missing == "there":
        monkeypatch.setattr(streams.computing, "wait_event", lambda event: None)
    if missing == "back":
        monkeypatch.setattr(beside._download_stream, "wait_event", lambda event: None)
    watched = Watched(streams)
    for _ in range(2):
        landing = beside.to_host(watched(beside.to_device(torch.rand(1, 3, 8, 8))))
    assert bool(streams.races) == (missing != "nothing")
    copied = streams.log[-1].clock["copies 2"]
    assert streams.host.get("copies 2", 0) < copied
    landing.wait()
    assert streams.host["copies 2"] >= copied


def card_plans(array, **wishes):
    height, width, _ = array.shape
    given = costs(4, device="cuda:0").model_copy(update={"context_bytes": 1 << 20})
    return tile_candidates(
        given, ModelGeometry(2, 3, 3), image_task(array, (height, width)), PlanOverrides(**wishes)
    )


def test_a_plan_counts_what_is_in_flight(array):
    (one,) = [plan for plan in card_plans(array, tile=40) if plan.strategy.batch == 1]
    assert one.strategy.in_flight == 1
    three = with_prefetch(one, 3)
    assert three.strategy.in_flight == 3 and "3 in flight" in three.title
    rows = {row.name: row for row in three.ledger}
    # Images in fp32 and results of twice their sides, of two tiles more than the one that is run.
    staged = 4 * 3 * 40 * 40 * 5
    assert rows["tiles in flight"].value == 2 * staged
    before = {row.name: row for row in one.ledger}["copy buffers"]
    assert rows["copy buffers"].value > 3 * before.value
    assert rows["copy buffers"].upper > 3 * before.upper
    assert three.bytes_at("device", upper=True) == one.bytes_at("device", upper=True) + 2 * staged
    # No more than there are batches, and none beside one.
    assert with_prefetch(one, 10**6).strategy.in_flight == one.strategy.tiles
    whole = next(plan for plan in card_plans(array) if plan.strategy.tiles == 1)
    assert with_prefetch(whole, 4) is whole
    here = make_plan(array, 4, tile=40)
    assert with_prefetch(here, 4) is here


def test_more_streams_than_memory_are_fewer(array):
    (one,) = [plan for plan in card_plans(array, tile=40) if plan.strategy.batch == 1]
    needs = [one.upper_bytes, *(with_prefetch(one, most).upper_bytes for most in (2, 3))]
    ample = 1 << 40
    for most, limit in enumerate(needs, 1):
        fits = with_most_in_flight(one, 4, Budget(limit, ample, ample), None)
        asked = with_most_in_flight(one, most, Budget(ample, ample, ample), None)
        assert fits.strategy.in_flight == asked.strategy.in_flight == most
    # A plan that is smaller than the last one, which memory ran out on.
    smaller = with_most_in_flight(one, 4, Budget(ample, ample, ample), needs[2])
    assert smaller.strategy.in_flight == 2
