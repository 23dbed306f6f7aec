"""The memory format of a network's images follows a rule, on devices that are not here too."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import lowtide
from lowtide.streaming.tiles.network import RunnableNetwork
from lowtide.streaming.tiles.tile_step import takes_channels_last


def convolutions(channels, groups=1):
    inner = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
    return nn.Sequential(nn.Conv2d(3, channels, 3), inner, nn.ReLU(), nn.Conv2d(channels, 3, 3))


def network(module, device="cuda:0", precision="fp16"):
    return RunnableNetwork(module, 1, 3, 3, device=device, precision=precision)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("device", ["cuda:0", "RTX 4090"])
def test_tensor_cores_take_channels_last(precision, device):
    assert takes_channels_last(network(convolutions(64), device, precision))


@pytest.mark.parametrize(
    "spec",
    [
        network(convolutions(64), precision="fp32"),
        network(convolutions(60)),
        network(convolutions(64, groups=64)),
        network(nn.Sequential(nn.Linear(64, 64))),
        network(lambda images: images),
    ],
)
def test_other_networks_keep_channels_first_on_a_gpu(spec):
    assert not takes_channels_last(spec)


def test_convolutions_on_the_cpu():
    for precision in ("fp32", "bf16"):
        assert takes_channels_last(network(convolutions(5), "cpu", precision))
        assert not takes_channels_last(network(nn.Linear(8, 8), "cpu", precision))


@pytest.mark.parametrize(("precision", "channels_last"), [("fp16", True), ("fp32", False)])
def test_plans_for_a_gpu_that_is_not_here(tmp_path, precision, channels_last):
    image, target = Path(__file__).parents[3] / "examples/coffee.jpg", tmp_path / "x.png"
    (one,) = lowtide.plan(image, target, device="rtx4090", precision=precision).images
    assert (one.plan.channels_last, one.plan.precision) == (channels_last, precision)
