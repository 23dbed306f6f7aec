"""Which denoiser pictures get by default, and that bands and tiles of it are exact."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lowtide
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.images.prepare import load_model
from lowtide.models.denoiser.config import FiniteDenoiserConfig
from lowtide.models.denoiser.finite_denoiser import FiniteDenoiser
from lowtide.models.lowtide_files import metadata_for


@pytest.fixture
def noisy(photo):
    """A piece of the photograph with noise, of odd sides, (203, 331, 3)."""
    piece = photo[100:303, 200:531]
    noise = np.random.default_rng(0).normal(0, 20, piece.shape)
    return np.rint((piece + noise).clip(0, 255)).astype(np.uint8)


def test_color_pictures_have_a_denoiser_of_their_own(noisy, tmp_path, save):
    save(tmp_path / "color.png", noisy)
    save(tmp_path / "gray.png", noisy[..., :1])

    def chosen(*names, **options):
        report = lowtide.denoise(
            [tmp_path / name for name in names], tmp_path / "out", dry_run=True, **options
        )
        return report.model["name"], report.model_choice

    assert chosen("color.png") == ("lowtide-photo-denoise", "for color pictures")
    assert chosen("color.png", "gray.png")[0] == "lowtide-photo-denoise"
    assert chosen("gray.png") == ("lowtide-denoise", "for gray pictures")
    for options in ({"steps": 2}, {"noise": "poisson-gaussian"}, {"model": "lowtide-denoise"}):
        assert chosen("color.png", **options) == ("lowtide-denoise", "")


def test_bands_and_tiles_give_what_the_whole_picture_gives(noisy, tmp_path, save, read):
    torch.manual_seed(0)
    network = FiniteDenoiser(FiniteDenoiserConfig(features=8, blocks=(1, 1, 1), fine=4))
    model = tmp_path / "small.safetensors"
    save_file(network.state_dict(), model, metadata_for(network.config))
    barred = noisy.copy()
    barred[:40], barred[:, 300:] = 0, 255
    source = save(tmp_path / "in.png", barred)
    made = {}
    for strategy in ("whole", "streamed"):
        target = tmp_path / f"{strategy}.png"
        options = {"model": model, "strategy": strategy, "sigma": 20, "budget": "128MiB"}
        (report,) = lowtide.denoise(source, target, **options).images
        made[strategy] = read(target).astype(int)
        assert report.accuracy.execution == "exact" and report.memory.within_budget
    difference = np.abs(made["whole"] - made["streamed"])
    assert difference.max() <= 1 and difference.mean() < 1e-3
    assert (made["whole"] != barred).any()
    assert not made["whole"][:40, :300].any() and (made["whole"][:, 300:][40:] == 255).all()


def test_what_is_measured_is_what_the_network_does():
    """At a level of 0 in all octaves bands would be proved exact whatever the network does."""
    model = load_model(DenoiseSettings(model="lowtide-photo-denoise"))
    image = torch.rand(1, 3, 32, 40, generator=torch.Generator().manual_seed(0))
    assert (model(image) - image).abs().max() > 0.01
