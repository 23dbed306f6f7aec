"""A run that holds more than expected gives back what the heap only keeps."""

from types import SimpleNamespace

import pytest

from lowtide.jobs import held_memory
from lowtide.jobs.held_memory import HeldMemory

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
        monkeypatch.setattr(held_memory, "trim_allocators", lambda device: meter.trim())
        plan = SimpleNamespace(
            strategy=SimpleNamespace(name=strategy),
            device="cpu",
            predicted_bytes=100 * MIB,
            upper_bytes=200 * MIB,
        )
        return meter, HeldMemory(meter, plan, budget, waiting)

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


def test_tiles_may_keep_up_to_their_bound(held):
    meter, holding = held(60, 130, strategy="tiled")
    assert not holding.over_budget()
    assert not meter.trims


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
