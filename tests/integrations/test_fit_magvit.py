"""`AutoencoderKLMagvit` in bands: what its modules keep is carried outside of them."""

import pytest
import torch
from diffusers import AutoencoderKLMagvit

import lowtide
from lowtide import BudgetError, OutputError, UsageError
from lowtide.integrations.fitted_module import _streams
from support.tiny_autoencoders import built

SIZES = {
    "block_out_channels": [8, 8],
    "down_block_types": ["SpatialTemporalDownBlock3D"] * 2,
    "up_block_types": ["SpatialTemporalUpBlock3D"] * 2,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
}


def magvit(**changes):
    vae = built(AutoencoderKLMagvit, **{**SIZES, **changes}).requires_grad_(False)
    for name, one in vae.named_parameters():
        if one.dim() == 1:
            torch.nn.init.normal_(one, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return vae


def clip(frames=5, height=90, width=32):
    shape = (1, 3, frames, height, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 2 - 1


def encoded(vae, given):
    return vae.encode(given).latent_dist.parameters


def decoded(vae, given):
    return vae.decode(given).sample


def kept(vae):
    return [one for one in vae.modules() if getattr(one, "prev_features", None) is not None]


def bound(one, other):
    """Twice what its own rounding makes."""
    return 2 * float((one - other).abs().max())


def most_bands(vae, part):
    """Most bands of a segment."""
    plan = _streams[vae][part].chunks._prepared[1]
    return max(max(run.prepared.layout.bands) for run in plan.runs)


def test_clips_are_those_of_the_library():
    vae, given = magvit(), clip()
    wanted = encoded(vae, given)
    latents = wanted[:, :4]
    frames = decoded(vae, latents)
    exact = magvit().double()
    bounds = (
        bound(encoded(exact, given.double()), wanted),
        bound(decoded(exact, latents.double()), frames),
    )
    assert max(bounds) <= 3e-5

    lowtide.fit(vae, budget="1GiB")
    assert (encoded(vae, given) - wanted).abs().max() <= bounds[0]
    assert (decoded(vae, latents) - frames).abs().max() <= bounds[1]
    assert not kept(vae)

    # what an interrupted call has left is not read, and a refused one leaves nothing
    for one in vae.modules():
        if hasattr(one, "prev_features"):
            one.prev_features = torch.zeros(1)
    assert (decoded(vae, latents) - frames).abs().max() <= bounds[1]
    assert not kept(vae)
    with pytest.raises(RuntimeError):
        decoded(vae, latents[:, :2])
    assert not kept(vae)
    with pytest.raises(UsageError, match="a clip of 4 frames cannot be encoded"):
        encoded(vae, given[:, :, :4])
    lowtide.unfit(vae)
    assert torch.equal(decoded(vae, latents), frames)


def test_norms_over_frames_are_refused():
    with pytest.raises(UsageError, match=r"norms over frames \(spatial_group_norm=False\)"):
        lowtide.fit(magvit(spatial_group_norm=False))


@pytest.mark.slow
def test_the_least_budget_takes_bands():
    vae = magvit()
    latents = encoded(vae, clip())[:, :4]
    frames = decoded(vae, latents)
    allowed = bound(decoded(magvit().double(), latents.double()), frames)
    lowtide.fit(vae, budget="1MiB")
    with pytest.raises(BudgetError) as refusal:
        decoded(vae, latents)
    lowtide.fit(lowtide.unfit(vae), budget=refusal.value.smallest)
    assert (decoded(vae, latents) - frames).abs().max() <= allowed
    assert most_bands(vae, "decoder") > 1


def test_a_disk_that_is_full_while_paging(tmp_path, files_of_at_most):
    vae = magvit()
    latents = torch.randn(1, 4, 3, 45, 16, generator=torch.Generator().manual_seed(4))
    lowtide.fit(vae, budget="1GiB", pages="disk", scratch=tmp_path)
    wanted = decoded(vae, latents)
    with (
        files_of_at_most(4096),
        pytest.raises(OutputError, match="the disk is full: could not write"),
    ):
        decoded(vae, latents)
    assert not kept(vae) and not [*tmp_path.iterdir()]
    assert torch.equal(decoded(vae, latents), wanted)
