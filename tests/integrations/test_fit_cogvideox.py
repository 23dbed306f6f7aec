"""`AutoencoderKLCogVideoX` in bands: norms over all frames of the chunks that it cuts itself."""

from copy import deepcopy

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

import lowtide
from lowtide import BudgetError
from lowtide.integrations.fitted_module import _streams
from support.tiny_autoencoders import built

SIZES = {
    "block_out_channels": (8, 8),
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
    "temporal_compression_ratio": 2,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
}


def cogvideox(**changes):
    vae = built(AutoencoderKLCogVideoX, **{**SIZES, **changes}).requires_grad_(False)
    for name, one in vae.named_parameters():
        if one.dim() == 1:
            torch.nn.init.normal_(one, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    # chunks of four frames, and of two latents
    vae.num_sample_frames_batch_size = 4
    return vae


def results(vae, given, latents):
    return vae.encode(given).latent_dist.parameters, vae.decode(latents).sample


@pytest.mark.parametrize("frames", [9, pytest.param(3, marks=pytest.mark.slow)])
def test_clips_are_those_of_the_library(frames):
    vae, random = cogvideox(), torch.Generator().manual_seed(2)
    given = torch.rand((1, 3, frames, 40, 32), generator=random) * 2 - 1
    latents = vae.encode(given).latent_dist.mean
    wanted = results(vae, given, latents)
    exact = results(deepcopy(vae).double(), given.double(), latents.double())
    lowtide.fit(vae, budget="1GiB")
    found = results(vae, given, latents)
    for one, due, best in zip(found, wanted, exact, strict=True):
        bound = 2 * float((due - best).abs().max())
        assert one.shape == due.shape and bound <= 3e-5
        assert (one - due).abs().max() <= bound


@pytest.mark.slow
def test_the_least_budget_takes_bands():
    vae, random = cogvideox(), torch.Generator().manual_seed(2)
    latents = torch.randn((1, 4, 5, 45, 16), generator=random)
    wanted = vae.decode(latents).sample
    bound = 2 * float((deepcopy(vae).double().decode(latents.double()).sample - wanted).abs().max())
    lowtide.fit(vae, budget="1MiB")
    with pytest.raises(BudgetError) as refusal:
        vae.decode(latents)
    lowtide.fit(lowtide.unfit(vae), budget=refusal.value.smallest)
    assert (vae.decode(latents).sample - wanted).abs().max() <= bound
    plan = _streams[vae]["decoder"].chunks._prepared[1]
    assert max(max(run.prepared.layout.bands) for run in plan.runs) > 1
