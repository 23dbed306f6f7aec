"""The denoiser as a pipeline of diffusers: its results, files, inputs and errors."""

import sys
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import lowtide
from lowtide import InputError, UsageError
from lowtide.models.denoiser.noise_models import GaussianNoise, PoissonGaussianNoise
from support.denoiser_files import denoiser_file

pytest.importorskip("diffusers")

from lowtide.integrations.denoise_pipeline import DenoisePipeline
from lowtide.integrations.denoiser_model import DenoiseScheduler

SIGMA = 25


@pytest.fixture(scope="module")
def weights(tmp_path_factory, private_cache):
    return denoiser_file(tmp_path_factory.mktemp("denoiser") / "small.safetensors")


@pytest.fixture
def pipe(weights):
    made = DenoisePipeline.from_lowtide(weights)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def noisy(photo):
    """A piece of the photograph with noise, (41, 59, 3)."""
    noise = np.random.default_rng(0).normal(0, SIGMA, (41, 59, 3))
    return np.rint((photo[100:141, 200:259] + noise).clip(0, 255)).astype(np.uint8)


def as_floats(samples):
    return np.float32(samples / 255)


@pytest.mark.parametrize("sampler", ["ddpm", "unipc"])
def test_results_are_those_of_denoise(pipe, weights, noisy, tmp_path, save, read, sampler):
    """Level estimated or given, one step or several, color or gray."""
    for array, sigma, steps in ((noisy, None, 1), (noisy, SIGMA, 4), (noisy[..., :1], SIGMA, 3)):
        source, target = save(tmp_path / "in.png", array), tmp_path / "out.png"
        settings = {"sigma": sigma, "steps": steps, "seed": 7}
        settings |= {"scheduler": sampler} if steps > 1 else {}
        report = lowtide.denoise(source, target, model=weights, force=True, **settings)
        pipe.scheduler = DenoiseScheduler(sampler)
        made = pipe(Image.open(source), sigma=sigma, num_inference_steps=steps, seed=7)
        assert made.sigmas == [report.images[0].sigma]
        found = np.asarray(made.images[0]).reshape(array.shape)
        difference = np.abs(found.astype(int) - read(target))
        assert difference.max() <= 1 and (difference > 0).mean() < 1e-3


def test_noise_beyond_black_and_white_is_that_of_files(pipe, weights, tmp_path, save, read):
    noise = np.random.default_rng(0).standard_normal((41, 59, 3), np.float32)
    dark = np.float32(0.02) + noise * np.float32(SIGMA / 255)
    source, target = save(tmp_path / "in.tif", dark), tmp_path / "out.tif"
    lowtide.denoise(source, target, model=weights, sigma=SIGMA)
    made = pipe(dark, SIGMA, output_type="np").images[0]
    np.testing.assert_allclose(made, read(target), atol=1e-5)
    clipped = pipe(dark.clip(0, 1), SIGMA, output_type="np").images[0]
    assert np.abs(clipped - made).max() > 1e-3


@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
def test_saving_and_loading_changes_no_bit(pipe, noisy, tmp_path):
    pipe.scheduler = DenoiseScheduler("ddim", eta=0.5, zero_terminal_snr=True)
    pipe.save_pretrained(tmp_path / "saved")
    again = DenoisePipeline.from_pretrained(tmp_path / "saved", local_files_only=True)
    again.set_progress_bar_config(disable=True)
    given = {"sigma": SIGMA, "num_inference_steps": 3, "output_type": "np"}
    first, second = (one(as_floats(noisy), **given).images for one in (pipe, again))
    assert np.array_equal(first, second)
    assert dict(again.scheduler.config)["eta"] == 0.5
    again.scheduler = DenoiseScheduler("ddim", eta=0.5)
    assert not np.array_equal(again(as_floats(noisy), **given).images, first)


def test_every_kind_of_image(pipe, noisy):
    floats = as_floats(noisy)
    expected = pipe(floats, SIGMA, output_type="np").images
    assert expected.shape == (1, *noisy.shape)
    tensor = torch.from_numpy(floats).permute(2, 0, 1)
    for given in (floats[None], tensor, tensor[None], [floats], Image.fromarray(noisy)):
        assert np.abs(pipe(given, SIGMA, output_type="np").images - expected).max() < 1e-6
    both = pipe([floats, floats[::-1].copy()], SIGMA, output_type="pt").images
    assert both.shape == (2, 3, 41, 59) and np.array_equal(
        both[0].permute(1, 2, 0).numpy(), expected[0]
    )
    sizes = [one.size for one in pipe([floats, floats[:5]], SIGMA).images]
    assert sizes == [(59, 41), (59, 5)]


def test_without_noise_images_are_returned(pipe):
    flat = np.full((9, 8, 3), 0.25, np.float32)
    made = pipe([flat, flat[:2]], output_type="pil")
    assert made.sigmas == [0, None] and np.asarray(made.images[0]).min() == 64


