"""The denoiser of finite reach: what it is told, and how far it looks."""

from __future__ import annotations

import pytest
import torch

from lowtide import ModelError, UsageError
from lowtide.models import load, lowtide_files
from lowtide.models.denoiser.config import FiniteDenoiserConfig
from lowtide.models.denoiser.finite_denoiser import FiniteDenoiser, haar_levels


def small() -> FiniteDenoiser:
    torch.manual_seed(0)
    made = FiniteDenoiser(FiniteDenoiserConfig(features=8, blocks=(1, 1, 1), fine=4))
    return made.eval().requires_grad_(False)


def test_without_noise_it_is_the_identity_and_without_a_level_it_refuses() -> None:
    denoiser, image = small(), torch.rand(1, 3, 16, 24)
    with pytest.raises(UsageError, match="how strong the noise is"):
        denoiser(image)
    denoiser.set_level(0)
    assert torch.equal(denoiser(image), image)
    denoiser.set_level(0.1)
    white = denoiser(image)
    denoiser.set_level(0.1, (1.0,) * 6)
    assert torch.equal(denoiser(image), white)
    denoiser.set_level(0.1, (0.1, 0.5, 1.5, 0.1, 0.5, 1.5))
    assert not torch.equal(denoiser(image), white)
    for sigma, shares in ((-0.1, None), (0.1, (1.0,) * 5), (0.1, (1.0,) * 5 + (float("nan"),))):
        with pytest.raises(UsageError):
            denoiser.set_level(sigma, shares)


def test_pixels_far_away_change_nothing() -> None:
    denoiser = small()
    denoiser.set_level(0.1)
    image = torch.rand(1, 3, 16, 256)
    other = image.clone()
    other[..., 192:] = torch.rand(1, 3, 16, 64)
    assert torch.equal(denoiser(image)[..., :128], denoiser(other)[..., :128])


def test_levels_of_white_noise_are_equal_and_of_coarse_noise_grow() -> None:
    noise = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(haar_levels(noise), torch.ones(2, 6), atol=0.05)
    coarse = torch.nn.functional.avg_pool2d(noise, 3, 1)
    found = haar_levels(coarse)
    assert (found[:, :2] < found[:, 1:3]).all() and (found[:, 3:5] < found[:, 4:]).all()
    gray = haar_levels(noise[:, :1].expand(-1, 3, -1, -1))
    assert torch.allclose(gray[:, :3], torch.full((2, 3), 3**0.5), atol=0.15)
    assert not gray[:, 3:].any()


def test_its_configuration_is_what_the_file_says() -> None:
    config = FiniteDenoiserConfig(features=8, blocks=(1, 2), fine=4)
    entries = lowtide_files.metadata_for(config)
    assert entries["lowtide.architecture"] == "FiniteDenoiser"
    assert FiniteDenoiserConfig.from_dict(config.to_dict()) == config
    for wrong in ({"blocks": ()}, {"blocks": 3}, {"features": 0}, {"max_sigma": 2}):
        with pytest.raises(ModelError):
            FiniteDenoiserConfig(**wrong)  # pyright: ignore[reportArgumentType]


def test_the_bundled_one_removes_white_noise_and_blotches() -> None:
    import skimage.data

    clean = torch.from_numpy(skimage.data.coffee()[100:260, 200:360]).permute(2, 0, 1)[None] / 255
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    coarse = torch.nn.functional.avg_pool2d(noise, 3, 1, 1)
    model = load("lowtide-photo-denoise")
    for kind in (noise, coarse / coarse.std()):
        noisy = clean + kind * 20 / 255
        model.module.set_level(1.0, haar_levels(noisy - clean)[0].tolist())
        gain = ((noisy - clean).square().mean() / (model(noisy) - clean).square().mean()).log10()
        assert 10 * gain > 5
