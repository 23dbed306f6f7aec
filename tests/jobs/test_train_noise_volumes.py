"""`lowtide train noise --volumes`: the Rician noise of a simulated series comes back."""

import json

import numpy as np
import pytest

from lowtide import LowtideError
from lowtide.jobs.denoise.calibration.command import train_noise
from lowtide.jobs.denoise.volumes.levels import brightest_maximum, estimate_levels
from lowtide.jobs.denoise.volumes.survey import survey_ranges
from lowtide.media.volume_header import inspect_volume
from lowtide.models.denoiser.noise_models import RicianNoise
from lowtide.models.denoiser.noise_table import load_noise
from support.nifti_files import brain, nifti

SIGNAL = 700  # of the tissue, on average


def series(path, std, shape=(48, 44, 4, 6), dtype="int16", seed=0, scaling=None):
    clean = brain(shape)
    noisy = RicianNoise(std=std).sample(clean, np.random.default_rng(seed))
    stored = noisy if scaling is None else (noisy - scaling[1]) / scaling[0]
    return nifti(path, np.rint(stored).astype(dtype), scaling=scaling)


def found_std(tmp_path, path):
    """The table's standard deviation in data units, and its error."""
    report = train_noise(tmp_path / "scanner.json", volumes=path, force=True)
    (setting,) = report.table.settings
    scale = brightest_maximum(survey_ranges(inspect_volume(path)))
    assert (report.table.noise_model, report.measured_from, report.files) == (
        "rician",
        "volumes",
        1,
    )
    return setting.parameters["std"] * scale, setting.standard_errors["std"] * scale


@pytest.mark.parametrize("snr", [3, 10, 30])
def test_the_standard_deviation_comes_back(tmp_path, snr):
    std = SIGNAL / snr
    found, error = found_std(tmp_path, series(tmp_path / "dwi.nii.gz", std))
    assert found == pytest.approx(std, rel=0.1)
    assert 0 < error < 0.1 * std and abs(found - std) < 5 * error


def test_two_volumes_are_enough(tmp_path):
    found, _ = found_std(tmp_path, series(tmp_path / "pair.nii", 70, (48, 44, 4, 2)))
    assert found == pytest.approx(70, rel=0.1)


def test_the_table_does_not_depend_on_the_intensity_scale(tmp_path):
    """1 is the same brightness in files of another gain; the text of the table says so."""
    tables = []
    for name, scaling in (("a.nii", (1.0, 0.0)), ("b.nii", (0.125, 0.0))):
        path = series(tmp_path / name, 70, dtype="int32", scaling=scaling)
        train_noise(tmp_path / "t.json", volumes=path, camera="Trio", force=True)
        tables.append(load_noise(tmp_path / "t.json"))
        assert "Trio" in tables[-1].camera and "99.9th percentile" in tables[-1].camera
    stds = [table.settings[0].parameters["std"] for table in tables]
    assert stds[0] == pytest.approx(stds[1], rel=0.01)


def test_contrast_between_volumes_is_no_noise(tmp_path):
    """A volume five times as bright among others, as a b0 is."""
    clean = brain((48, 44, 4, 6)) * np.array([5, 1, 1, 1, 1, 1])
    noisy = RicianNoise(std=40).sample(clean.astype(np.float32), np.random.default_rng(1))
    found, _ = found_std(tmp_path, nifti(tmp_path / "dwi.nii", np.rint(noisy).astype(np.int16)))
    assert found == pytest.approx(40, rel=0.1)


def test_masked_and_missing_voxels_do_not_count(tmp_path):
    clean = brain((48, 44, 4, 4))
    noisy = RicianNoise(std=70).sample(clean, np.random.default_rng(2)) * (clean > 0)
    noisy[20:23, 20:23, 1] = np.nan
    found, _ = found_std(tmp_path, nifti(tmp_path / "dwi.nii", noisy.astype(np.float32)))
    assert found == pytest.approx(70, rel=0.1)


def levels_of(path):
    facts = inspect_volume(path)
    return np.array(estimate_levels(facts, survey_ranges(facts)).levels, float)


def test_texture_raises_the_estimate_of_one_volume_alone(tmp_path):
    random = np.random.default_rng(3)
    texture = 1000 + 150 * random.standard_normal((48, 44, 4, 1)) * np.ones(6)
    noisy = RicianNoise(std=30).sample(texture.astype(np.float32), random)
    noisy = np.rint(noisy).astype(np.int16)
    path = nifti(tmp_path / "dwi.nii", noisy)
    assert levels_of(nifti(tmp_path / "one.nii", noisy[..., :1]))[0] > 100
    assert np.median(levels_of(path)) == pytest.approx(30, rel=0.15)
    assert found_std(tmp_path, path)[0] == pytest.approx(30, rel=0.15)


@pytest.mark.parametrize(
    ("shape", "std", "message"),
    [
        ((20, 20, 3, 1), 50, "1 volume"),
        ((6, 7, 2, 4), 50, "too few voxels"),
        ((4, 4, 2, 4), 50, "too few voxels"),
    ],
)
def test_series_that_tell_nothing_are_refused(tmp_path, shape, std, message):
    path = series(tmp_path / "in.nii", std, shape)
    with pytest.raises(LowtideError, match=message) as refused:
        train_noise(tmp_path / "t.json", volumes=path)
    assert refused.value.exit_code == 2 and str(path) in refused.value.message
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((20, 20, 3, 3), 7, np.int16), "no noise"),
        (np.rint(brain((40, 40, 3, 1)) * np.ones(3)).astype(np.int16), "no noise"),
        (np.full((9, 9, 2, 2), np.nan, np.float32), "no voxel is finite"),
    ],
)
def test_series_without_noise_are_refused(tmp_path, values, message):
    with pytest.raises(LowtideError, match=message) as refused:
        train_noise(tmp_path / "t.json", volumes=nifti(tmp_path / "in.nii", values))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("given", [dict(iso=800), dict(white_level=9), dict(images="in")])
def test_options_of_cameras_are_refused(tmp_path, given):
    with pytest.raises(LowtideError) as refused:
        train_noise(tmp_path / "t.json", volumes=tmp_path / "in.nii", **given)
    assert refused.value.exit_code == 2


def test_the_command_for_volumes(tmp_path, capsys):
    from lowtide.cli.main import main

    path = series(tmp_path / "dwi.nii.gz", 70)
    with pytest.raises(SystemExit) as ended:
        main(["train", "noise", "--volumes", str(path), "-o", str(tmp_path / "s.json")])
    assert not ended.value.code
    assert "rician noise of s" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())["noise_model"] == "rician"
