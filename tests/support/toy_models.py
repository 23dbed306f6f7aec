"""Small real networks and in-memory rows for tests of the runner."""

import numpy as np
import torch
from torch import nn

from lowtide.jobs.images.adapter import ImageAdapter
from lowtide.media.image_info import ImageInfo
from lowtide.memory.budget import Budget
from lowtide.memory.choice import choose_plan
from lowtide.memory.costs import ModelCosts, ProbePoint
from lowtide.streaming.planner.model_facts import ImageTask, ModelGeometry, PlanOverrides
from lowtide.streaming.planner.tile_candidates import tile_candidates
from lowtide.streaming.tiles.network import RunnableNetwork
from lowtide.streaming.tiles.runner import execute_plan

GIB = 1 << 30


class ArraySource:
    """An array, read along its leading axis and in order."""

    def __init__(self, array):
        self.array, self.read_to = array, 0
        self.shape, self.dtype = array.shape, array.dtype

    def read(self, first, last):
        assert first >= self.read_to
        self.read_to = last
        return self.array[first:last]

    def close(self):
        pass


class ArraySink:
    """Values into an array, in order along its leading axis."""

    def __init__(self):
        self.parts = []

    def write(self, first, values):
        assert first == sum(map(len, self.parts))
        self.parts.append(np.array(values))

    def commit(self):
        return np.concatenate(self.parts)


def pictures(seed=0):
    """A function that draws pictures, each another."""
    generator = np.random.default_rng(seed)

    def picture(height, width, bands, sample="uint8"):
        if sample == "float32":
            return generator.random((height, width, bands), np.float32)
        high = np.iinfo(sample).max + 1
        return generator.integers(0, high, (height, width, bands)).astype(sample)

    return picture


def conv_net(scale=2, channels=3, features=8, layers=3, seed=0):
    """A plain convolutional upscaler with a reach of ``layers`` + 1 pixels."""
    torch.manual_seed(seed)
    body = [nn.Conv2d(channels, features, 3, padding=1), nn.LeakyReLU(0.1)]
    for _ in range(layers - 1):
        body += [nn.Conv2d(features, features, 3, padding=1), nn.LeakyReLU(0.1)]
    body += [nn.Conv2d(features, channels * scale**2, 3, padding=1), nn.PixelShuffle(scale)]
    return nn.Sequential(*body).eval().requires_grad_(False)


class Centered(nn.Module):
    """A network with a global statistic, which tiles cannot know."""

    def forward(self, x):
        return x - 0.5 * x.mean((2, 3), keepdim=True) + 0.25


class Strided(nn.Module):
    """A network on a grid of four pixels: unshuffle, convolve, shuffle."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(48, 48, 3, padding=1)
        self.requires_grad_(False)

    def forward(self, x):
        y = nn.functional.pixel_unshuffle(x, 4)
        return nn.functional.pixel_shuffle(y + 0.1 * self.conv(y), 4)


def network(module, scale=2, channels=3, **more):
    """The module as the runner sees it."""
    return RunnableNetwork(module, scale, channels, channels, **more)


def image_adapter(net, array):
    """The conversion between images like this array and a network."""
    height, width, bands = array.shape
    return ImageAdapter(ImageInfo(width, height, bands, str(array.dtype)), net.in_channels)


def image_task(array, padded_size, channels=3):
    """The facts about an image like this array that a plan needs."""
    inputs = image_adapter(network(None, channels=channels), array).inputs
    return ImageTask(array.shape, padded_size, item_bytes=array.itemsize, inputs=inputs)


def costs(reach, *, batchable=True, per_pixel=600, device="cpu"):
    """Costs as a probe would report them."""
    points = tuple(
        ProbePoint(
            pixels=side**2,
            peak_bytes=side**2 * per_pixel,
            resident_bytes=side**2 * per_pixel * 3 // 2,
            seconds=side**2 * 1e-7,
        )
        for side in (64, 128)
    )
    return ModelCosts(
        sha256="0" * 64,
        device=device,
        precision="fp32",
        weight_bytes=1000,
        channels_last=False,
        batchable=batchable,
        receptive_field=reach,
        receptive_field_search_limit=31,
        points=points,
    )


def make_plan(array, reach, *, scale=2, channels=3, align=1, minimum=0, budget=GIB, **wishes):
    """The plan for an array."""
    height, width, _ = array.shape
    pad = lambda side: -(-max(side, minimum) // align) * align  # noqa: E731
    shape = ModelGeometry(scale, channels, channels, align, minimum)
    picture = image_task(array, (pad(height), pad(width)), channels)
    plans = tile_candidates(costs(reach), shape, picture, PlanOverrides(**wishes))
    return choose_plan(plans, Budget(budget, budget, budget))


def run_array(net, array, plan, **more):
    """Run an array through the plan; returns (result, outcome)."""
    sink = ArraySink()
    outcome = execute_plan(net, image_adapter(net, array), ArraySource(array), sink, plan, **more)
    return sink.commit(), outcome
