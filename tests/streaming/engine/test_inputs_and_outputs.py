"""Calls with several arguments, several results, and axes other than the height."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import BudgetError, ModelError, UsageError
from support.stream_models import Normed

BOUND = 5e-6


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def assert_same(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= BOUND * max(1.0, expected.abs().max())


def in_bands(model, axis, *args, **kwargs):
    """The model streamed within the smallest budget for these arguments."""
    with pytest.raises(BudgetError) as caught:
        lowtide.stream(model, budget="1MiB", axis=axis)(*args, **kwargs)
    small = lowtide.stream(model, budget=caught.value.smallest, axis=axis)
    assert max(small.prepare(*args, **kwargs).layout.bands) > 1
    return small


class Denoiser(nn.Module):
    """An image with a timestep (B,), text (B, L, C) and a mask of the image's size."""

    def __init__(self, channels=16):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.embed = nn.Linear(8, channels)
        self.norm = nn.GroupNorm(4, channels)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image, timestep, text=None, mask=None, gain=1.0):
        angles = timestep[:, None] * torch.arange(4)
        x = (
            self.first(image)
            + self.embed(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None]
        )
        if text is not None:
            queries = x.flatten(2).mT
            x = x + F.scaled_dot_product_attention(queries, text, text).mT.view_as(x)
        x = self.last(F.silu(self.norm(x))) * gain
        return x if mask is None else x * mask


CALLS = {
    "one": (1, lambda b: {}),
    "a number": (1, lambda b: {"gain": 0.5}),
    "text": (1, lambda b: {"text": torch.rand(b, 7, 16)}),
    "batch": (3, lambda b: {"text": torch.rand(b, 7, 16)}),
    "text for the whole batch": (2, lambda b: {"text": torch.rand(1, 7, 16).expand(1, 7, 16)}),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", CALLS)
def test_fixed_arguments(name):
    batch, more = CALLS[name]
    torch.manual_seed(1)
    model, images, more = Denoiser().eval(), torch.rand(batch, 3, 133, 61), more(batch)
    small = in_bands(model, None, images, torch.ones(batch), **more)
    for step in (3.0, 7.5):
        timestep = torch.full([batch], step) + torch.arange(batch)
        assert_same(small(images, timestep, **more), model(images, timestep, **more))
    assert len(small._prepared) == 1


def test_several_streamed_tensors():
    torch.manual_seed(1)
    model, image, mask = Denoiser().eval(), torch.rand(1, 3, 131, 40), torch.rand(1, 1, 131, 40)
    timestep = torch.tensor([3.0])
    expected = model(image, timestep, mask=mask)
    for axis in ({"image": 2, "mask": 2}, {0: -1, "mask": 3}):
        small = in_bands(model, axis, image, timestep, mask=mask)
        assert_same(small(image, timestep, mask=mask), expected)
        assert_same(small(image=image, timestep=timestep, mask=mask), expected)
    # A mask that is not streamed is taken whole, and then is not that of a smaller image.
    assert_same(lowtide.stream(model, budget="24MiB")(image, timestep, mask=mask), expected)
    image, mask = torch.rand(1, 3, 520, 24), torch.rand(1, 1, 520, 24)
    with pytest.raises(ModelError) as refused:
        lowtide.stream(model, budget="24MiB")(image, timestep, mask=mask)
    assert "axis={'image': 2, 'mask': 2}" in refused.value.hint


class Encoder(nn.Module):
    """Mean, log variance and levels of several scales, and one value for the image."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = Normed(16, 2)
        self.down = nn.Conv2d(3, 8, 3, 2, 1)

    def forward(self, image):
        x = self.body(image)
        half = self.down(x)
        mean, log_variance = half.chunk(2, 1)
        return {
            "levels": [x, half],
            "mean": mean,
            "again": (mean, log_variance.clamp(-3, 3)),
            "gain": half.mean((2, 3)) * 2,
            "constant": torch.arange(3.0),
        }


@pytest.mark.grid(2)
@pytest.mark.parametrize("images", [1, 2])
def test_several_results(images):
    model = Encoder().eval()
    torch.manual_seed(1)
    image = torch.rand(images, 3, 240, 64)
    if images > 1:
        model.forward = lambda image: {**Encoder.forward(model, image), "constant": None}
    small = in_bands(model, None, image)
    found, expected = small(image), model(image)
    for key in ("mean", "gain"):
        assert_same(found[key], expected[key])
    for one, other in zip(
        [*found["levels"], *found["again"]], [*expected["levels"], *expected["again"]], strict=True
    ):
        assert_same(one, other)
    if images == 1:
        assert torch.equal(found["constant"], expected["constant"])
        with pytest.raises(UsageError, match="one result"):
            next(small.rows(image))


AXES = {
    "width": (lambda: Normed(16, 2), (1, 3, 40, 150), 3),
    "frames as a batch": (lambda: Normed(16, 2), (24, 3, 40, 36), 0),
    "clip, frames first": (
        lambda: FramesFirst(),
        (2, 9, 3, 24, 20),
        1,
    ),
}


class FramesFirst(nn.Module):
    """A clip (B, T, C, H, W), whose frames are convolved and then summed with those before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.time = Normed(16, 1), nn.Conv3d(3, 3, (3, 1, 1))

    def forward(self, clip):
        frames = self.body(clip.flatten(0, 1)).unflatten(0, clip.shape[:2])
        return self.time(F.pad(frames.transpose(1, 2), (0, 0, 0, 0, 2, 0))).transpose(1, 2)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", AXES)
def test_axes(name):
    make, shape, axis = AXES[name]
    torch.manual_seed(1)
    model, x = make().eval(), torch.rand(shape)
    small = in_bands(model, axis, x)
    expected = model(x)
    assert_same(small(x), expected)
    if shape[0] == 1 or axis == 0:
        dim = small.prepare(x).program.rows[small.prepare(x).program.output].dim
        parts = list(small.rows(x))
        assert_same(torch.cat([rows for _, rows in parts], dim), expected)


REFUSED = {
    "no axis": ((torch.rand(1, 3, 8),), {}, None, "height, width"),
    "no dim": ((torch.rand(1, 3, 8),), {}, 3, "has no dim 3"),
    "no tensor": ((3,), {}, None, "none is among"),
    "no such argument": ((torch.rand(1, 3, 8, 8),), {}, {"mask": 2}, "'mask', which is not passed"),
    "a number": ((torch.rand(1, 3, 8, 8), 4), {}, {1: 2}, "only tensors"),
    "complex": ((torch.ones(1, 3, 8, 8, dtype=torch.complex64),), {}, 2, "real tensors"),
    "batches": (
        (torch.rand(1, 3, 8, 8), torch.rand(2, 3, 8, 8)),
        {},
        {0: 2, 1: 2},
        "differ in batch size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_streamed_are_named(name):
    args, kwargs, axis, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        lowtide.stream(Denoiser().eval(), axis=axis)(*args, **kwargs)