def test_seeds(pipe, noisy):
    pipe.scheduler = DenoiseScheduler("ddpm")

    def run(**options):
        return pipe(as_floats(noisy), SIGMA, 3, output_type="np", **options).images

    assert np.array_equal(run(seed=3), run(seed=3)) and not np.array_equal(run(), run(seed=3))
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    first = run(generator=one)
    assert np.array_equal(first, run(generator=other))
    assert not np.array_equal(first, run(generator=one))


def test_low_precision_rounds_what_the_network_adds(pipe, noisy):
    exact = pipe(as_floats(noisy), SIGMA, output_type="np").images
    pipe.to(torch.bfloat16)
    assert pipe.dtype == torch.bfloat16
    found = pipe(as_floats(noisy), SIGMA, output_type="np").images
    change = np.abs(exact - as_floats(noisy)).max()
    assert 0 < np.abs(found - exact).max() < 0.02 * change + 1e-3


def test_progress_is_shown(pipe, noisy, capsys):
    pipe.set_progress_bar_config(disable=False)
    pipe([as_floats(noisy)] * 2, SIGMA, 3)
    assert "6/6" in capsys.readouterr().err


REFUSED = [
    ({"num_inference_steps": 0}, "are not between 1 and the 1000"),
    ({"num_inference_steps": 1001}, "are not between 1 and the 1000"),
    ({"sigma": -1}, "at least 0"),
    ({"sigma": float("nan")}, "finite number"),
    ({"sigma": 25_500, "num_inference_steps": 2}, "ends at a noise level of 157"),
    ({"seed": -1}, "a seed is"),
    ({"noise": GaussianNoise(std=0.1)}, "sigma and noise both"),
    ({"output_type": "latent"}, "is not one of pil, np, pt"),
]


def test_invalid_arguments_are_refused(pipe, noisy):
    for options, words in REFUSED:
        with pytest.raises(UsageError, match=words):
            pipe(as_floats(noisy), **{"sigma": SIGMA, **options})
    broken = as_floats(noisy)
    broken[0, 0, 0] = np.nan
    for image, kind, words in (
        (noisy, UsageError, "floats in 0..1, not uint8"),
        (broken, InputError, "1 of 7257 values are not finite"),
        (np.zeros((2, 2), np.float32), UsageError, "3 dimensions"),
        (np.zeros((9, 9, 2), np.float32), UsageError, "9×9×2"),
        (Image.new("RGBA", (8, 8)), UsageError, "mode RGBA"),
        (Image.new("I;16", (8, 8)), UsageError, "mode I;16"),
        ("photo.png", UsageError, "a str is not"),
        ([as_floats(noisy), as_floats(noisy)[:5]], UsageError, "several shapes"),
    ):
        with pytest.raises(kind, match=words):
            pipe(image, SIGMA, output_type="np")
    with pytest.raises(UsageError, match="is no denoiser"):
        DenoisePipeline.from_lowtide("lowtide-x2")


def test_noise_by_its_parameters(noisy, tmp_path, private_cache):
    """Those of Poisson-Gaussian noise change the result; other noise has to be given."""
    options = {"noise_model": "poisson-gaussian", "noise_parameters": 1}
    path = denoiser_file(tmp_path / "poisson.safetensors", **options)
    pipe = DenoisePipeline.from_lowtide(path)

    def run(**noise):
        return pipe(as_floats(noisy), output_type="np", **noise).images

    plain = run(sigma=SIGMA)
    assert np.array_equal(plain, run(noise=PoissonGaussianNoise(a=0, b=SIGMA / 255)))
    assert not np.array_equal(plain, run(noise=PoissonGaussianNoise(a=0.01, b=0.05)))
    path = denoiser_file(tmp_path / "raw.safetensors", noise_model="raw-camera")
    with pytest.raises(UsageError, match="trained with raw-camera noise"):
        DenoisePipeline.from_lowtide(path)(as_floats(noisy), SIGMA)


def test_epsilon_says_nothing_at_zero_snr(noisy, tmp_path, private_cache):
    path = denoiser_file(tmp_path / "epsilon.safetensors", prediction="epsilon")
    pipe = DenoisePipeline.from_lowtide(path, DenoiseScheduler(zero_terminal_snr=True))
    with pytest.raises(UsageError, match="at zero SNR"):
        pipe(as_floats(noisy), SIGMA)
    for wrong, words in (
        ({"sampler": "euler"}, "is not one of ddim"),
        ({"eta": 2.0}, "0 to 1"),
        ({"sampler": "unipc", "eta": 0.5}, "eta is for ddim"),
    ):
        with pytest.raises(UsageError, match=words):
            DenoiseScheduler(**wrong)


def test_what_is_missing_without_diffusers_is_named():
    hidden = {"diffusers.configuration_utils": None}
    with mock.patch.dict(sys.modules, hidden):
        sys.modules.pop("lowtide.integrations.diffusers_bases")
        with pytest.raises(UsageError, match="needs diffusers") as caught:
            __import__("lowtide.integrations.diffusers_bases")
    assert caught.value.hint == "pip install diffusers"
