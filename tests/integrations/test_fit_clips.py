"""The decoder of a video autoencoder in bands of rows, against the library's own chunks."""

from copy import deepcopy

import pytest
import torch
from diffusers import AutoencoderKLWan

import lowtide
from lowtide.core.errors import BudgetError, UsageError
from lowtide.integrations.fitted_module import _streams
from support.tiny_autoencoders import built, halved, same

# One upsampling, in time too.
WAN = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1],
    "num_res_blocks": 0,
    "temperal_downsample": [True],
}


def wan(**changes):
    return built(AutoencoderKLWan, **{**WAN, **changes})


def latents(frames=3, batch=1, height=53, width=46):
    shape = (batch, 4, frames, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def decoded(vae, given):
    with torch.no_grad():
        return vae.decode(given).sample


def programs_of(vae):
    """Programs of the first latent and of later ones."""
    return _streams[vae]["decoder"].chunks._prepared[1]


def test_a_clip_is_decoded_as_in_chunks_of_the_library():
    vae, given = wan(), latents()
    wanted = decoded(vae, given)
    lowtide.fit(vae, budget="23MiB")
    found = decoded(vae, given)
    assert found.shape == wanted.shape == (1, 3, 5, 106, 92)
    assert same(found, wanted)
    assert min(max(one.layout.bands) for one in programs_of(vae)) > 1

    # an error leaves no cache, and one left by others is not read
    vae._feat_map[0] = torch.zeros(1)
    vae._enc_feat_map[0] = torch.zeros(1)
    with pytest.raises(RuntimeError):
        decoded(vae, given[:, :2])  # too few channels
    assert {*vae._feat_map, *vae._enc_feat_map} == {None}
    vae._feat_map[0] = torch.zeros(1)
    assert torch.equal(decoded(vae, given), found)
    assert {*vae._feat_map} == {None}
    with pytest.raises(UsageError, match="requires gradients"):
        vae.decode(given)


@pytest.mark.slow
def test_other_clips_and_copies():
    vae = wan()
    batch, one = latents(batch=2), latents(frames=1)
    wanted = decoded(vae, batch), decoded(vae, one)
    lowtide.fit(vae, budget="2GiB")
    assert same(decoded(vae, batch), wanted[0])
    other = halved(vae)  # has weights of its own
    assert same(decoded(other, batch), decoded(lowtide.unfit(halved(vae)), batch))
    assert same(decoded(vae, one), wanted[1])


@pytest.mark.slow
def test_the_budget_that_a_refusal_names_is_enough():
    vae, given = wan(), latents()
    lowtide.fit(vae, budget="1MiB")
    with pytest.raises(BudgetError) as refusal:
        decoded(vae, given)
    lowtide.fit(lowtide.unfit(vae), budget=refusal.value.smallest)
    assert same(decoded(vae, given), decoded(wan(), given))


def test_unfit_restores_the_module():
    vae, given = wan(), latents()
    vae.enable_tiling()
    vae.enable_slicing()
    wanted, before = decoded(vae, given), dict(vars(vae))
    lowtide.fit(vae)
    with pytest.raises(UsageError, match="AutoencoderKLWan is fitted already"):
        lowtide.fit(vae)
    assert type(deepcopy(vae)).__name__ == "AutoencoderKLWan"
    lowtide.unfit(vae)
    assert type(vae) is AutoencoderKLWan
    assert vae.use_tiling
    assert vae.use_slicing
    assert vars(vae).keys() == before.keys()
    assert torch.equal(decoded(vae, given), wanted)


def test_other_forms_are_refused():
    with pytest.raises(UsageError, match=r"of Wan 2.2 \(is_residual"):
        lowtide.fit(wan(is_residual=True))
    vae = wan()
    vae._decode = vae._decode
    with pytest.raises(UsageError, match="the _decode of this AutoencoderKLWan is replaced"):
        lowtide.fit(vae)
