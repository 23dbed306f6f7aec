"""`lowtide.fit` on a real pipeline of diffusers, with random weights."""

import pytest
import torch

import lowtide
from lowtide.core.errors import UsageError


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pipe():
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1, latent_channels=4,
        norm_num_groups=4,
    ).eval()  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    found = StableDiffusionPipeline(
        vae=vae, unet=unet, scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        text_encoder=None, tokenizer=None,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    found.set_progress_bar_config(disable=True)
    return found


def image(pipe):
    embedded = torch.full((1, 5, 8), 0.1)
    return pipe(
        prompt_embeds=embedded, negative_prompt_embeds=-embedded, num_inference_steps=2,
        height=96, width=80, output_type="pt", generator=torch.Generator().manual_seed(0),
    ).images[0]  # fmt: skip


@pytest.mark.parametrize("pages", ["memory", "disk"])
def test_a_pipeline_makes_the_same_image(pipe, pages):
    before = image(pipe)
    lowtide.fit(pipe.vae, budget="64MiB", pages=pages)
    try:
        fitted = image(pipe)
    finally:
        lowtide.unfit(pipe.vae)
    assert (fitted - before).abs().max() <= 2e-5
    assert torch.equal(image(pipe), before)


def test_encoding_is_fitted_too(pipe):
    sample = torch.randn(2, 3, 72, 56)
    with torch.no_grad():
        before = pipe.vae.encode(sample).latent_dist.parameters
        lowtide.fit(pipe.vae, budget="64MiB")
        try:
            fitted = pipe.vae.encode(sample).latent_dist.parameters
        finally:
            lowtide.unfit(pipe.vae)
    assert (fitted - before).abs().max() <= 2e-5


def test_its_own_tiling_is_switched_off(pipe):
    pipe.vae.enable_tiling()
    lowtide.fit(pipe.vae, budget="64MiB")
    try:
        assert not pipe.vae.use_tiling
    finally:
        lowtide.unfit(pipe.vae)


def test_says_what_it_cannot_fit(pipe):
    with pytest.raises(UsageError, match="no encoder or decoder"):
        lowtide.fit(torch.nn.Conv2d(3, 3, 1))
    for call in (lowtide.fit, lowtide.unfit):
        with pytest.raises(UsageError, match="StableDiffusionPipeline is no autoencoder") as caught:
            call(pipe)
        assert caught.value.hint == "pass its .vae"
    lowtide.fit(pipe.vae, budget="64MiB")
    try:
        with pytest.raises(UsageError, match="fitted already"):
            lowtide.fit(pipe.vae)
        with pytest.raises(UsageError, match="single tensor"):
            pipe.vae.decoder(torch.randn(1, 4, 8, 8), torch.ones(1))
    finally:
        lowtide.unfit(pipe.vae)
