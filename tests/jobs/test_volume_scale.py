"""Rician noise through the bundled network: no bias, in the background either."""

import numpy as np
import pytest
import torch

import lowtide
from lowtide.jobs.denoise.volumes.scale import VolumeScale
from lowtide.models.denoiser.noise_models import RicianNoise
from lowtide.models.denoiser.variance import RicianStabilizer
from lowtide.models.denoiser.volume_level import VolumeRangeEstimator


@pytest.fixture(scope="module")
def denoiser():
    return lowtide.load("lowtide-denoise").module


def denoised(denoiser, values, level, *, rician):
    """A slice (H, W) at a level, as the job runs it."""
    statistics = VolumeRangeEstimator()
    statistics.add(values)
    most = denoiser.config.max_sigma
    scale = VolumeScale.of(statistics.result(), level, most, rician=rician)
    denoiser.set_level(scale.sigma, (0.0,) * denoiser.config.noise_parameters)

    def network(unit):
        image = torch.from_numpy(unit[..., 0]).expand(1, 3, -1, -1)
        with torch.no_grad():
            return denoiser(image)[0].mean(0).numpy()[..., None]

    return scale.denoise(values[..., None], network)[..., 0]


@pytest.mark.parametrize("snr", [3, 10])
def test_rician_noise_leaves_no_bias(denoiser, snr):
    """In areas of signal, of less signal and of none, whose magnitudes are lifted by the noise: by
    a sixth of the standard deviation at an SNR of 3, and by 1.25 in the background. Taken as
    Gaussian noise, three quarters of the latter stay (0.94 to 0.97 in four draws)."""
    std = 1000 / snr
    clean = np.full((96, 96), 1000, np.float32)
    clean[48:], clean[:, 64:] = 0, 400
    noisy = RicianNoise(std=std).sample(clean, np.random.default_rng(5))
    made = denoised(denoiser, noisy, std, rician=True)
    gaussian = denoised(denoiser, noisy, std, rician=False)
    for area, most in (
        (np.s_[4:44, 4:60], 0.1),
        (np.s_[4:92, 68:92], 0.1),
        (np.s_[52:92, 4:60], 0.1),
    ):
        bias = (made[area].mean() - clean[area].mean()) / std
        before = (noisy[area].mean() - clean[area].mean()) / std
        left = (gaussian[area].mean() - clean[area].mean()) / std
        assert abs(bias) < most and abs(left) > 2 * abs(bias), (area, before, bias, left)
        assert made[area].std() < 0.5 * noisy[area].std()
    assert left > 0.9  # of the background, the last area: nine times what the other way may leave
    assert np.mean((made - clean) ** 2) < 0.2 * np.mean((noisy - clean) ** 2)


def test_the_transform_stabilizes_and_its_inverse_is_unbiased():
    random, noise, transform = np.random.default_rng(0), RicianNoise(std=2.5), RicianStabilizer(2.5)
    for clean in (0, 0.5, 1, 2, 3, 5, 10, 15.9, 16.1, 40):
        magnitudes = noise.sample(np.full(400_000, clean * 2.5, np.float32), random)
        made = transform.forward(magnitudes)
        assert 0.85 < made.std() < 1.1
        # Near 0 the inverse is as steep as a root: a mean's own error becomes 0.1.
        found = float(transform.inverse(np.array(made.mean()))) / 2.5
        assert found == pytest.approx(clean, abs=0.15 if clean < 0.5 else 0.03)


def test_noise_beyond_the_networks_levels_is_scaled_into_them(denoiser):
    values = np.abs(np.random.default_rng(0).normal(0, 100, (32, 32))).astype(np.float32)
    statistics = VolumeRangeEstimator()
    statistics.add(values)
    for rician in (False, True):
        scale = VolumeScale.of(statistics.result(), 500.0, denoiser.config.max_sigma, rician=rician)
        assert scale.sigma == pytest.approx(denoiser.config.max_sigma)


def test_an_outlier_does_not_change_the_rest_of_its_slice(denoiser):
    """A voxel a thousand times as bright would rule the norms of the network."""
    random = np.random.default_rng(1)
    values = (500 + random.normal(0, 30, (64, 64))).astype(np.float32)
    spiked = values.copy()
    spiked[32, 32] = 500_000
    plain, made = (denoised(denoiser, one, 30.0, rician=False) for one in (values, spiked))
    far = np.hypot(*np.mgrid[-32:32, -32:32]) > 12
    assert np.abs(plain - made)[far].max() < 15 and made[32, 32] > 490_000
