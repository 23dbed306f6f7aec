"""`lowtide train noise`: what simulated frames were made with comes back."""

import json

import numpy as np
import pytest

from lowtide import ImageError, InputError, LowtideError, UsageError
from lowtide.core.philox import philox_generator
from lowtide.jobs.denoise.calibration.command import train_noise
from lowtide.models.denoiser.noise_models import PoissonGaussianNoise
from lowtide.models.denoiser.noise_table import load_noise
from lowtide.models.denoiser.raw_camera_noise import RawCameraNoise

WHITE = 16383
SIZE = (130, 150)


def camera(**changes):
    parameters = dict(gain=3.0, read=9.0, row=2.5, black=512, white=WHITE)
    return RawCameraNoise(**(parameters | changes))


@pytest.fixture
def frames(tmp_path, save):
    """Write flat and dark frames of a camera, with fixed patterns and uneven light."""

    def write(model, name="", exposures=(0.02, 0.1, 0.4), darks=6):
        pattern = 1 + 0.05 * philox_generator(0, 1, 0, 0).standard_normal(SIZE)
        light = pattern * np.linspace(0.8, 1, SIZE[1])
        numbers = philox_generator(7, 2, 0, 0)
        values = {"dark": [np.zeros(SIZE)] * darks}
        values["flat"] = [one * light for one in exposures for _ in range(2)]
        for kind, all_clean in values.items():
            folder = tmp_path / kind / name
            folder.mkdir(parents=True, exist_ok=True)
            for index, clean in enumerate(all_clean):
                noisy = model.sample(clean, numbers) * (model.white - model.black) + model.black
                levels = np.rint(noisy).astype(np.uint16)
                save(folder / f"{index}.tif", levels[..., None])
        return dict(flat=tmp_path / "flat", dark=tmp_path / "dark", white_level=WHITE)

    return write


def assert_found(setting, **true):
    for name, value in true.items():
        error = setting.standard_errors[name]
        assert abs(setting.parameters[name] - value) < 4 * error, name
        assert error < 0.25 * abs(value), name


def test_flat_and_dark_frames(frames, tmp_path):
    settings = {100: camera(), 400: camera(gain=12.0, read=20.0, tukey_lambda=-0.15)}
    for iso, model in settings.items():
        folders = frames(model, f"ISO_{iso}")
    report = train_noise(tmp_path / "a1.json", **folders)
    table = load_noise(tmp_path / "a1.json")
    assert table == report.table and table.camera == "a1" and report.files == 24
    assert table.noise_model == "raw-camera" and not report.warnings
    first, second = table.settings
    assert (first.iso, second.iso) == (100, 400)
    assert_found(first, gain=3.0, read=9.0, row=2.5)
    assert first.parameters["tukey_lambda"] is None
    assert first.parameters["black"] == pytest.approx(512, abs=0.2)
    assert_found(second, gain=12.0, read=20.0, tukey_lambda=-0.15)
    assert 3 < table.at(200).gain < 12
    with pytest.raises(UsageError, match="already exists"):
        train_noise(tmp_path / "a1.json", **folders)
    with pytest.raises(UsageError, match=r"tables are \.json files"):
        train_noise(tmp_path / "a1.png", force=True, **folders)


def test_pairs(tmp_path, save):
    clean = np.linspace(0.05, 0.7, 200 * 210).reshape(200, 210, 1)
    noisy = PoissonGaussianNoise(a=0.004, b=0.01).sample(clean, philox_generator(1, 1, 0, 0))
    for name, image in (("noisy", noisy), ("clean", clean)):
        (tmp_path / "pairs" / name).mkdir(parents=True)
        levels = np.rint(image.clip(0, 1) * 65535).astype(np.uint16)
        save(tmp_path / "pairs" / name / "one.tif", levels)
    report = train_noise(tmp_path / "c.json", pairs=tmp_path / "pairs", iso=800)
    (setting,) = report.table.settings
    assert setting.iso == 800 and not report.warnings
    assert_found(setting, a=0.004, b=0.01)
    (tmp_path / "pairs" / "noisy" / "one.tif").rename(tmp_path / "pairs" / "noisy" / "two.tif")
    with pytest.raises(InputError, match=r"two\.tif: has no clean image"):
        train_noise(tmp_path / "d.json", pairs=tmp_path / "pairs")


