"""Modules without a graph: run as they are, with the rows around a band that they look at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import ModelError
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.streaming.capture.opaque_search import probe_halo
from support.band_runs import check_parity


class InNumpy(nn.Module):
    """What ``change`` makes of (channels, height, width): nothing that a graph could hold."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return torch.from_numpy(np.ascontiguousarray(self.change(x[0].numpy())))[None]


def blurred(x):
    rows = np.pad(x, ((0, 0), (3, 3), (0, 0)), mode="edge")
    return sum(rows[:, at : at + x.shape[1]] * (at + 1) for at in range(7)) / 28


def windows_sharpened(x):
    """Each window of eight rows less a part of its mean, the last one filled up with zeros."""
    height = x.shape[1]
    filled = np.pad(x, ((0, 0), (0, -height % 8), (0, 0)))
    parts = filled.reshape(x.shape[0], -1, 8, x.shape[2])
    return (parts - parts.mean(axis=2, keepdims=True) / 2).reshape(filled.shape)[:, :height]


def doubled(x):
    return blurred(x).repeat(2, axis=1).repeat(2, axis=2)


def halved(x):
    return (x[:, ::2] + x[:, 1::2])[:, :, ::2] / 2


def net(change):
    torch.manual_seed(0)
    inner, outer = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    return nn.Sequential(inner, InNumpy(change), outer).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "size", "pages"),
    [
        (blurred, (202, 58), "memory"),
        (windows_sharpened, (202, 58), "disk"),
        (doubled, (96, 40), "disk"),
        (halved, (202, 58), "memory"),
    ],
)
def test_a_block_gives_the_same_rows(change, size, pages):
    model, image = net(change), torch.rand(1, 3, *size)
    small = lowtide.stream(model, budget="19MiB", pages=pages)
    assert (small(image) - model(image)).abs().max() <= 2e-6
    assert "not captured, halo measured: 1 (" in small.explain(image)


class AlongAxis(nn.Module):
    """Between convolutions a blur in NumPy along one dim, of which every other place is kept."""

    def __init__(self, rank, axis):
        super().__init__()
        torch.manual_seed(0)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        self.first, self.last = conv(3, 8, 3, padding=1), conv(8, 3, 3, padding=1)
        self.inside = nn.Sequential(Moved(axis))

    def forward(self, x):
        return self.last(self.inside(self.first(x)))


class Moved(InNumpy):
    def __init__(self, axis):
        super().__init__(lambda x: (blurred(x[None]) / 2)[0, ::2])
        self.axis = axis

    def forward(self, x):
        places = x.movedim(self.axis, 0)
        halves = super().forward(places.flatten(1)[None]).unflatten(2, places.shape[1:])
        return halves[0].movedim(0, self.axis)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 3, 190), 2),
        ((1, 3, 9, 7, 90), 4),
        ((90, 3, 9, 7), 0),
    ],
)
def test_a_block_runs_along_any_axis(shape, axis):
    model = AlongAxis(len(shape) - 2, axis).double()
    x = torch.rand(shape, dtype=torch.float64)
    check_parity(model, x, axis=axis, bands=(1, 7), parts=(1,))


def test_bands_are_bands():
    """A block is not run as a whole: there is memory for a part of the image only."""
    model, image = net(blurred), torch.rand(1, 3, 1200, 400)
    small = lowtide.stream(model, budget="32MiB")
    assert max(small.prepare(image).layout.bands) > 4
    small(image)
    taken = live_peak_bytes(lambda: small(image))
    assert taken <= 16 << 20 < live_peak_bytes(lambda: model(image))


def test_reach_is_found():
    block = probe_halo("it", InNumpy(blurred), torch.zeros(1, 2, 70, 30))
    assert (block.halo, block.grain, block.scale) == (3, 1, 1)
    block = probe_halo("it", InNumpy(windows_sharpened), torch.zeros(1, 2, 70, 30))
    assert (block.grain, block.sizes) == (8, (1, 2, 1, 1))
    block = probe_halo("it", InNumpy(halved), torch.zeros(1, 2, 70, 30))
    assert block.scale == 0.5


def test_a_model_that_is_one_block():
    """Not even the outermost module has a graph."""
    model, image = InNumpy(blurred).eval(), torch.rand(1, 3, 90, 31)
    small = lowtide.stream(model, budget="20MiB")
    assert torch.equal(small(image), model(image))
    assert "the model (" in small.explain(image)


def test_modules_are_left_as_they_were():
    model = net(blurred)
    lowtide.stream(model, budget="20MiB")(torch.rand(1, 3, 64, 64))
    assert all("forward" not in inner.__dict__ for inner in model.modules())
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in model.modules())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x - x.mean(), "depend on rows far away"),
        (lambda x: x * np.random.rand(), "draws random numbers"),
        (lambda x: x[:, : 40 if x[0, 0, 0] > 0 else 50], "depends on values of the input"),
        (lambda x: x[:, 3:], "no fixed scale"),
        (lambda x: x[0], "does not return a tensor"),
    ],
)
def test_a_module_that_is_no_block_is_refused_by_name(change, reason):
    small = lowtide.stream(net(change), budget="64MiB")
    with pytest.raises(ModelError, match=reason) as caught:
        small(torch.rand(1, 3, 64, 64))
    assert "1 (InNumpy) cannot be captured" in caught.value.message
