"""`lowtide.fit` makes autoencoders of diffusers encode and decode by bands, in place."""

import warnings

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn

import lowtide
from lowtide import UsageError
from support.tiny_autoencoders import decoded, encoded, latents, same, small_vae
from support.tiny_pipelines import text_to_image


@pytest.mark.grid(2)
@pytest.mark.parametrize("pages", ["memory", "disk"])
def test_a_fitted_autoencoder_gives_the_same_results(pages):
    vae = small_vae(mid_block_add_attention=True)
    wanted = encoded(vae), decoded(vae)
    assert lowtide.fit(vae, budget="64MiB", pages=pages) is vae
    assert same(encoded(vae), wanted[0]) and same(decoded(vae), wanted[1])
    assert lowtide.unfit(vae) is vae
    assert torch.equal(encoded(vae), wanted[0]) and torch.equal(decoded(vae), wanted[1])


def test_images_of_a_batch():
    vae = small_vae()
    sample = torch.randn(3, 3, 24, 20)
    with torch.no_grad():
        wanted = vae(sample).sample
        assert same(lowtide.fit(vae, budget="64MiB", pages="memory")(sample).sample, wanted)


def test_it_is_run_by_bands():
    vae = lowtide.fit(small_vae(), budget="1MiB")
    with pytest.raises(lowtide.BudgetError, match=r"this model cannot be streamed in 1\.00 MiB"):
        decoded(vae)
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae), decoded(small_vae()))


def small_wan():
    torch.manual_seed(0)
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1}
    moments = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    return AutoencoderKLWan(temperal_downsample=[False], **sizes, **moments).eval()


class Scaled(nn.Module):
    """A part with weights of its own in addition to its layers'."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.full((3, 1, 1), 2.0))
        self.register_buffer("shift", torch.full((3, 1, 1), 0.5), persistent=False)

    def forward(self, image):
        return self.layer(image) * self.scale + self.shift


def test_parts_may_have_weights_of_their_own():
    module = nn.Module()
    module.encoder = Scaled()
    module.eval().requires_grad_(False)
    image = torch.rand(1, 3, 24, 20)
    lowtide.fit(module, budget="64MiB", pages="memory")
    for change in (None, nn.Parameter(torch.full((3, 1, 1), 3.0), requires_grad=False)):
        if change is not None:
            module.encoder.scale, module.encoder.shift = change, module.encoder.shift * 2
        part = module.encoder
        wanted = part.layer(image) * part.scale + part.shift
        assert same(part(image), wanted)


def test_says_what_it_cannot_fit():
    with pytest.raises(UsageError, match="no encoder or decoder"):
        lowtide.fit(nn.Conv2d(3, 3, 1))
    with pytest.raises(UsageError, match="pages 'nowhere'"):
        lowtide.fit(small_vae(), pages="nowhere")
    vae = lowtide.fit(small_vae(), budget="64MiB")
    with pytest.raises(UsageError, match="fitted already"):
        lowtide.fit(vae)
    with torch.no_grad():
        wanted = small_vae().decoder(latents())
        assert same(vae.decoder(sample=latents(), latent_embeds=None), wanted)
        with pytest.raises(UsageError, match="takes a single tensor, not latent_embeds"):
            vae.decoder(latents(), torch.ones(1))


def test_tiles_switched_on_again_are_warned_of():
    vae = lowtide.fit(small_vae(), budget="64MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = decoded(vae)
    vae.enable_tiling()
    with pytest.warns(UserWarning, match=r"AutoencoderKL .*enable_tiling\(\) was called after"):
        decoded(vae)
    vae.disable_tiling()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(decoded(vae), wanted)
    lowtide.unfit(vae).enable_tiling()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded(vae)


@pytest.mark.parametrize("wrong", [{"pages": "ram"}, {"budget": "2 bananas"}])
@pytest.mark.parametrize("make", [small_vae, small_wan], ids=["image", "video"])
def test_wrong_options_are_refused_at_once_and_change_nothing(make, wrong):
    vae = make()
    with pytest.raises(UsageError, match=next(iter(wrong))):
        lowtide.fit(vae, **wrong)
    lowtide.fit(vae, budget="64MiB")


def test_a_pipeline_error_names_the_part_to_pass():
    pipe, _ = text_to_image()
    for call in (lowtide.fit, lowtide.unfit):
        with pytest.raises(
            UsageError, match="StableDiffusionPipeline is not an autoencoder"
        ) as caught:
            call(pipe)
        assert caught.value.hint == "pass its .vae"
    holder = nn.Module()
    holder.vae = small_vae()
    with pytest.raises(UsageError, match="Module has no encoder or decoder") as caught:
        lowtide.fit(holder)
    assert caught.value.hint == "pass its .vae"
