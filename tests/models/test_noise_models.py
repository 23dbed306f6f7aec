"""Noise models: statistics of what they sample, plug-ins, and tables of cameras."""

import sys

import numpy as np
import pytest

from lowtide import InputError, ModelError, UsageError
from lowtide.core.philox import philox_generator
from lowtide.models.denoiser.noise_models import GaussianNoise, PoissonGaussianNoise, RicianNoise
from lowtide.models.denoiser.noise_table import (
    NoiseSetting,
    NoiseTable,
    build_noise,
    load_noise,
    noise_model_class,
    noise_model_names,
)
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise

RAW = dict(gain=2.0, read=9.0, row=4.0, black=512, white=16383)
MODELS = [
    GaussianNoise(std=0.1),
    PoissonGaussianNoise(a=0.01, b=0.02),
    PoissonGaussianNoise(a=0, b=0.02),
    RawCameraNoise(**RAW),
    RawCameraNoise(**RAW, tukey_lambda=-0.1),
    RicianNoise(std=0.1),
]


@pytest.mark.parametrize("model", MODELS, ids=repr)
@pytest.mark.parametrize("value", [0.0, 0.004, 0.3])
def test_samples_have_the_stated_statistics(model, value):
    clean = np.full((2, 161, 199), value, np.float32)
    noisy = model.sample(clean, philox_generator(3, 1, 0, 0))
    assert noisy.shape == clean.shape and noisy.dtype == np.float32
    sigma = float(model.sigma(value))
    # 322 rows tell the mean and variance of row noise.
    loose = 4 * sigma / np.sqrt(322)
    assert noisy.mean() == pytest.approx(float(model.mean(value)), abs=loose)
    assert noisy.std() == pytest.approx(sigma, rel=0.05)
    assert np.array_equal(noisy, model.sample(clean, philox_generator(3, 1, 0, 0)))
    assert not np.array_equal(noisy, model.sample(clean, philox_generator(4, 1, 0, 0)))
    assert np.all(np.isfinite([model.level, *model.noise_parameters]))


def test_pixels_of_a_row_share_their_offset():
    noisy = RawCameraNoise(**RAW).sample(
        np.zeros((400, 300), np.float32), philox_generator(0, 1, 0, 0)
    )
    assert np.unique(noisy * (16383 - 512)).size < 100  # whole levels
    variance = 9**2 + 4**2 + 1 / 12
    beside = np.corrcoef(noisy[:, :-1].ravel(), noisy[:, 1:].ravel())[0, 1]
    below = np.corrcoef(noisy[:-1].ravel(), noisy[1:].ravel())[0, 1]
    assert beside == pytest.approx(16 / variance, abs=0.03) and abs(below) < 0.03
    # What would be below level 0 or above white is clipped, as by a sensor.
    dark = RawCameraNoise(**(RAW | {"black": 4})).sample(
        np.zeros((50, 50)), philox_generator(0, 1, 0, 0)
    )
    assert dark.min() == np.float32(-4 / 16379)
    bright = RawCameraNoise(**RAW).sample(np.ones((50, 50)), philox_generator(0, 1, 0, 0))
    assert bright.max() == 1


def test_networks_can_tell_noises_apart():
    """What a network is given says all of a Poisson-Gaussian noise."""
    model = PoissonGaussianNoise(a=0.01, b=0.02)
    (shot,) = model.noise_parameters
    assert shot * model.level**2 / 0.5 == pytest.approx(0.01)
    assert (1 - shot) * model.level**2 == pytest.approx(0.02**2)
    assert PoissonGaussianNoise(a=0, b=0).noise_parameters == (0,)
    shares = RawCameraNoise(**RAW).noise_parameters
    assert shares[1] == pytest.approx(16 / (81 + 16 + 1 / 12)) and shares[2] == 0.1349
    assert RicianNoise(std=0.1).level == 0.1
    # Far above the noise it is Gaussian, also where Bessel functions overflow.
    assert float(RicianNoise(std=1e-4).sigma(1.0)) == pytest.approx(1e-4, rel=1e-3)


PACKAGE = """
import numpy as np
from lowtide.models.denoiser.noise_models import NoiseModel
class Stripes(NoiseModel):
    name = "stripes"
    height: float
    def sample(self, clean, random):
        return clean + np.float32(self.height) * random.standard_normal(clean.shape[-1])
    def sigma(self, value):
        return np.full(np.shape(value), self.height)
"""


