"""`lowtide train noise` on frames that cannot be what they are taken for."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from lowtide import InputError
from lowtide.jobs.denoise.calibration.command import train_noise

GAIN, READ, BLACK, WHITE = 8, 6, 64, 4095
SIZE = (160, 176)
EXPOSURES = 300, 300, 800, 800, 1800, 1800


def frames(*means, seed=0, extra=0.0):
    random = np.random.default_rng(seed)
    slope = 1 + 0.2 * np.linspace(-1, 1, SIZE[1])
    made = []
    for mean in means:
        light = random.poisson((mean * slope + extra + np.zeros(SIZE)) / GAIN) * GAIN
        levels = np.rint(light + BLACK + READ * random.standard_normal(SIZE))
        made.append(levels.clip(0, WHITE).astype(np.uint16))
    return made


def darks(count=6, **options):
    return frames(*[0] * count, seed=1, **options)


@pytest.fixture
def train(tmp_path, save):
    """Calibrate flat and dark frames; returns the parameters and the warnings."""

    def run(flat, dark, **options):
        options = {"white_level": WHITE, **options}
        for kind, all_levels in (("flat", flat), ("dark", dark)):
            for index, levels in enumerate(all_levels):
                save(tmp_path / kind / f"{index:02d}.tif", np.atleast_3d(levels))
        folders = {"flat": tmp_path / "flat", "dark": tmp_path / "dark"}
        report = train_noise(tmp_path / "camera.json", **folders, **options)
        return report.table.settings[0].parameters, " | ".join(report.warnings)

    return run


def smoothed(all_levels, sigma=0.7):
    return [
        np.rint(gaussian_filter(one.astype(float), sigma)).astype(np.uint16) for one in all_levels
    ]


def test_good_frames_have_no_warnings(train):
    found, warnings = train(frames(*EXPOSURES), darks())
    assert found["gain"] == pytest.approx(GAIN, rel=0.03)
    assert found["read"] == pytest.approx(READ, rel=0.05) and not warnings


REFUSED = {
    "swapped folders": (lambda: (darks(4), frames(*EXPOSURES)), "the folders may be swapped"),
    "smoothed": (lambda: (smoothed(frames(*EXPOSURES)), smoothed(darks())), "correlated by"),
    "smoothed flats": (lambda: (smoothed(frames(*EXPOSURES), 0.5), darks()), "of flat frames is"),
    "copies next to each other": (lambda: (frames(300, 800) * 2, darks()), "hold the same values"),
    "copied darks": (lambda: (frames(*EXPOSURES), darks(1) * 4), "hold the same values"),
    "one dark with light": (
        lambda: (frames(*EXPOSURES), darks(4) + frames(40, seed=3)),
        "levels brighter than the other dark frames",
    ),
    "darks above some flats": (
        lambda: (frames(20, 20, 1800, 1800), darks(extra=100)),
        "below the dark frames'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_frames_that_cannot_be_are_refused(name, train, tmp_path):
    given, words = REFUSED[name]
    with pytest.raises(InputError, match=words) as caught:
        train(*given())
    assert caught.value.hint and not (tmp_path / "camera.json").exists()


def test_light_in_all_darks_is_told_by_its_shot_noise(train):
    _, warnings = train(frames(*EXPOSURES), darks(9, extra=80))
    assert "of the dark frames' variance is shot noise, by its skew" in warnings
    assert "brighter in places" not in warnings


def test_uneven_light_in_all_darks_is_told(train):
    _, warnings = train(frames(*EXPOSURES), darks(2, extra=np.linspace(0, 100, SIZE[1])))
    assert "dark frames are brighter in places, by" in warnings


def test_dark_frames_far_above_any_black_level_are_told(train):
    lifted = [[one + 1000 for one in group] for group in (frames(*EXPOSURES), darks())]
    _, warnings = train(*lifted)
    assert "is 26% of white" in warnings


def test_a_white_level_above_the_data_is_told(train):
    """Data of 14 bits in files of 16."""
    groups = [[one * 4 for one in group] for group in (frames(*EXPOSURES, 2600, 2600), darks())]
    found, warnings = train(*groups, white_level=None)
    assert found["white"] == 16383 and "white level is taken as 16,383" in warnings
    found, warnings = train(*groups, white_level=65535, force=True)
    assert found["white"] == 65535 and "--white-level 16383 may be right" in warnings


def test_the_level_where_a_sensor_saturates_is_found(train):
    flats = [np.minimum(one, 3000) for one in frames(*EXPOSURES, 2600, 2600)]
    found, warnings = train(flats, darks(), white_level=None)
    assert found["white"] == 3000 and "where the sensor is saturated" in warnings
    assert found["gain"] == pytest.approx(GAIN, rel=0.03)


def test_pairs_that_are_one_image_or_swapped_are_refused(tmp_path, save):
    clean = np.linspace(5_000, 40_000, 80 * 90).reshape(80, 90, 1)
    noisy = clean + np.random.default_rng(0).normal(0, 900, clean.shape)
    for first, second, words in (
        (clean, noisy, "the folders may be swapped"),
        (noisy, noisy, "hold the same values"),
    ):
        for folder, image in (("noisy", first), ("clean", second)):
            save(tmp_path / "pairs" / folder / "a.tif", np.rint(image).astype(np.uint16))
        with pytest.raises(InputError, match=words):
            train_noise(tmp_path / "table.json", pairs=tmp_path / "pairs")
