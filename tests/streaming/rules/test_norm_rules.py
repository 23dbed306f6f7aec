"""Moments of groups, and rows between others full of one number, against plain formulas."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lowtide.streaming.rules import norm
from lowtide.streaming.rules.conv import pad_constant
from lowtide.streaming.rules.norm import GroupMoments

MEANS = (0, 0, 0, 0, 0), (0, 1, 3, 1000, -20000), (50, 0, 0, 0, 7)
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-11, torch.bfloat16: 1e-6}


@pytest.mark.parametrize("count", [1, 7, 1031, 64 * 500, 300_001])
@pytest.mark.parametrize("moments", [GroupMoments.from_groups, GroupMoments.from_groups_on_gpu])
def test_moments_are_those_of_double_precision_whatever_the_mean(count, moments, monkeypatch):
    monkeypatch.setattr(norm, "_CAST_CHUNK", 2 * count)
    generator = torch.Generator().manual_seed(count)
    for means, (dtype, bound) in itertools.product(MEANS, BOUNDS.items()):
        numbers = torch.randn(len(means), count, generator=generator, dtype=torch.float64)
        groups = (numbers + torch.tensor(means)[:, None]).to(dtype)
        found, exact = moments(groups), groups.double()
        torch.testing.assert_close(found.mean, exact.mean(1), rtol=bound, atol=bound)
        spread = exact.var(1, correction=0)
        torch.testing.assert_close(found.variance(), spread, rtol=bound, atol=bound**2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 1031, 300_001])
def test_moments_of_bands_on_a_gpu_are_those_of_double_precision(count, dtype):
    bands = torch.randn(5, 8, count, device="cuda", dtype=torch.float64)
    bands = (bands + torch.arange(8, device="cuda")[:, None] / 2).to(dtype)
    found, *rest = (GroupMoments.from_groups_on_gpu(band) for band in bands)
    for other in rest:
        found = found.merged(other)
    exact = bands.double().transpose(0, 1).flatten(1)
    bound = 1e-11 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found.mean, exact.mean(1), rtol=bound, atol=bound)
    spread = exact.var(1, correction=0)
    torch.testing.assert_close(found.variance(), spread, rtol=bound, atol=bound**2)


def test_groups_of_equal_numbers_do_not_vary():
    groups = torch.tensor([0.0, 3.3, -1e4])[:, None].expand(3, 5000).clone()
    assert (GroupMoments.from_groups(groups).variance() <= 1e-12).all()


def test_numbers_that_are_none_stay_in_their_group():
    groups = torch.ones(3, 2000)
    groups[1, 7] = torch.nan
    found = GroupMoments.from_groups(groups)
    assert found.variance().isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("above, below", [(0, 2), (1, 0), (2, 3)])
@pytest.mark.parametrize("last", [False, True])
def test_framed_rows_are_padded_ones_in_the_same_order(above, below, last):
    form = torch.channels_last if last else torch.contiguous_format
    rows = torch.randn(1, 5, 7, 9).contiguous(memory_format=form)
    found = pad_constant(rows, 2, above, below, -1.5)
    expected = F.pad(rows, (0, 0, above, below), value=-1.5)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    seen = pad_constant(rows[:, :, 2:5], 2, above, below, 0.0)
    assert torch.equal(seen, F.pad(rows[:, :, 2:5], (0, 0, above, below)))