def test_a_package_adds_a_model(tmp_path, monkeypatch):
    (tmp_path / "striped_noise.py").write_text(PACKAGE)
    info = tmp_path / "striped_noise-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: striped-noise\nVersion: 1.0\n")
    entries = ["stripes = striped_noise:Stripes", "lines = striped_noise:Lines"]
    entries += ["renamed = striped_noise:Stripes", "number = striped_noise:np"]
    text = "\n".join(["[lowtide.noise_models]", *entries])
    (info / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert "stripes" in noise_model_names()
    assert build_noise("stripes", {"height": 0.5}).level == 0.5
    table = NoiseTable(
        camera="scanner",
        noise_model="stripes",
        settings=(NoiseSetting(iso=None, parameters={"height": 0.5}),),
    )
    table.save(tmp_path / "scanner.json")
    assert load_noise(tmp_path / "scanner.json").at() == build_noise("stripes", {"height": 0.5})
    for name, reason in (
        *(("lines", "cannot be imported"), ("renamed", "calls itself 'stripes'")),
        ("number", "not a subclass"),
    ):
        with pytest.raises(ModelError, match=f"striped-noise.*{reason}"):
            noise_model_class(name)
    (info / "entry_points.txt").write_text(text + "\ngaussian = striped_noise:Stripes\n")
    with pytest.raises(ModelError, match="name of a built-in"):
        noise_model_class("gaussian")
    monkeypatch.delitem(sys.modules, "striped_noise")


def test_names_and_parameters_are_refused_with_a_hint():
    with pytest.raises(UsageError, match="no noise model 'poison'") as refused:
        noise_model_class("poison")
    assert refused.value.hint == "did you mean 'poisson-gaussian'?"
    for name, parameters, reason in (
        ("gaussian", {"std": -1}, "std: Input should be greater"),
        ("gaussian", {"std": float("nan")}, "std: Input should be"),
        ("gaussian", {"sigma": 1}, "Field required"),
        ("raw-camera", RAW | {"white": 512}, "white 512 is not above black 512"),
    ):
        with pytest.raises(UsageError, match=reason) as refused:
            build_noise(name, parameters)
        assert "its parameters are" in refused.value.hint


def test_a_table_goes_through_a_file(tmp_path):
    settings = tuple(
        NoiseSetting(iso=iso, parameters=RAW | {"gain": gain, "row": row, "tukey_lambda": shape})
        for iso, gain, row, shape in ((100, 1, 0, None), (400, 4, 2, -0.1))
    )
    table = NoiseTable(camera="A1", noise_model="raw-camera", settings=settings)
    path = tmp_path / "camera.json"
    table.save(path)
    again = load_noise(path)
    assert again == table and again.iso_range == (100, 400)
    between = again.at(200)
    assert (between.gain, between.row) == (pytest.approx(2), pytest.approx(1))
    assert again.at(400).tukey_lambda == again.at(300).tukey_lambda == -0.1
    assert again.at(150).tukey_lambda is None
    for iso, reason in ((None, "no ISO is given"), (800, "ISO 800 is outside")):
        with pytest.raises(UsageError, match=reason) as refused:
            again.at(iso)
        assert "100 to 400" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('"lowtide-noise"', '"other"'), "format"),
        (('"raw-camera"', '"raw"'), "no noise model 'raw'"),
        (('"iso": 100', '"iso": null'), "only one"),
        (('"iso": 100', '"iso": 900'), "ascend"),
        (('"gain": 2.0', '"gain": 0'), "gain"),
        (("{", "["), "no noise table"),
    ],
    ids=str,
)
def test_wrong_tables_are_refused(tmp_path, change, reason):
    settings = tuple(NoiseSetting(iso=iso, parameters=RAW) for iso in (100, 400))
    path = tmp_path / "camera.json"
    NoiseTable(camera="A1", noise_model="raw-camera", settings=settings).save(path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(InputError, match=f"camera.json: .*{reason}"):
        load_noise(path)
    with pytest.raises(InputError, match=r"none\.json: no such file"):
        load_noise(tmp_path / "none.json")
