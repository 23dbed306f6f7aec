"""The layout that is chosen for a limit, against the exact bytes of every candidate."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from lowtide import BudgetError
from lowtide.streaming.planner.stream_planner import StreamPlanner
from support.window_transformers import network


def norms():
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1), nn.GroupNorm(4, 12), nn.SiLU()) for _ in range(3)
    ]
    return nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1), *layers, nn.Conv2d(12, 3, 3, 1, 1)).eval()


CASES = {
    "norms": (norms, (256, 192)),
    "SwinIR": (lambda: network("SwinIR", depths=[1], num_heads=[2]), (48, 32)),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(makes a new planner, exact layouts of all its candidates)"""
    patch = pytest.MonkeyPatch()
    patch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
    made, size = CASES[request.param]
    module, image = made(), torch.rand(1, 3, *size)
    known = StreamPlanner(module, image)
    exact = [(known.dry_run(one).peak_bytes, one.cost) for one in known.candidates]
    yield lambda: StreamPlanner(module, image), exact
    patch.undo()


@pytest.mark.slow
@pytest.mark.grid(2)
def test_the_choice_fits_and_costs_about_the_least_if_memory_allows(case):
    new, exact = case
    sizes = sorted({size for size, _ in exact})
    for limit in (int(1.1 * sizes[0]), sizes[len(sizes) // 2]):
        assert new().choose(limit).peak_bytes <= limit
    assert new().choose(10 * sizes[-1]).cost <= 1.25 * min(cost for _, cost in exact)


@pytest.mark.grid(2)
def test_the_least_limit_that_an_error_names_is_enough_and_about_the_least_there_is(case):
    new, exact = case
    with pytest.raises(BudgetError) as caught:
        new().choose(1024)
    least = caught.value.smallest
    assert new().choose(least).peak_bytes <= least
    assert least <= 1.1 * min(size for size, _ in exact)


def test_candidates_are_a_front_of_memory_and_time(case):
    new, _ = case
    found = new().candidates
    if found[0].peak_bytes == found[1].peak_bytes:
        assert found.pop(1).overhead_seconds > found[0].overhead_seconds
    for one, other in pairwise(found):
        assert one.peak_bytes < other.peak_bytes
        assert one.overhead_seconds > other.overhead_seconds
    assert all(
        three.peak_bytes > 1.07 * one.peak_bytes
        for one, three in zip(found, found[2:], strict=False)
    )
