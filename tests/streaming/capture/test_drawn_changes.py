"""Drawn at random: a module, a batch, and a change after the first call. The second call gives what
the untouched module gives, or is refused by name."""

import contextlib
import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import LowtideError

# The bounds of the project, as a share of the largest number.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


class Scaled(nn.Module):
    """A function with a number and a table."""

    def __init__(self, call):
        super().__init__()
        self.call, self.scale = call, 2.0
        self.register_buffer("table", torch.rand(1, 8, 1, 1))

    def forward(self, x):
        return self.call(x * self.table) * self.scale


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(2, 8), nn.Linear(8, 24)

    def forward(self, x):
        images, channels, height, width = x.shape
        tokens = self.mix(self.norm(x).flatten(2).transpose(1, 2))
        parts = tokens.view(images, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2)
        return x + found.reshape(images, height, width, channels).permute(0, 3, 1, 2)


class Adapted(nn.Module):
    """A layer with another one in parallel."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.parallel = layer, nn.Conv2d(layer.in_channels, layer.out_channels, 1)

    def forward(self, x):
        return self.layer(x) + self.parallel(x)


PARTS = [
    lambda: nn.Conv2d(8, 8, 3, padding=1),
    lambda: nn.Conv2d(8, 8, 5, padding=2, groups=8),
    lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2, padding_mode="reflect"),
    lambda: nn.GroupNorm(2, 8),
    lambda: nn.InstanceNorm2d(8, affine=True),
    lambda: nn.BatchNorm2d(8),
    lambda: nn.Sequential(nn.SiLU(), nn.Dropout(0.5)),
    lambda: nn.MaxPool2d(3, 1, 1),
    Attention,
    lambda: nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")),
    lambda: Scaled(torch.tanh),
    lambda: Scaled(lambda x: x - x.mean((2, 3), keepdim=True)),
    lambda: Scaled(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    lambda: Scaled(lambda x: x - x.amax((1, 2, 3), keepdim=True)),
    lambda: Scaled(lambda x: x.softmax(1)),
    lambda: Scaled(lambda x: x.roll(3, 2)),
    lambda: Scaled(lambda x: x.flip(3) + F.pad(x, (1, 1, 1, 1), mode="reflect")[..., 2:, 2:]),
]
# What some of these give for a batch is not what they give for its images.
MIXERS = [
    lambda: Scaled(lambda x: x - x.amin()),
    lambda: Scaled(lambda x: x - x.mean(0)),
    lambda: Scaled(lambda x: x.flip(0)),
    lambda: Scaled(lambda x: x.roll(1, 0)),
    lambda: Scaled(lambda x: x - x.mean((0, 2, 3), keepdim=True)),
    lambda: Scaled(lambda x: x + x[:1]),
    lambda: Scaled(lambda x: x / len(x)),
    lambda: Scaled(lambda x: torch.where(x.amax() > 1e3, x, -x)),
    lambda: Scaled(lambda x: x if x.mean() > 0 else -x),
]


def drawn_module(draw):
    torch.manual_seed(draw.randrange(1 << 30))
    parts = [draw.choice(PARTS)() for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.25:
        parts.insert(draw.randint(0, len(parts)), draw.choice(MIXERS)())
    ends = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    return nn.Sequential(ends[0], *parts, ends[1]).eval()


def assigned(module, draw):
    values = {name: value * 0.5 for name, value in module.state_dict().items()}
    module.load_state_dict(values, assign=True)


def other_buffer(module, draw):
    for part in module.modules():
        for name, value in part.named_buffers(recurse=False):
            setattr(part, name, value + 1)


def scaled(module, draw):
    for part in module:
        if isinstance(part, Scaled):
            part.scale = draw.choice((0.5, 3, 1))


def hooked(module, draw):
    draw.choice(module).register_forward_hook(lambda part, given, made: made * 1.5)


def hooked_before(module, draw):
    draw.choice(module).register_forward_pre_hook(lambda part, given: (given[0] - 0.25,))


CHANGES = [
    lambda module, draw: None,
    lambda module, draw: module[0].weight.mul_(0.5),
    lambda module, draw: setattr(module[-1].weight, "data", module[-1].weight * 0.5),
    lambda module, draw: setattr(module[0], "bias", nn.Parameter(torch.rand(8))),
    lambda module, draw: module.__setitem__(-1, nn.Conv2d(8, 3, 5, padding=2)),
    lambda module, draw: module.__setitem__(0, Adapted(module[0])),
    lambda module, draw: module.insert(1, nn.Tanh()),
    lambda module, draw: setattr(module[0], "padding_mode", "circular"),
    lambda module, draw: setattr(module[-1], "padding", (0, 0)),
    lambda module, draw: draw.choice(module).train(),
    lambda module, draw: module.train(),
    lambda module, draw: module.double(),
    lambda module, draw: module.bfloat16(),
    lambda module, draw: draw.choice(module).__setattr__("forward", torch.sin),
    assigned,
    other_buffer,
    scaled,
    hooked,
    hooked_before,
]


def check(module, small, image):
    """Whether there was a result. What it has to be is found on a copy: training has effects."""
    state = torch.get_rng_state()
    try:
        expected = copy.deepcopy(module)(image.clone())
    except RuntimeError:  # a change that does not fit: there is nothing to be equal to
        with pytest.raises(LowtideError):
            small(image)
        return False
    torch.set_rng_state(state)
    try:
        found = small(image)
    except LowtideError as error:
        assert error.message and "\n" not in error.message
        return False
    assert found.dtype == expected.dtype and found.shape == expected.shape
    types = {expected.dtype, image.dtype, *(one.dtype for one in module.parameters())}
    bound = max(BOUNDS[kind] for kind in types) * float(expected.abs().max())
    assert (found - expected).abs().max() <= bound
    return True


def check_case(number):
    """What became of the first call and of the second."""
    draw = random.Random(number)
    module = drawn_module(draw)
    image = torch.rand(draw.randint(1, 3), 3, 2 * draw.randint(6, 12), 2 * draw.randint(6, 12))
    small = lowtide.stream(module, budget="64MiB")
    with torch.no_grad():
        first = check(module, small, image)
        draw.choice(CHANGES)(module, draw)
        image = image.to(next(module.parameters()).dtype)
        under = torch.autocast("cpu", dtype=torch.bfloat16)
        with under if draw.random() < 0.1 else contextlib.nullcontext():
            return first, check(module, small, image)


def check_cases(numbers, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    found = [check_case(number) for number in numbers]
    # Most of what is drawn can be streamed.
    assert sum(first for first, _ in found) > len(found) / 2
    assert sum(second for _, second in found) > len(found) / 2


def test_a_few_cases(tmp_path, monkeypatch):
    check_cases(range(2), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(2, 202, 20))
def test_two_hundred_cases(start, tmp_path, monkeypatch):
    check_cases(range(start, min(start + 20, 200)), tmp_path, monkeypatch)
