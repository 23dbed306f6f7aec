"""The denoiser: its network, its level and its file."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lowtide
from lowtide import ModelError, UsageError
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser
from lowtide.models.denoiser.noise_level import NoiseEstimator
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.models.lowtide_files import metadata_for
from support.denoiser_files import small_denoiser

SIGMA = 25 / 255
ATTENTION = ("linear", "channel", "transposed", "sdpa", "flash", "window", "none")


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_attention_trains_and_changes_the_result(attention):
    """At the lowest level only; every weight gets a gradient, with checkpointing the same one."""
    # Squeeze-and-excitation has a sixteenth of the channels inside.
    whole = small_denoiser(attention=attention, features=16, multipliers=(1, 4))
    network = SlimUNet(whole.config)
    network.load_state_dict(whole.unet.state_dict())
    x, sigma = torch.randn(2, 3, 24, 16), torch.tensor([0.1, 0.4])
    gradients = []
    for network.checkpointing in (False, True):
        network.zero_grad()
        network(x, network.modulation(sigma)).square().mean().backward()
        gradients.append({name: one.grad.clone() for name, one in network.named_parameters()})
    assert all(one.abs().max() > 1e-10 for one in gradients[0].values())
    for name, one in gradients[0].items():
        torch.testing.assert_close(one, gradients[1][name])
    with_it = [name for name in gradients[0] if ".attention." in name]
    assert all(name.startswith("middle.0.") for name in with_it)
    assert bool(with_it) == (attention != "none")


def test_attention_runs_at_the_levels_that_are_asked_for():
    unet = small_denoiser(attention="channel", attention_levels=(0, -1)).unet
    places = {
        name.split(".attention")[0] for name, _ in unet.named_modules() if "attention" in name
    }
    assert places == {"down.0.0", "middle.0", "up.0.0"}


@pytest.mark.parametrize(
    "attention",
    [one if one == "none" else pytest.param(one, marks=pytest.mark.slow) for one in ATTENTION],
)
def test_streamed_equals_whole_at_any_level(attention):
    """One capture serves all levels, since they lie in buffers."""
    denoiser = small_denoiser(attention=attention, features=16, multipliers=(1, 4))
    image = torch.rand(1, 3, 40, 24)
    denoiser.set_level(SIGMA)
    streamed = lowtide.stream(denoiser)
    first = denoiser(image)
    assert (streamed(image) - first).abs().max() < 1e-5
    denoiser.set_level(10 / 255)
    assert (streamed(image) - denoiser(image)).abs().max() < 1e-5
    assert (first - denoiser(image)).abs().max() > 1e-3


def test_checkpointing_keeps_fewer_activations():
    network, kept = SlimUNet(small_denoiser().config), []
    x, sigma = torch.randn(1, 3, 64, 64), torch.tensor([0.2])
    for network.checkpointing in (False, True):
        sizes = {}

        def pack(tensor, sizes=sizes):
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(x, network.modulation(sigma))
        kept.append(sum(sizes.values()))
    assert kept[1] < 0.65 * kept[0]


def test_the_level_has_to_be_set_and_zero_is_the_identity():
    denoiser, image = small_denoiser(noise_parameters=2), torch.rand(1, 3, 8, 8)
    with pytest.raises(UsageError, match="how strong the noise is"):
        denoiser(image)
    denoiser.set_level(0, (1.0, 2.0))
    torch.testing.assert_close(denoiser(image), image)
    made = []
    for parameters in ((1.0, 2.0), (2.0, 1.0)):
        denoiser.set_level(SIGMA, parameters)
        made.append(denoiser(image))
    assert not torch.equal(*made)
    for sigma, parameters, words in (
        (SIGMA, (), "2 parameters"),
        (SIGMA, (1.0, float("inf")), "finite"),
        (float("nan"), (1.0, 2.0), "finite number"),
        (-0.1, (1.0, 2.0), "at least 0"),
    ):
        with pytest.raises(UsageError, match=words):
            denoiser.set_level(sigma, parameters)


def test_files_carry_the_configuration(tmp_path):
    """Half-precision weights too; a hostile or wrong configuration is refused by name."""
    denoiser, path = small_denoiser(prediction="epsilon"), tmp_path / "mine.safetensors"
    state = {name: one.half() for name, one in denoiser.state_dict().items()}
    save_file(state, path, metadata_for(denoiser.config))
    model = lowtide.load(path)
    facts = model.descriptor
    assert isinstance(model.module, Denoiser) and model.module.config == denoiser.config
    assert (facts.purpose, facts.scale, facts.size.multiple_of) == ("Restoration", 1, 4)
    assert facts.noise == "gaussian, up to a sigma of 60 of 255"
    model.module.set_level(SIGMA)
    assert model(torch.rand(1, 3, 1, 7)).shape == (1, 3, 1, 7)
    for changes, words in (
        ({"features": 9}, "4 groups do not divide 9"),
        ({"attention": "magic"}, "not one of linear"),
        ({"attention_levels": (2,)}, "no level 2"),
        ({"prediction": "x"}, "not one of v, epsilon, sample"),
        ({"multipliers": "12"}, "list of integers"),
        ({"max_sigma": 0}, "max_sigma"),
    ):
        with pytest.raises(ModelError, match=words):
            small_denoiser(**changes)
    wide = SlimUNetConfig(features=1 << 14, embedding=16)
    save_file(load_file(path), path, metadata_for(wide))
    with pytest.raises(ModelError, match="do not fit its metadata"):
        lowtide.load(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_keeps_the_image_in_fp32(tmp_path, dtype):
    """Only what the network adds is rounded, not the image."""
    denoiser, path = small_denoiser(), tmp_path / "small.safetensors"
    save_file(denoiser.state_dict(), path, metadata_for(denoiser.config))
    model, image = lowtide.load(path), torch.rand(1, 3, 24, 20)
    model.module.set_level(SIGMA)
    exact = model(image)
    low = model.to_low_precision(dtype)(image)
    change = (exact - image).abs().max()
    assert 0 < (low - exact).abs().max() < 0.02 * change + 1e-3
    next(part for part in model.module.modules() if isinstance(part, Denoiser)).set_level(0)
    torch.testing.assert_close(model(image), image, atol=1e-6, rtol=0)


def test_noise_levels_are_estimated_band_by_band(photo):
    clean = photo.astype(np.float32) / 255
    noise = np.random.default_rng(0).standard_normal(clean.shape, np.float32)

    def estimate(image, step):
        level = NoiseEstimator(image.shape[2])
        for first in range(0, len(image), step):
            level.add(image[first : first + step])
        return level.sigma()

    for sigma, least, most in ((10, 0.95, 1.08), (25, 0.97, 1.05), (50, 0.9, 1.03)):
        noisy = (clean + noise * np.float32(sigma / 255)).clip(0, 1)
        found = estimate(noisy, 64)
        assert least < found * 255 / sigma < most
        assert estimate(noisy, 1) == pytest.approx(found) == estimate(noisy, 400)
    # Of noise that depends on brightness the root mean square.
    shot = noise * np.sqrt(2 * clean) * np.float32(25 / 255)
    assert estimate(clean + shot, 64) == pytest.approx(shot.std(), rel=0.06)
    # Values beyond 0 and 1 are not clipped ones.
    dark = np.float32(25 / 255) * noise
    assert estimate(dark, 64) * 255 == pytest.approx(25, rel=0.03)
    # A bar without noise says nothing; an image that is mostly drawn has none.
    drawn = clean + noise * np.float32(25 / 255)
    drawn[: len(drawn) // 4] = 0.5
    assert estimate(drawn, 64) * 255 == pytest.approx(25, rel=0.06)
    drawn[: len(drawn) * 3 // 4] = 0.5
    assert estimate(drawn, 64) == 0
    assert estimate(np.full((9, 9, 1), 0.5, np.float32), 2) == 0
    for image in (np.ones((9, 9, 1)), np.full((2, 9, 1), 0.5), np.full((9, 1, 3), 0.5)):
        assert estimate(image.astype(np.float32), 3) is None
