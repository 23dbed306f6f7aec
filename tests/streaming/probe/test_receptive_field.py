"""Reach by poisoning: known networks, known answers."""

import pytest
import torch
from torch import nn

from lowtide.streaming.probe.receptive_field import measure_receptive_field
from support.toy_models import Centered, Strided, conv_net


def reach(module, *, scale=2, channels=3, align=1):
    return measure_receptive_field(
        module, channels=channels, scale=scale, align=align, minimum=0
    ).radius


@pytest.mark.parametrize("layers", [1, 3, 9])
def test_counts_the_layers_of_a_plain_network(layers):
    assert reach(conv_net(layers=layers)) == layers + 1


def test_sees_past_the_first_probe_size():
    wide = nn.Sequential(*[nn.Conv2d(3, 3, 17, padding=8) for _ in range(6)])
    assert reach(wide.requires_grad_(False), scale=1) == 48


def test_unshuffled_networks_reach_by_their_grid():
    assert reach(Strided(), scale=1, align=4) == 4


def test_asymmetric_reach_is_the_larger_one():
    class Shifted(nn.Module):
        def forward(self, x):
            return torch.roll(nn.functional.pad(x, (0, 0, 5, 2)), 0)[:, :, :-7] + x

    assert reach(Shifted(), scale=1) == 5


def test_global_statistics_have_no_bound():
    assert reach(Centered(), scale=1) is None


def test_a_global_gain_behind_a_dead_unit_is_still_found():
    class Hidden(nn.Module):
        def forward(self, x):
            return x + nn.functional.relu(x.mean((2, 3), keepdim=True) - 100)

    assert reach(Hidden(), scale=1) is None


def test_dependence_on_position_is_detected_by_comparison():
    class Vignette(nn.Module):
        def forward(self, x):
            return x * torch.linspace(0, 1, x.shape[2]).reshape(1, 1, -1, 1)

    assert reach(Vignette(), scale=1) is None


@pytest.mark.parametrize("drop", [torch.nan_to_num, lambda x: torch.where(x > 0, x, 0.0)])
def test_a_network_that_drops_nan_is_measured_by_what_changes(drop):
    class Dropping(nn.Sequential):
        def forward(self, x):
            return super().forward(drop(x))

    assert reach(Dropping(*[nn.Conv2d(3, 3, 5, padding=2) for _ in range(2)]), scale=1) == 4


def test_a_network_that_returns_a_constant_reaches_nowhere():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    assert reach(Constant(), scale=1) == 0


def test_a_network_that_wraps_round_has_no_bound():
    class Wrapping(nn.Module):
        def forward(self, x):
            return x + torch.roll(x, 3, dims=2)

    assert reach(Wrapping(), scale=1) is None
