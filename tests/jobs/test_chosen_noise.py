"""`lowtide denoise --noise`: a camera's table, and noise that a network was not trained for."""

import numpy as np
import pytest
import torch

import lowtide
from lowtide import InputError, UsageError
from lowtide.jobs.denoise.settings import DenoiseSettings
from lowtide.jobs.images.chosen_noise import choose_noise, estimate_poisson_gaussian
from lowtide.models.denoiser.noise_models import PoissonGaussianNoise
from lowtide.models.denoiser.noise_table import NoiseTable
from lowtide.models.loaded_model import pad_to_rule
from support.denoiser_files import denoiser_file

A, B = 0.02, 0.03


def table_of(path, camera="A1", isos=(100, 1600), model="poisson-gaussian", **parameters):
    parameters = parameters or {"a": A, "b": B}
    settings = [
        {"iso": iso, "parameters": {name: one * (iso or 100) / 100 for name, one in values}}
        for iso, values in ((iso, parameters.items()) for iso in isos)
    ]
    table = NoiseTable.model_validate(
        {"camera": camera, "noise_model": model, "settings": settings}
    )
    table.save(path)
    return table


@pytest.fixture(scope="module")
def home(tmp_path_factory, private_cache):
    """Tables, and denoisers of each kind of noise."""
    folder = tmp_path_factory.mktemp("noise")
    table = table_of(folder / "camera.json")
    table_of(folder / "other.json", "B2")
    table_of(folder / "one.json", isos=(None,))
    table_of(folder / "white.json", isos=(None,), model="gaussian", std=0.1)
    both = {"noise_model": "poisson-gaussian", "noise_parameters": 1}
    denoiser_file(folder / "any.safetensors", **both)
    trained = {"camera": table.camera, "noise_sha256": table.sha256}
    denoiser_file(folder / "camera.safetensors", **both, **trained)
    denoiser_file(folder / "white.safetensors")
    mosaic = {"channels": 1, "cfa": "RGGB", "linear": True}
    denoiser_file(folder / "mosaic.safetensors", **both, **mosaic)
    return folder


@pytest.fixture
def denoise(home, tmp_path, save, read, photo):
    def run(model, *, shape=(41, 59, 3), **options):
        height, width, channels = shape
        array = photo[100 : 100 + height, 200 : 200 + width, :channels]
        source = save(tmp_path / "in.png", array)
        given = {"model": home / f"{model}.safetensors", "budget": "256MiB", "force": True}
        report = lowtide.denoise(source, tmp_path / "out.png", **given, **options)
        return array, read(tmp_path / "out.png"), report.images[0]

    return run


def test_level_and_parameters_are_those_of_the_table(home, denoise):
    for model, table, iso, sigma, parameters in (
        ("camera", "camera", 400, None, None),
        ("any", "one", None, (A / 2 + B**2) ** 0.5, (A / 2 / (A / 2 + B**2),)),
        ("any", "white", None, 0.1, (0.0,)),
    ):
        path = home / f"{table}.json"
        array, made, report = denoise(model, noise=path, iso=iso)
        if sigma is None:
            noise = choose_noise(path, iso).at()
            assert noise.a == pytest.approx(4 * A) and noise.b == pytest.approx(4 * B)
            sigma, parameters = noise.level, noise.noise_parameters
            assert report.noise == f"poisson-gaussian of {path} at ISO 400"
        assert report.sigma == pytest.approx(255 * sigma, abs=0.01)
        assert report.sigma_source == "table" and report.noise_parameters == parameters
        assert "at mid-gray" in report.details()[0][1]
        network = lowtide.load(home / f"{model}.safetensors")
        network.module.set_level(sigma, parameters)
        image = torch.from_numpy(np.float32(array / 255)).permute(2, 0, 1)[None]
        wanted = network.module(pad_to_rule(image, network.descriptor.size))[0, :, :41, :59]
        wanted = np.rint(wanted.permute(1, 2, 0).clamp(0, 1).numpy() * 255)
        assert np.abs(made.astype(int) - wanted).max() <= 1


