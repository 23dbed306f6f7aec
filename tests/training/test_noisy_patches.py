"""Training states of a denoiser have the statistics of what a camera really gives."""

import numpy as np
import pytest
import pyvips

from lowtide.core.philox import philox_generator
from lowtide.jobs.denoise.calibration.command import train_noise
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.photographs import PhotographFolders, linear_light, mosaic
from lowtide.training.tasks.denoise_config import DenoiseConfig
from lowtide.training.tasks.denoising import NoisyPatches, noise_model_sampler

BLACK, WHITE, GAIN, READ, ROW, HEAVY = 300, 4095, 2.5, 12.0, 5.0, 8
SIDE = 64


def frame(light, random):
    """A frame of a sensor by other means than the library's: (H, W) light in 0..1 to levels.

    Photons are counted one binomial at a time, and read noise is Student's, with heavy tails.
    """
    expected = light * (WHITE - BLACK) / GAIN
    photons = random.binomial(1 << 20, expected / (1 << 20))
    tails = random.standard_t(HEAVY, light.shape) * READ / np.sqrt(HEAVY / (HEAVY - 2))
    rows = random.normal(0, ROW, (light.shape[0], 1))
    return np.rint(photons * GAIN + tails + rows + BLACK).clip(0, WHITE).astype(np.uint16)


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyvips.Image.new_from_array(image).write_to_file(str(path))


def config_of(folder, *, channels=1, **data):
    train = {"dataroot_gt": [str(folder)], "patch_size": SIDE, **data}
    return DenoiseConfig.from_values(
        {
            "name": "test",
            "datasets": {"train": train},
            "network": {"channels": channels},
            "train": {"total_iter": 1},
        }
    )


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The camera's table, measured from its frames, and a folder with a wedge of gray steps."""
    folder, random = tmp_path_factory.mktemp("camera"), np.random.default_rng(0)
    for index in range(6):
        write(folder / "dark" / f"{index}.tif", frame(np.zeros((200, 240)), random))
    for level in (0.05, 0.2, 0.5):
        for index in range(2):
            flat = frame(np.full((200, 240), level), random)
            write(folder / "flat" / f"{level}_{index}.tif", flat)
    path = folder / "camera.json"
    train_noise(path, flat=folder / "flat", dark=folder / "dark", white_level=WHITE)
    wedge = np.repeat(np.uint8([60, 110, 150, 190]), SIDE // 4)[None].repeat(SIDE, 0)
    write(folder / "wedge" / "wedge.png", wedge)
    return path, folder / "wedge"


def moments(noise):
    """Mean, variance, kurtosis, and the variance of the means of rows of noise (N, H, W)."""
    spread = noise - noise.mean()
    kurtosis = (spread**4).mean() / (spread**2).mean() ** 2
    return noise.mean(), (spread**2).mean(), kurtosis, spread.mean(2).var()


def test_noise_of_batches_is_that_of_frames(calibrated):
    """Mean, variance by brightness, kurtosis and row noise, of linear mosaics of a gray wedge."""
    table, wedge = calibrated
    config, upright = config_of(wedge, noise=str(table)), Augmentation(hflip=False, rot=False)
    noise = noise_model_sampler(config.datasets.train)
    photographs = PhotographFolders([wedge], gray=0, linear=True, augmentation=upright)
    samples, count = NoisyPatches(photographs, noise, config), 60
    noisy, clean, levels, _ = (
        np.stack(one)
        for one in zip(
            *(samples.sample(0, philox_generator(0, 0, 0, at)) for at in range(count)), strict=True
        )
    )
    light, random = clean[0, 0].astype(np.float64), np.random.default_rng(1)
    assert light[0, 0] == pytest.approx(((60 / 255 + 0.055) / 1.055) ** 2.4, rel=1e-5)
    real = np.stack([frame(light, random) for _ in range(count)])
    real = (real.astype(np.float64) - BLACK) / (WHITE - BLACK)
    for start in range(0, SIDE, SIDE // 4):
        step = np.s_[:, :, start : start + SIDE // 4]
        made, wanted = (moments((one - light)[step]) for one in (noisy[:, 0], real))
        sigma = wanted[1] ** 0.5
        assert abs(made[0] - wanted[0]) < 0.03 * sigma
        assert made[1] == pytest.approx(wanted[1], rel=0.05)
        assert made[2] == pytest.approx(wanted[2], abs=0.25)
        assert made[3] == pytest.approx(wanted[3], rel=0.2)
    # What the network is given: its level is the deviation at a value of a half.
    half = moments((frame(np.full((200, 240), 0.5), random)[None] - BLACK) / (WHITE - BLACK))
    assert levels[0] == pytest.approx(half[1] ** 0.5, rel=0.03)


@pytest.mark.parametrize("name", ["gaussian", "poisson-gaussian"])
def test_levels_and_parameters_describe_the_noise(name, tmp_path):
    write(tmp_path / "gray.png", np.full((SIDE, SIDE, 3), 128, np.uint8))
    data = {"noise": name, "sigma": [5, 40], "clipped": 0, "gray": 0}
    config = config_of(tmp_path, channels=3, **data)
    samples = NoisyPatches(
        PhotographFolders([tmp_path], gray=0), noise_model_sampler(config.datasets.train), config
    )
    levels, shares = [], []
    for at in range(40):
        noisy, clean, level, parameters = samples.sample(0, philox_generator(0, 0, 0, at))
        assert noisy.shape == clean.shape == (3, SIDE, SIDE)
        assert (noisy - clean).std() == pytest.approx(level, rel=0.05)
        levels.append(float(level) * 255)
        shares += parameters.tolist()
    assert 5 <= min(levels) < 12 and 33 < max(levels) <= 40
    assert len(shares) == (40 if name == "poisson-gaussian" else 0)
    if shares:
        assert 0 <= min(shares) < 0.2 and 0.8 < max(shares) <= 1


def test_files_of_8_bits_are_clipped_and_gray_has_one_noise(tmp_path):
    write(tmp_path / "gray.png", np.full((SIDE, SIDE), 250, np.uint8))
    for clipped, expected in ((1.0, True), (0.0, False)):
        config = config_of(tmp_path, channels=3, sigma=[30, 30], clipped=clipped)
        noise = noise_model_sampler(config.datasets.train)
        samples = NoisyPatches(PhotographFolders([tmp_path], gray=0), noise, config)
        noisy, *_ = samples.sample(0, philox_generator(0, 0, 0, 0))
        assert (noisy.max() <= 1 and np.abs(noisy * 255 % 1 - 0.5).min() > 0.49) == expected
        assert (noisy == noisy[:1]).all()


@pytest.mark.parametrize("cfa", ["RGGB", "BGGR", "GRBG", "GBRG"])
def test_mosaics_begin_at_the_pattern(cfa):
    color = np.random.default_rng(0).random((6, 8, 3), np.float32)
    made = mosaic(color, cfa, np.array([0.5, 0.25]))
    gains = {"R": 0.5, "G": 1, "B": 0.25}
    for row in range(6):
        for column in range(8):
            letter = cfa[2 * (row % 2) + column % 2]
            wanted = color[row, column, "RGB".index(letter)] * gains[letter]
            assert made[row, column] == np.float32(wanted)


def test_linear_light_is_the_inverse_of_srgb():
    """At the ends, in both parts of the curve, and at the value that stands for mid-gray."""
    values = np.float32([0, 0.04, 0.5, 1])
    np.testing.assert_allclose(linear_light(values), [0, 0.04 / 12.92, 0.21404, 1], rtol=1e-4)
