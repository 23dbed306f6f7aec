"""A module whose result depends on its earlier calls, or on chance, is refused by name."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import ModelError

pytestmark = pytest.mark.usefixtures("results_alone")


TOTAL = {"calls": 0}
SIZES = []


class Net(nn.Module):
    """Finishes what a convolution makes by a function of the module and that."""

    def __init__(self, finish):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.finish = nn.Conv2d(3, 3, 3, padding=1), finish
        self.last, self.size, self.count, self.kept = None, None, 0, []
        self.registers = {"last": None}
        self.drawn, self.sampler = random.Random(1), np.random.default_rng(1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, image):
        return self.finish(self, self.conv(image))


def recurrent(net, x):
    result = x if net.last is None else x + 0.5 * net.last
    net.last = result
    return result


def temporal(net, x):
    net.kept.append(x)
    return sum(net.kept[-3:]) if len(net.kept) > 3 else x


def registered(net, x):
    last = net.registers["last"]
    net.registers["last"] = x
    return x if last is None else x + last


def counted(net, x):
    net.count += 1
    return x if net.count < 9 else x * 2


def counted_outside(net, x):
    TOTAL["calls"] += 1
    return x if TOTAL["calls"] < 9 else x * 2


def first_size(net, x):
    if net.last is None:
        net.last = x.sum(3, keepdim=True)
    return x + net.last


def counted_in_buffer(net, x):
    net.calls.add_(1)
    return x * net.calls


REMEMBERING = {
    recurrent: "remembers its calls in last,",
    temporal: "remembers its calls in kept,",
    registered: "remembers its calls in registers,",
    counted: "remembers its calls in count,",
    counted_outside: "remembers its calls in the global TOTAL,",
    first_size: "remembers its calls in last,",
    counted_in_buffer: "updates its calls with each image",
    lambda net, x: x * random.random(): "draws random numbers from Python's random",
    lambda net, x: x * float(np.random.rand()): "draws random numbers from NumPy's random",
    lambda net, x: x * net.drawn.random(): "draws random numbers from drawn",
    lambda net, x: x * net.sampler.random(): "draws random numbers from sampler",
    lambda net, x: x * float(np.random.default_rng().random()): "something else each time",
    lambda net, x: x * (time.perf_counter() % 1): "something else each time",
}


@pytest.mark.parametrize("finish", REMEMBERING, ids=lambda finish: finish.__name__)
def test_what_a_call_leaves_for_the_next_is_refused_by_name(finish):
    module, image = Net(finish).eval(), torch.rand(1, 3, 16, 12)
    drawn = random.getstate(), np.random.get_state()[1].tolist(), module.sampler.bit_generator.state
    with pytest.raises(ModelError, match=REMEMBERING[finish]):
        lowtide.stream(module, budget="64MiB")(image)
    assert module.last is None and module.count == TOTAL["calls"] == module.calls == 0
    assert not module.kept and module.registers == {"last": None}
    state = np.random.get_state()[1].tolist(), module.sampler.bit_generator.state
    assert (random.getstate(), *state) == drawn


def written_first(net, x):
    net.size, net.kept, net.last = x.shape, [], x * 2
    net.kept.append(net.last)
    net.registers["last"] = x
    return net.kept[0]


def reported(net, x):
    SIZES.append(tuple(x.shape))
    return x


def by_size(net, x):
    side = x.shape[3]
    if net.size != (side, [side]):
        net.last = torch.linspace(0, 1, side)
    net.size, net.registers["last"] = (side, [side]), (x, side)
    return x + net.last


@pytest.mark.parametrize("finish", [written_first, reported, by_size])
def test_what_is_written_before_it_is_read_runs(finish):
    module, other = Net(finish).eval(), Net(finish).eval()
    small = lowtide.stream(module, budget="64MiB")
    for side in (12, 20, 12):
        image = torch.rand(1, 3, 16, side)
        assert (small(image) - other(image)).abs().max() <= 1e-5
    assert module.last is None


def test_a_proof_is_of_the_code_as_it_is():
    """A notebook's cell, edited: the class has the same name, and the network the same weights."""
    image = torch.rand(2, 3, 16, 12)

    def edited(finish):
        finish.__qualname__ = "finish"
        return lowtide.stream(Net(finish).eval(), budget="64MiB")(image)

    def keeps(net, x):
        net.last = x
        return x * 2

    def reads(net, x):
        x, net.last = (x if net.last is None else net.last), x
        return x * 2

    edited(keeps)
    with pytest.raises(ModelError, match="remembers its calls in last,"):
        edited(reads)
    edited(lambda net, x: x - x.mean(1, keepdim=True))
    with pytest.raises(ModelError, match="mixes the images"):
        edited(lambda net, x: x - x.mean(0, keepdim=True))