def test_shot_noise_is_estimated_by_name(photo):
    """On a photograph in linear values, to within what texture allows."""
    truth = PoissonGaussianNoise(a=0.01, b=0.01)
    noisy = truth.sample(np.moveaxis(np.float32(photo / 255), -1, 0), np.random.default_rng(0))
    rows = np.moveaxis(noisy.clip(0, 1), 0, -1)
    found = estimate_poisson_gaussian([rows[:200], rows[200:]])
    assert found.level == pytest.approx(truth.level, rel=0.15)
    assert found.noise_parameters[0] > 0.8
    assert estimate_poisson_gaussian([rows[:8]]) is None


def test_names_that_a_network_knows(denoise):
    """A network for shot noise is given none of it where noise is gaussian."""
    _, _, gaussian = denoise("any", sigma=20)
    assert gaussian.noise_parameters == (0.0,) and gaussian.noise == "gaussian"
    _, _, estimated = denoise("any", shape=(120, 160, 3), noise="poisson-gaussian")
    assert estimated.noise == "poisson-gaussian, estimated"
    assert estimated.sigma_source == "estimated"
    _, _, same = denoise("white", noise="gaussian")
    assert same.noise == "gaussian, estimated" and same.noise_parameters == ()


REFUSED = {
    "no table": ("camera", {}, r"trained with the noise of A1 \(\w{12}\), and needs it"),
    "a name": ("camera", {"noise": "gaussian"}, "needs it"),
    "another camera": (
        "camera",
        {"noise": "other.json", "iso": 100},
        r"is the noise of B2 \(\w{12}\), and .* with that of A1 \(\w{12}\)",
    ),
    "no ISO": ("camera", {"noise": "camera.json"}, "no ISO is given"),
    "an ISO outside": ("camera", {"noise": "camera.json", "iso": 6400}, "from ISO 100 to 1600"),
    "another noise": ("white", {"noise": "one.json"}, "has poisson-gaussian noise, and"),
    "another name": ("white", {"noise": "poisson-gaussian"}, "trained with gaussian"),
    "not estimated": ("any", {"noise": "raw-camera"}, "does not tell the parameters"),
    "no file": ("any", {"noise": "missing.json"}, "is no file"),
    "an ISO alone": ("any", {"iso": 100}, "chooses from a table"),
    "two levels": ("any", {"noise": "one.json", "sigma": 20}, "tells its own"),
    "a color image": ("mosaic", {}, "is for RGGB mosaics"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stages_check_each_other(case, home, denoise, tmp_path):
    model, options, message = REFUSED[case]
    if str(options.get("noise", "")).endswith(".json"):
        options = {**options, "noise": home / options["noise"]}
    with pytest.raises((UsageError, InputError), match=message) as caught:
        denoise(model, **options)
    assert caught.value.hint and caught.value.exit_code == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.png"]


def test_results_depend_on_the_content_of_the_table(home, tmp_path):
    """A resumed folder redoes what another table of the same name has denoised."""
    path = tmp_path / "camera.json"
    hashes = []
    for level in (0.01, 0.02):
        table_of(path, isos=(None,), a=0.0, b=level)
        hashes.append(DenoiseSettings.of(noise=path).content_hash("m", "fp32"))
    hashes.append(DenoiseSettings.of(noise="gaussian").content_hash("m", "fp32"))
    hashes.append(DenoiseSettings.of().content_hash("m", "fp32"))
    assert len(set(hashes)) == 4


def test_the_scheduler_is_the_models_unless_given(tmp_path, save, read, photo):
    source, results = save(tmp_path / "in.png", photo[:40, :48]), []
    for scheduler in ("ddim", "ddpm"):
        weights = denoiser_file(tmp_path / f"{scheduler}.safetensors", scheduler=scheduler)
        for given in (None, "ddpm"):
            more = {"model": weights, "sigma": 25, "steps": 3, "scheduler": given}
            lowtide.denoise(source, tmp_path / "out.png", budget="256MiB", force=True, **more)
            results.append(read(tmp_path / "out.png"))
    first, *others = results
    assert all(np.array_equal(one, others[0]) for one in others)
    assert not np.array_equal(first, others[0])
