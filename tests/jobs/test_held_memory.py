"""A run that holds more than expected gives back what the heap only keeps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.jobs.images import held_memory
from lowtide.jobs.images.held_memory import RunMemoryLimiter
from lowtide.memory import oom
from lowtide.streaming.tiles.network import RunnableNetwork

MIB = 1 << 20


class Meter:
    """What is held, of which some only lies in the heap."""

    def __init__(self, living, kept):
        self.living, self.kept, self.trims = living, kept, 0

    @property
    def current_bytes(self):
        return self.living + self.kept

    def trim(self):
        self.trims, self.kept = self.trims + 1, 0


@pytest.fixture
def held(monkeypatch):
    def make(living, kept, strategy="streamed", budget=1000 * MIB, waiting=0):
        meter = Meter(living * MIB, kept * MIB)
        monkeypatch.setattr(oom, "trim_allocators", lambda device: meter.trim())
        plan = SimpleNamespace(
            strategy=SimpleNamespace(name=strategy, device_count=1),
            is_specialized=False,
            device="cpu",
            predicted_bytes=100 * MIB,
            upper_bytes=200 * MIB,
        )
        return meter, RunMemoryLimiter(meter, plan, budget, waiting)

    return make


def test_bands_are_relieved_of_more_than_is_expected(held):
    meter, holding = held(60, 30)
    assert not holding.over_budget()
    assert not meter.trims
    meter.kept = 50 * MIB
    assert not holding.over_budget()
    assert (meter.trims, meter.kept) == (1, 0)


def test_memory_is_freed_before_it_is_needed(held):
    meter, holding = held(60, 30)
    holding.make_room(10 * MIB)
    assert not meter.trims
    # Half of what comes finds a place in the heap's gaps.
    assert holding.make_room(40 * MIB) == 80 * MIB
    assert (meter.trims, meter.kept) == (1, 0)


def test_tiles_may_keep_half_of_their_margin(held):
    meter, holding = held(60, 80, strategy="tiled")
    assert not holding.over_budget()
    assert not meter.trims
    meter.kept = 100 * MIB
    assert not holding.over_budget()
    assert (meter.trims, meter.kept) == (1, 0)


def test_what_is_not_in_the_plan_may_be_held_too(held):
    meter, holding = held(60, 100, strategy="tiled", waiting=20 * MIB)
    assert not holding.over_budget()
    assert not meter.trims


def spec(module):
    return RunnableNetwork(module, scale=1, in_channels=1, out_channels=1)


class Keeping(nn.Module):
    """Leaves freed blocks in the heap."""

    def __init__(self, meter, mebibytes):
        super().__init__()
        self.meter, self.mebibytes = meter, mebibytes

    def forward(self, x):
        self.meter.kept += self.mebibytes * MIB
        return x


def test_tiles_are_relieved_between_the_layers_of_a_network(held, monkeypatch):
    monkeypatch.setattr(held_memory, "_LOOK_SECONDS", 0)  # layers that take long
    meter, holding = held(60, 0, strategy="tiled")
    network = nn.Sequential(Keeping(meter, 60), nn.Sequential(Keeping(meter, 60), nn.ReLU()))
    with holding.limited(spec(network)):
        network(torch.zeros(1))
    assert (meter.trims, meter.kept) == (1, 0)  # before the last layer
    network(torch.zeros(1))
    assert (meter.trims, meter.kept) == (1, 120 * MIB)  # outside of the block nothing is trimmed


def test_short_layers_are_not_looked_at_one_by_one(held, monkeypatch):
    monkeypatch.setattr(held_memory, "_LOOK_SECONDS", 1000)
    meter, holding = held(60, 0, strategy="tiled")
    network = nn.Sequential(Keeping(meter, 120), nn.Identity(), nn.Identity())
    with holding.limited(spec(network)):
        network(torch.zeros(1))
        assert (meter.trims, meter.kept) == (0, 120 * MIB)  # one look, before the first layer


def test_layers_that_pytorch_runs_otherwise_with_hooks_are_left_alone(held):
    """The same values, to the last bit, whether the heap is limited or not."""
    _, holding = held(60, 0, strategy="tiled")
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.rand(1, 8, 16)
    with torch.inference_mode():
        expected = network(x)
        with holding.limited(spec(nn.Sequential(network))):
            assert torch.equal(network(x), expected)
    assert not any(part._forward_pre_hooks for part in network.modules())


def test_live_memory_is_not_trimmed_repeatedly(held):
    meter, holding = held(150, 0)
    for _ in range(10):
        assert not holding.over_budget()
    assert meter.trims == 1
    meter.kept = 20 * MIB
    holding.over_budget()
    assert meter.trims == 2


def test_live_memory_over_the_budget_is_reported(held):
    meter, holding = held(150, 100, budget=140 * MIB)
    assert holding.over_budget()
    assert meter.trims == 1
