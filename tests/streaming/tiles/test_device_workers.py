"""Tiles of one image through several networks at once."""

import threading
from unittest import mock

import numpy as np
import pytest
import torch

from lowtide import Cancelled, NotFiniteError
from lowtide.streaming.planner.tile_variants import with_devices
from lowtide.streaming.tiles.recovery import TileWorker, TileWorkerPool
from support.toy_models import conv_net, make_plan, network, pictures, run_array

picture = pictures()


@pytest.fixture
def array():
    return picture(130, 170, 3, "uint8")


def plan_of(array, lanes=3, **wishes):
    return with_devices(make_plan(array, 4, tile=40, **wishes), lanes)


def running():
    return [one for one in threading.enumerate() if one.name.startswith("lowtide-lane")]


@pytest.mark.parametrize("wishes", [{}, {"batch": 2}, {"hann_blend": True}], ids=str)
def test_the_same_bytes_whoever_ran_what(array, wishes):
    plan = plan_of(array, **wishes)
    assert plan.strategy.device_count == 3
    others = [network(conv_net()) for _ in range(2)]
    alone, _ = run_array(network(conv_net()), array, plan)
    result, outcome = run_array(network(conv_net()), array, plan, replicas=others)
    assert np.array_equal(result, alone)
    assert outcome.tiles == plan.strategy.tiles
    assert not running()


def test_workers_run_at_the_same_time(array):
    both = threading.Barrier(2, timeout=20)
    inner = conv_net()

    def together(x):
        both.wait()  # which none passes alone
        return inner(x)

    plan = plan_of(array, lanes=2).with_strategy(tile_width=98)  # two tiles in a row
    run_array(network(together), array, plan, replicas=[network(together)])


class Failing(torch.nn.Module):
    def __init__(self, error, after=3):
        super().__init__()
        self.inner, self.error, self.left = conv_net(), error, after

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.inner(x)


def test_a_device_that_disappears_loses_nothing(array):
    plan = plan_of(array)
    gone = network(Failing(RuntimeError("CUDA error: device is lost\nmore")), device="cpu")
    alone, _ = run_array(network(conv_net()), array, plan)
    result, outcome = run_array(network(conv_net()), array, plan, replicas=[gone])
    assert np.array_equal(result, alone)
    assert outcome.tiles == plan.strategy.tiles
    assert outcome.events == ["cpu failed (CUDA error: device is lost): its tiles went to cpu"]


@pytest.mark.parametrize(
    ("broken", "events"),
    [
        ("b", ["b failed (lost): its tiles went to a"]),
        ("ab", ["a failed (lost): its tiles went to b", "b failed (lost): its tiles went to c"]),
    ],
)
def test_groups_of_a_lost_worker_go_to_another(broken, events):
    def lane(name):
        def run(group):
            if name in broken:
                raise RuntimeError("lost")
            return [group]

        return TileWorker(name, mock.Mock(batch=1, events=[], side_effect=run))

    lanes = TileWorkerPool([lane(name) for name in "abc"])
    assert list(lanes.run("uvwxyz")) == [[group] for group in "uvwxyz"]
    assert lanes.events == events
    lanes.close()


def test_the_last_ones_error_is_raised(array):
    both = [network(Failing(RuntimeError(f"device {name} is lost"))) for name in "ab"]
    with pytest.raises(RuntimeError, match="is lost"):
        run_array(both[0], array, plan_of(array), replicas=both[1:])
    assert not running()


def test_errors_of_the_image_are_not_tried_elsewhere(array):
    infinite = network(lambda x: conv_net()(x) * torch.inf)
    with pytest.raises(NotFiniteError):
        run_array(network(conv_net()), array, plan_of(array), replicas=[infinite])
    assert not running()


def test_out_of_memory_shrinks_one_worker_only(array):
    tight = Failing(RuntimeError("DefaultCPUAllocator: can't allocate memory"), after=0)
    plan = plan_of(array, batch=2)

    def twice(x):
        if len(x) > 1:
            return tight(x)
        return tight.inner(x)

    result, outcome = run_array(network(conv_net()), array, plan, replicas=[network(twice)])
    alone, _ = run_array(network(conv_net()), array, plan)
    assert np.abs(result.astype(int) - alone).max() <= 1
    assert outcome.events[0] == "cpu: out of memory: batch size 1 from here on"


def test_a_stop_ends_the_threads(array):
    seen = []

    def stop():
        seen.append(1)
        return len(seen) > 2

    with pytest.raises(Cancelled):
        run_array(
            network(conv_net()), array, plan_of(array), replicas=[network(conv_net())], cancel=stop
        )
    assert not running()


def test_a_plan_for_workers_counts_the_memory_of_each(array):
    one, two = plan_of(array, lanes=1), plan_of(array, lanes=2)
    at = {row.name: row.upper for row in one.ledger}
    for row in two.ledger:
        again = row.name in ("live activations and workspace", "allocator", "margin")
        assert row.upper == at[row.name] * (2 if again else 1)
    assert (one.strategy.device_count, two.strategy.device_count) == (1, 2)
    assert two.seconds == pytest.approx(one.seconds / 2)
    # Six tiles in a row are run four and two at a time.
    assert plan_of(array, lanes=4).seconds == pytest.approx(one.seconds / 3)
    assert "2 devices" in two.title
    whole = make_plan(array, 4, strategy="whole")
    assert with_devices(whole, 4) is whole
