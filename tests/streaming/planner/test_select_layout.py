"""Which layout is chosen, and how few of them are told exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.core.errors import BudgetError
from lowtide.streaming.planner import layout_search
from lowtide.streaming.planner.cost_model import GPU
from lowtide.streaming.planner.layout_search import LayoutSearch
from lowtide.streaming.planner.select import select_layout
from support.band_runs import program_of


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(layout_search, "cost_model_for", lambda _: GPU)
    torch.manual_seed(0)
    norms = [
        nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1), nn.GroupNorm(4, 24), nn.SiLU()) for _ in range(3)
    ]
    model = nn.Sequential(nn.Conv2d(3, 24, 3, 1, 1), *norms, nn.Conv2d(24, 3, 3, 1, 1))
    return program_of(model, torch.rand(1, 3, 1024, 768))


def told_of(draft):
    """Operators that take as much for themselves as there is of rows, and less where bands are low,
    as convolutions do on a card."""
    return int(draft.peak_bytes * (1 + 16 / max(draft.bands, default=1) ** 2))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_high_bands_that_take_too_much_do_not_speak_for_low_ones(program, place):
    found = sorted(LayoutSearch(program).drafts((), ("memory",)), key=lambda one: one.cost)
    best, asked = found[place], list[int]()

    def tell(draft):
        asked.append(max(draft.bands))
        return told_of(draft)

    # Higher bands look as if they might fit.
    limit = int(1.3 * told_of(best))
    chosen = select_layout(program, limit, tell, ("memory",))
    assert chosen.bands == best.bands
    assert chosen.peak_bytes == told_of(best) <= limit
    assert len(asked) <= 2, asked


def test_what_is_told_of_one_place_speaks_for_others(program):
    """To tell what a deep window transformer takes is seconds of work."""
    places = "memory", "host", "disk"
    least = min(one.peak_bytes for one in LayoutSearch(program).drafts((), ("host",)))
    limit, asked = int(0.9 * least), list[tuple[int, ...]]()

    def tell(draft):
        asked.append(draft.bands)
        return draft.peak_bytes * (155 if draft.placement == "host" else 150) // 100

    chosen = select_layout(program, limit, tell, places, partial_spill=True)
    assert chosen.peak_bytes <= limit
    assert len(asked) == len(set(asked)), asked


def test_a_budget_that_is_just_too_small_is_refused_before_all_layouts_are_told(program):
    caps = *GPU.caps, *GPU.low_memory_caps
    found = list(LayoutSearch(program).drafts(caps, ("memory",)))
    least = min(one.peak_bytes for one in found)
    limit = int(1.25 * least)
    near = [one for one in found if one.peak_bytes <= 1.4 * limit]
    asked = list[object]()

    def tell(draft):
        asked.append(draft.key)
        return int(1.3 * draft.peak_bytes)

    with pytest.raises(BudgetError) as caught:
        select_layout(program, limit, tell, ("memory",))
    assert caught.value.smallest == int(1.3 * least)
    assert len(asked) <= 2 * len(near) / 3, (len(asked), len(near))
