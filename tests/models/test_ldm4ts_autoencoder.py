"""Autoencoders of residual paths: nothing is lost, variance least of all."""

import numpy as np
import pytest
import torch

from lowtide import InputError, ModelError
from lowtide.models.ldm4ts import LDM4TSConfig
from lowtide.models.ldm4ts.autoencoder import build_autoencoder


def correlated_paths(count, horizon, variables, seed=0):
    """Return paths of unit variance, correlated over steps and variables."""
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal((count, horizon + 1, variables))
    mix = np.eye(variables) + 0.5
    paths = noise @ (mix / np.linalg.norm(mix, axis=0))
    for step in range(1, horizon + 1):
        paths[:, step] = 0.9 * paths[:, step - 1] + (1 - 0.9**2) ** 0.5 * paths[:, step]
    return torch.from_numpy(paths[:, 1:]).float()


def build(horizon, variables, **sizes):
    return build_autoencoder(LDM4TSConfig(horizons=(horizon,), variables=variables, **sizes))


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("horizon", "variables", "sizes"),
    [
        (25, 7, dict(latent_channels=64)),
        (97, 1, dict(latent_channels=5, image_size=(32, 48), period=7)),
        (15, 1, dict(image_size=(224, 224), latent_channels=16)),
        (28, 9, dict(latent_channels=100, image_size=(16, 16))),
    ],
)
def test_nothing_is_lost_where_all_components_have_a_place(horizon, variables, sizes):
    autoencoder = build(horizon, variables, **sizes)
    paths = correlated_paths(500, horizon, variables)
    # Before it has seen data, and after; with a variable that never changes.
    for attempt in range(3):
        if attempt == 1:
            autoencoder.fit(paths)
        if attempt == 2:
            paths[..., -1] = 0.5
            autoencoder.fit(paths)
        latent = autoencoder.encode(paths)
        assert latent.shape == (500, *autoencoder.latent_shape)
        assert latent.isfinite().all()
        back = autoencoder.decode(latent, normal(500, horizon, variables))
        assert (back - paths).abs().max() < 2e-5


@pytest.mark.parametrize(("variables", "channels"), [(1, 8), (3, 4), (7, 1)])
def test_decoded_normal_numbers_have_the_covariance_of_the_paths(variables, channels):
    autoencoder = build(95, variables, latent_channels=channels)
    paths = correlated_paths(1000, 95, variables)
    autoencoder.fit(paths)
    count = 4000
    latent = normal(count, *autoencoder.latent_shape)
    drawn = autoencoder.decode(latent, normal(count, *autoencoder.noise_shape, seed=2))
    ratio = drawn.std(dim=0) / paths.std(dim=0)
    assert ratio.mean() == pytest.approx(1, abs=0.01)
    assert ratio.min() > 0.93
    assert ratio.max() < 1.07
    sums, wanted = (
        one[:, :72].unflatten(1, (3, 24)).sum(dim=2).std(dim=0) for one in (drawn, paths)
    )
    assert torch.allclose(sums, wanted, rtol=0.06)
    covariance, wanted = (one.flatten(1).T.cov() for one in (drawn, paths))
    assert (covariance - wanted).square().mean().sqrt() < 0.04


def test_latents_are_white_and_near_the_patches_that_they_are_about():
    autoencoder = build(96, 4, latent_channels=4)
    paths = correlated_paths(1500, 96, 4)
    autoencoder.fit(paths)
    flat = autoencoder.encode(paths).flatten(1)
    assert flat.shape[1] == 256
    assert torch.allclose(flat.T.cov(correction=0), torch.eye(256), atol=1e-3)
    # A row of the path image is a day: the first day is in the upper rows of the latent.
    power = torch.stack(
        [
            autoencoder.decode(one.expand(8, *autoencoder.latent_shape) * normal(8, 4, 8, 8), zeros)
            .square()
            .mean(dim=(0, 2))
            for rows in (slice(0, 2), slice(6, 8))
            for one in [torch.zeros(4, 8, 8).index_fill_(1, torch.arange(8)[rows], 1)]
            for zeros in [torch.zeros(8, 96, 4)]
        ]
    )
    assert power[0, :24].mean() > 3 * power[0, 72:].mean()
    assert power[1, 72:].mean() > 3 * power[1, :24].mean()


def test_paths_that_nothing_can_be_measured_on_are_refused():
    autoencoder = build(12, 2)
    with pytest.raises(InputError, match="fitted to 1 paths"):
        autoencoder.fit(torch.zeros(1, 12, 2))
    with pytest.raises(InputError, match="not finite"):
        autoencoder.fit(torch.full((4, 12, 2), float("nan")))
    autoencoder.fit(torch.zeros(4, 12, 2))
    drawn = autoencoder.decode(normal(3, *autoencoder.latent_shape), normal(3, 12, 2))
    assert torch.equal(drawn, torch.zeros(3, 12, 2))


@pytest.fixture(scope="module")
def kl_folder(tmp_path_factory):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    folder = tmp_path_factory.mktemp("kl")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            norm_num_groups=4,
            latent_channels=3,
        ).save_pretrained(folder)
    return folder


def test_an_autoencoder_kl_gives_back_the_variance_that_it_loses(kl_folder):
    autoencoder = build(25, 2, autoencoder=kl_folder, image_size=(16, 24)).train()
    assert not autoencoder.network.training
    assert not any(one.requires_grad for one in autoencoder.parameters())
    paths = correlated_paths(64, 25, 2)
    autoencoder.fit(paths)
    latent = autoencoder.encode(paths)
    assert latent.shape == (64, *autoencoder.latent_shape) == (64, 6, 8, 12)
    assert latent.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (latent.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05
    # What comes through and what is given back have together the variance of each step.
    kept = autoencoder.decode(latent, torch.zeros(64, 25, 2)).var(dim=0, correction=0)
    given = autoencoder.decode(latent, torch.ones(64, 25, 2)) - autoencoder.decode(
        latent, torch.zeros(64, 25, 2)
    )
    assert kept.min() > 0
    assert torch.allclose(
        kept + given[0].square(), paths.var(dim=0, correction=0), rtol=1e-3, atol=1e-3
    )
    assert torch.allclose(autoencoder.encode(paths[5:6])[0], latent[5], atol=1e-4)


def test_folders_that_are_no_autoencoder_kl_are_refused_by_name(kl_folder, tmp_path):
    with pytest.raises(ModelError, match="absent is no folder of an AutoencoderKL"):
        build(24, 1, autoencoder=tmp_path / "absent")
    config = tmp_path / "config.json"
    config.write_text('{"_class_name": "UNet2DModel"}')
    with pytest.raises(ModelError, match="the folder of UNet2DModel, not of an AutoencoderKL"):
        build(24, 1, autoencoder=tmp_path)
    config.write_text((kl_folder / "config.json").read_text())
    with pytest.raises(ModelError, match="cannot be read"):
        build(24, 1, autoencoder=tmp_path)
