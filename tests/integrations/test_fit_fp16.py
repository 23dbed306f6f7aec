"""Fitted autoencoders in fp16 whose values exceed its range."""

import warnings

import pytest
import torch
from diffusers import AutoencoderKLWan

import lowtide
from support.tiny_autoencoders import built, latents, small_vae

WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 0}
WAN |= {"temperal_downsample": [True], "scale_factor_temporal": 2, "scale_factor_spatial": 2}
# In fp16 they are finite, and what a convolution makes of them is not.
LARGE = 3e4


@torch.no_grad()
def test_a_clip_is_decoded_again_in_fp32():
    vae = built(AutoencoderKLWan, **WAN)
    vae.decoder.conv_in.weight.mul_(100)
    given = torch.rand(1, 4, 3, 9, 7, generator=torch.Generator().manual_seed(1)).sub(0.5)
    given = (LARGE * given).half()
    vae.half()
    wanted = vae.float().decode(given.float()).sample
    vae.half()
    assert not vae.decode(given).sample.isfinite().all()
    lowtide.fit(vae, budget="1GiB")
    with pytest.warns(UserWarning, match="decoder of this AutoencoderKLWan exceed the range"):
        found = vae.decode(given).sample
    assert found.dtype == torch.float16
    assert (found.float() - wanted).abs().max() <= 2e-3
    with warnings.catch_warnings(action="error"):
        assert vae.decode(given / LARGE).sample.isfinite().all()
        # what is not finite in is not finite out, as without fit
        assert vae.decode(given * torch.nan).sample.isnan().any()


@torch.no_grad()
def test_an_image_is_decoded_again_in_fp32():
    vae = small_vae()
    vae.decoder.conv_in.weight.mul_(100)
    given = (latents() * LARGE / 4).half()
    vae.half()
    wanted = vae.float().decode(given.float()).sample
    vae.half()
    assert not vae.decode(given).sample.isfinite().all()
    lowtide.fit(vae, budget="1GiB")
    with pytest.warns(UserWarning, match="exceed the range of float16"):
        found = vae.decode(given).sample
    assert (found.float() - wanted).abs().max() <= 4e-3 * wanted.abs().max()