def test_single_images(tmp_path, save):
    """Steps, edges and a ramp: only flat parts tell the noise."""
    rows, columns = np.mgrid[:300, :320]
    clean = 0.05 + 0.12 * (columns // 64) + 0.0002 * rows
    clean[:, 100:130] += 0.2 * ((rows + columns) % 2)[:, 100:130]
    noisy = PoissonGaussianNoise(a=0.004, b=0.01).sample(
        clean[..., None], philox_generator(1, 1, 0, 0)
    )
    (tmp_path / "in").mkdir()
    levels = np.rint(noisy.clip(0, 1) * 65535).astype(np.uint16)
    save(tmp_path / "in" / "a.tif", levels)
    report = train_noise(tmp_path / "c.json", images=tmp_path / "in")
    (setting,) = report.table.settings
    assert setting.iso is None and report.table.noise_model == "poisson-gaussian"
    assert_found(setting, a=0.004)
    assert float(report.table.at().sigma(0.3)) == pytest.approx(np.sqrt(0.0013), rel=0.05)


def test_what_is_doubtful_is_told(frames, tmp_path):
    model = camera(black=4, read=1.5)
    report = train_noise(tmp_path / "c.json", **frames(model, exposures=(0.5, 1.02)))
    text = str(report)
    for part in ("blocks are left out", "clipped at 0", "below two levels", "ISO", "normal"):
        assert part in text
    few = frames(camera(), "few", exposures=(0.3,))
    few = {name: few[name] / "few" for name in ("flat", "dark")}
    report = train_noise(tmp_path / "d.json", **few, white_level=WHITE)
    assert any("too few levels" in text for text in report.warnings)


def test_frames_that_are_not_linear(frames, tmp_path, save):
    folders = frames(camera(), exposures=(0.02, 0.1, 0.3, 0.6, 0.9))
    from lowtide.jobs.denoise.calibration.frames import read_planes

    for path in (tmp_path / "flat").glob("*.tif"):
        values = (read_planes(path)[0] / WHITE) ** (1 / 1.5) * WHITE
        save(path, np.rint(values).astype(np.uint16)[..., None])
    report = train_noise(tmp_path / "c.json", **folders)
    assert any("not linear" in text for text in report.warnings)


def _one_dark(flat, dark, save):
    for path in sorted(dark.iterdir())[1:]:
        path.unlink()


def _other_size(flat, dark, save):
    save(flat / "9.tif", np.full((40, 50, 1), 900, np.uint16))


def _saturated(flat, dark, save):
    for path in flat.iterdir():
        save(path, np.full((*SIZE, 1), WHITE, np.uint16))


def _floats(flat, dark, save):
    for path in (*flat.iterdir(), *dark.iterdir()):
        save(path, np.full((*SIZE, 1), 0.5, np.float32))


def _no_files(flat, dark, save):
    for path in flat.iterdir():
        path.unlink()


def _other_iso(flat, dark, save):
    for path in dark.iterdir():
        path.rename(dark / f"iso200_{path.name}")


def _some_iso(flat, dark, save):
    (flat / "0.tif").rename(flat / "iso200.tif")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_one_dark, "one dark frame only"),
        (_other_size, r"9\.tif differ: .* 50 × 40"),
        (_saturated, "all saturated"),
        (_floats, "floats have no levels"),
        (_no_files, "no images in this folder"),
        (_other_iso, "no frames"),
        (_some_iso, "tells an ISO"),
    ],
)
def test_frames_that_tell_nothing_are_refused(frames, tmp_path, save, change, reason):
    folders = frames(camera(), exposures=(0.1,), darks=2)
    change(tmp_path / "flat", tmp_path / "dark", save)
    with pytest.raises((InputError, ImageError), match=reason):
        train_noise(tmp_path / "c.json", **folders)
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(), "nothing to measure"),
        (dict(flat="in"), "--dark is missing"),
        (dict(pairs="in", images="in"), "two kinds"),
        (dict(images="in", white_level=9), "only for --flat"),
        (dict(images="in", iso=0), "--iso 0 has to be above 0"),
        (dict(images="in"), "no such folder"),
    ],
    ids=str,
)
def test_contradictions_are_refused(tmp_path, monkeypatch, given, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LowtideError, match=reason) as refused:
        train_noise("c.json", **given)
    assert refused.value.exit_code == 2


def test_the_command(frames, tmp_path, capsys):
    from lowtide.cli.main import main

    folders = frames(camera())
    target = tmp_path / "camera.json"
    words = ["train", "noise", "--flat", folders["flat"], "--dark", folders["dark"], "-o", target]
    words += ["--white-level", WHITE, "--iso", 800, "--camera", "A 1"]
    for more, code in ((["--json"], 0), ([], 2), (["--force"], 0)):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in [*words, *more]])
        assert (ended.value.code or 0) == code
        out, err = capsys.readouterr()
        if "--json" in more:
            assert json.loads(out)["table"]["settings"][0]["iso"] == 800
        elif code:
            assert "already exists" in err and "--force" in err
        else:
            assert "raw-camera noise of A 1" in out and "gain" in out and "±" in out
    assert load_noise(target).at(800).gain == pytest.approx(3, rel=0.1)
