"""Several images at once: the result of the module for the batch, or a refusal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import ModelError
from lowtide.streaming.batch_independence import require_independent_images


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.between = between

    def forward(self, image):
        return self.last(self.between(self.first(image)))


def attention(x):
    images, channels, height, width = x.shape
    tokens = x.flatten(2).view(images, 2, channels // 2, -1).transpose(2, 3)
    mixed = F.scaled_dot_product_attention(tokens, tokens, tokens)
    return x + mixed.transpose(2, 3).reshape(images, channels, height, width)


def windows(x):
    """Those of all images along one dimension."""
    images, channels, height, width = x.shape
    parts = x.view(images, channels, height // 8, 8, width // 8, 8)
    tokens = parts.permute(0, 2, 4, 3, 5, 1).reshape(-1, 64, channels)
    tokens = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    parts = tokens.view(images, height // 8, width // 8, 8, 8, channels)
    return parts.permute(0, 5, 1, 3, 2, 4).reshape(images, channels, height, width)


INDEPENDENT = {
    "pointwise": F.silu,
    "norm": F.instance_norm,
    "attention": attention,
    "windows": windows,
    "most of each": lambda x: x - x.amax((1, 2, 3), keepdim=True),
    "chosen by values": lambda x: torch.where(x > 0.1, x, x * 2),
    "places of the most": lambda x: x * x.argmax(1, keepdim=True),
    "turned and joined": lambda x: sum(torch.cat([x, x.flip(3)]).chunk(2)),
    "turned twice": lambda x: x.flip(0).relu().flip(0),
}
MIXED = {
    "least": lambda x: x - x.amin(),
    "mean": lambda x: x - x.mean(0),
    "statistics": lambda x: x - x.mean((0, 2, 3), keepdim=True),
    "turned": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "first": lambda x: x + x[:1],
    "softmax": lambda x: x.softmax(0),
    # Nothing of this shows in the results of images whose values are all in 0..1.
    "seldom": lambda x: torch.where(x.amax() > 1e4, x, x * 2),
    # Independent of each other, but not what each alone gives.
    "number of images": lambda x: x / len(x),
    "only alone": lambda x: x.relu() if len(x) == 1 else x,
    "places": lambda x: x + torch.arange(len(x)).view(-1, 1, 1, 1),
}


def made(between):
    return Between(between).eval().requires_grad_(False)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_images_are_shown_to_be_so(name):
    require_independent_images(made(INDEPENDENT[name]), torch.rand(3, 3, 32, 24))


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", MIXED)
def test_images_that_depend_on_each_other_are_found_out(name):
    with pytest.raises(ModelError) as caught:
        require_independent_images(made(MIXED[name]), torch.rand(2, 3, 32, 24))
    assert caught.value.hint.startswith("pass one image at a time")


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"images": 2}', None])
def test_a_damaged_proof_of_independence_is_no_proof(tmp_path, monkeypatch, damage):
    module, images = made(windows), torch.rand(2, 3, 32, 24)
    require_independent_images(module, images)

    def never(*_):
        raise AssertionError("compared again")

    monkeypatch.setattr("lowtide.streaming.batch_independence.call_model", never)
    require_independent_images(module, images)  # by the proof
    (file,) = tmp_path.glob("plans/proof-*")
    file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(AssertionError, match="compared again"):
        require_independent_images(module, images)


def test_a_batch_equals_the_module():
    module, images = made(windows), torch.rand(3, 3, 32, 24)
    found = lowtide.stream(module, budget="64MiB")(images)
    assert (found - module(images)).abs().max() <= 5e-6


def test_a_batch_that_is_mixed_is_refused_and_one_image_of_it_is_not():
    module, images = made(MIXED["mean"]), torch.rand(2, 3, 32, 24)
    small = lowtide.stream(module, budget="64MiB")
    with pytest.raises(ModelError, match="mixes the images of a batch"):
        small(images)
    assert (small(images[:1]) - module(images[:1])).abs().max() <= 5e-6


@pytest.mark.parametrize("images", [2, 3, 5])
def test_dependence_between_any_two_images_is_detected(images):
    """Of five the last two, which differ in one digit of their places."""

    def mixed(x):
        return torch.cat([x[:-1], (x[-1:] + x[-2:-1])])

    def above_a_limit(x):
        return torch.cat([x[:1] * (1 + (x[-1] > 1e4).any()), x[1:]])

    for between in (mixed, above_a_limit):
        with pytest.raises(ModelError, match="mixes the images"):
            require_independent_images(made(between), torch.rand(images, 3, 16, 16))


def test_independence_is_proven_for_each_batch_size():
    module = made(lambda x: x - x.mean() if len(x) == 3 else x)
    small, images = lowtide.stream(module, budget="64MiB"), torch.rand(3, 3, 16, 16)
    assert (small(images[:2]) - module(images[:2])).abs().max() <= 5e-6
    with pytest.raises(ModelError, match="mixes the images of a batch"):
        small(images)
