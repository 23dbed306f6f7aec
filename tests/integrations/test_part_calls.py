"""Calls of fitted parts that fit the budget run as they are, others in bands."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

import lowtide
from support.tiny_autoencoders import built, decoded, encoded, latents, same, small_vae

SIDE = 256


def whole_calls(layer):
    """Sizes of the images that a layer is called with as a whole; bands do not call it."""
    sizes = []

    def record(_, given):
        if not is_fake(given[0]):
            sizes.append(tuple(given[0].shape[2:]))

    layer.register_forward_pre_hook(record)
    return sizes


def test_a_call_that_fits_is_the_modules_own():
    vae = lowtide.fit(small_vae(mid_block_add_attention=True), budget="64MiB")
    sizes = whole_calls(vae.decoder.conv_in)
    plain = small_vae(mid_block_add_attention=True)
    for _ in range(2):
        assert torch.equal(decoded(vae), decoded(plain))
        assert torch.equal(encoded(vae), encoded(plain))
    assert sizes == [tuple(latents().shape[2:])] * 2


def test_a_call_that_does_not_fit_runs_in_bands():
    vae, plain = small_vae(), small_vae()
    image = torch.rand(1, 4, SIDE, SIDE + 8)
    with torch.no_grad():
        wanted = plain.decode(image).sample
        for budget, whole in (("24MiB", 0), ("1GiB", 1)):
            sizes = whole_calls(lowtide.fit(vae, budget=budget).decoder.conv_in)
            assert same(vae.decode(image).sample, wanted)
            assert sizes.count((SIDE, SIDE + 8)) == whole
            lowtide.unfit(vae)


def test_batches_and_other_types_run_as_they_are():
    vae, plain = lowtide.fit(small_vae(), budget="64MiB"), small_vae()
    sample = torch.randn(3, 3, 24, 20)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            found, wanted = (one.to(dtype)(sample.to(dtype)).sample for one in (vae, plain))
        assert torch.equal(found, wanted)


class Noisy(nn.Module):
    """A part that draws random numbers, which bands would draw differently."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image):
        return self.layer(image) + torch.randn_like(image)


def test_a_module_that_cannot_run_in_bands_stays_as_it_is():
    module = nn.Module()
    module.encoder = built(Noisy)
    image = torch.rand(1, 3, 24, 20)
    results = []
    for fitted in (False, True):
        if fitted:
            lowtide.fit(module.eval().requires_grad_(False), budget="64MiB")
        torch.manual_seed(0)
        with torch.no_grad():
            results.append([module.encoder(image) for _ in range(3)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("budget", ["64MiB", "1GiB"])
def test_a_place_of_pages_asks_for_bands(budget):
    vae = lowtide.fit(small_vae(), budget=budget, pages="memory")
    decoded(vae)
    sizes = whole_calls(vae.decoder.conv_in)
    assert same(decoded(vae), decoded(small_vae()))
    assert sizes == []
