"""Video autoencoders of Wan's kind in bands of rows, against the library's own chunks."""

from copy import deepcopy

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

import lowtide
from lowtide import BudgetError, UsageError
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


def frames(count=5, batch=1, height=53, width=46):
    shape = (batch, 3, count, height, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def encoded(vae, given):
    with torch.no_grad():
        return vae.encode(given).latent_dist.parameters


def bands_of(vae, part, given):
    """Most bands of a segment, by program."""
    runs = _streams[vae][part].chunks.plan(given).runs
    return [max(one.prepared.layout.bands) for one in runs]


def test_a_clip_is_decoded_as_in_chunks_of_the_library():
    vae, given = wan(), latents(height=141, width=62)
    wanted = decoded(vae, given)
    lowtide.fit(vae, budget="28MiB")
    found = decoded(vae, given)
    assert found.shape == wanted.shape == (1, 3, 5, 282, 124)
    assert same(found, wanted)
    assert max(bands_of(vae, "decoder", given)) > 1

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


def test_a_clip_is_encoded_as_in_chunks_of_the_library():
    vae = wan(base_dim=16, dim_mult=[1, 1, 1], temperal_downsample=[True, False])
    given = frames(11, 2, 157, 92)  # the library leaves the last two out
    wanted = encoded(vae, given)
    lowtide.fit(vae, budget="25MiB")
    vae._enc_feat_map[0] = torch.zeros(1)
    found = encoded(vae, given)
    assert found.shape == wanted.shape == (2, 8, 5, 39, 23)
    assert same(found, wanted)
    assert max(bands_of(vae, "encoder", given[:, :, :9])) > 1
    assert {*vae._enc_feat_map} == {None}
    # clips of other lengths run the same programs
    captured = {**_streams[vae]["encoder"].chunks._captured}
    for count in (1, 5):
        wanted = found[:, :, : 1 + count // 2]  # two latents from four frames
        assert same(encoded(vae, given[:, :, :count]), wanted)
    assert captured == _streams[vae]["encoder"].chunks._captured


@pytest.mark.parametrize(
    "make",
    [
        lambda: built(AutoencoderKLQwenImage, **WAN),
        lambda: wan(is_residual=True, patch_size=2, in_channels=12, out_channels=12),
    ],
    ids=["QwenImage", "Wan 2.2"],
)
def test_other_networks(make):
    vae, given = make(), frames(5, 1, 36, 28)
    wanted = encoded(vae, given)
    latent = wanted[:, :4]
    wanted_frames = decoded(vae, latent)
    lowtide.fit(vae, budget="1GiB")
    assert same(encoded(vae, given), wanted)
    assert same(decoded(vae, latent), wanted_frames)


def test_values_that_are_not_finite_pass_through():
    vae, given = wan(), latents(3, 1, 16, 12)
    given[0, 0, 1, 3, 4] = torch.nan
    wanted = decoded(vae, given)
    assert 0 < wanted.isnan().sum() < wanted.numel()
    found = decoded(lowtide.fit(vae, budget="1GiB"), given)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert same(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_one_part_alone(part):
    vae, given = wan(), latents(2, 1, 9, 8)
    vae.enable_tiling()
    clip = frames(5, 1, 16, 18)
    wanted = encoded(vae, clip), decoded(vae, given)
    lowtide.fit(vae, parts=[part])
    assert vae.use_tiling  # which the other may need
    assert [*_streams[vae]] == [part]
    assert same(encoded(vae, clip), wanted[0])
    assert same(decoded(vae, given), wanted[1])


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
    vae = wan()
    vae._decode = vae._decode
    with pytest.raises(UsageError, match="the _decode of this AutoencoderKLWan is replaced"):
        lowtide.fit(vae)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AutoencoderKLQwenImage21", "of single images: its convolutions are those of Wan"),
        ("AutoencoderKLMochi", "no module is made yet for the frames that its layers keep"),
        ("Kandinsky6SRVAE", "no module is made yet for the frames that its layers keep"),
    ],
)
def test_classes_that_cannot_run_are_refused_by_name(name, text):
    kind = getattr(diffusers, name, None)
    if kind is None:
        pytest.skip(f"this diffusers has no {name}")
    with torch.device("meta"):
        vae = kind()
    with pytest.raises(UsageError, match=f"this {name} cannot run in bands of a clip: .*{text}"):
        lowtide.fit(vae)
