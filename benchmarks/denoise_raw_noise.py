"""Why a denoiser of camera RAW is trained with the camera's own noise: three trainings compared.

    python benchmarks/denoise_raw_noise.py [--steps 1500] [--only poisson] [--fresh]

Color planes of scikit-image's photographs, as linear light, are darkened 100 to 300 times and get
the noise of a camera: shot noise, read noise of Tukey's lambda, row noise and whole levels, with
parameters of the size that is published for a Sony A7S II at ISO 400 to 1600. One network is
trained with that noise (`raw-camera`), one with Poisson-Gaussian noise of equal variance, and one
as a known project does it: with Gaussian noise whose level grows with the root of ISO times ratio,
whatever the camera's is. Steps, seeds, patches and the network are the same; each is given the
level and parameters of the noise that it was trained with. All are scored on the camera's noise, on
photographs that none was trained on, at ISO 1600.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import ResultFile, row_parser
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

from training_photographs import PHOTOS, photograph

from lowtide.core.metrics import psnr, ssim
from lowtide.core.philox import philox_generator
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.denoiser import Denoiser, preconditioning_terms
from lowtide.models.denoiser.noise_models import GaussianNoise, NoiseModel, PoissonGaussianNoise
from lowtide.models.denoiser.raw_camera_noise import NORMAL_LAMBDA, RawCameraNoise
from lowtide.models.loaded_model import pad_to_rule
from lowtide.training.setup import EMAModel

ABOUT = (
    "Photographs as linear light, darkened 100 and 300 times, with the noise of a camera at ISO"
    " 1600: PSNR of values from 0 to 1, mean of two pictures and three noise seeds"
)
CONFIG = SlimUNetConfig(
    channels=1, noise_model="raw-camera", noise_parameters=3, max_sigma=80 / 255
)
BLACK, WHITE, LAMBDA = 512, 16383, -0.026
ISOS, RATIOS = (400, 1600), (100, 300)
BATCH, PATCH, RATE, SEED = 6, 96, 2e-3, 0
WARMUP, COOLDOWN, DECAY = 100, 0.4, 0.998
SEEDS = (0, 1, 2)
HELD_OUT = {"camera": 0, "coffee": 1}  # and the color plane


@dataclass(frozen=True)
class Exposure:
    """A short exposure: the camera's noise at an ISO, values from 0 to 1 / ratio."""

    iso: float
    ratio: float

    @property
    def gain(self) -> float:
        """Levels per electron."""
        return 1.53 * self.iso / 1600

    def camera(self, white: float) -> RawCameraNoise:
        """The camera's noise, of values that reach 1 at ``white``."""
        read, row = 6.1 * (self.gain / 1.53) ** 0.74, 0.99 * (self.gain / 1.53) ** 0.79
        return RawCameraNoise(
            gain=self.gain, read=read, row=row, tukey_lambda=LAMBDA, black=BLACK, white=white
        )

    @property
    def brightened(self) -> RawCameraNoise:
        """The same noise, of values times ratio: what the networks see."""
        return self.camera(BLACK + (WHITE - BLACK) / self.ratio)

    def expose(self, clean: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """What the camera gives of a clean image (..., H, W) in 0..1, times ratio."""
        return self.camera(WHITE).sample(clean / self.ratio, random) * np.float32(self.ratio)


@dataclass(frozen=True)
class Way:
    """A forward process for training, and what the network is given of an exposure's noise."""

    noisy: Callable[[Exposure, np.ndarray, np.random.Generator], np.ndarray]
    given: Callable[[Exposure], tuple[float, ...]]


def full(exposure: Exposure) -> tuple[float, ...]:
    """Level, shares of shot and row noise, and Tukey's lambda."""
    return exposure.brightened.level, *exposure.brightened.noise_parameters


def matched(exposure: Exposure) -> NoiseModel:
    """Poisson-Gaussian noise of the camera's variance at every value."""
    noise = exposure.brightened
    dark = float(noise.sigma(0.0))
    return PoissonGaussianNoise(a=float(noise.sigma(1.0)) ** 2 - dark**2, b=dark)


def unmatched(exposure: Exposure) -> NoiseModel:
    """Gaussian noise at the largest level of the known project: 0.085 at ISO 100 and ratio 100."""
    scale = 0.085 * (exposure.iso * exposure.ratio / 1e4) ** 0.5
    return GaussianNoise(std=0.199 * scale)


def way_of(process: Callable[[Exposure], NoiseModel]) -> Way:
    """A way whose network knows level and share of shot noise, and no more."""

    def given(exposure: Exposure) -> tuple[float, ...]:
        noise = process(exposure)
        return noise.level, *(noise.noise_parameters or (0.0,)), 0.0, NORMAL_LAMBDA

    return Way(lambda exposure, clean, random: process(exposure).sample(clean, random), given)


WAYS = {
    "raw-camera": Way(Exposure.expose, full),
    "poisson-gaussian": way_of(matched),
    "unmatched": way_of(unmatched),
}


def linear(samples: np.ndarray) -> np.ndarray:
    """Light in 0..1 of 8-bit sRGB samples."""
    value = samples / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


class Samples:
    """Clean planes in 0..1, and noisy batches as a function of way and step."""

    def __init__(self) -> None:
        self.planes = [
            np.float32(linear(plane))
            for name in PHOTOS
            for plane in photograph(name).transpose(2, 0, 1)
        ]
        areas = np.array([plane.size for plane in self.planes], float)
        self.shares = areas / areas.sum()

    def batch(self, way: Way, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Clean and noisy (B, 1, H, W) in -1..1, and levels with parameters (B, 4).

        The patches and exposures of a step are the same for every way.
        """
        draw, noise = philox_generator(SEED, 0, step, 0), philox_generator(SEED, 1, step, 0)
        clean, noisy, given = [], [], []
        for _ in range(BATCH):
            plane = self.planes[draw.choice(len(self.planes), p=self.shares)]
            top, left = (draw.integers(side - PATCH + 1) for side in plane.shape)
            patch = plane[top : top + PATCH, left : left + PATCH] * draw.uniform(0.5, 1)
            patch = patch[:, ::-1] if draw.random() < 0.5 else patch
            iso, ratio = (np.exp(draw.uniform(*np.log(one))) for one in (ISOS, RATIOS))
            exposure = Exposure(float(iso), float(ratio))
            clean.append(patch)
            noisy.append(way.noisy(exposure, patch, noise))
            given.append(way.given(exposure))
        pair = (
            torch.from_numpy(2 * np.float32(np.stack(one))[:, None] - 1) for one in (clean, noisy)
        )
        return *pair, torch.tensor(given)


def train(way: Way, steps: int) -> tuple[Denoiser, float]:
    """A trained denoiser, and the processor seconds that it took."""
    torch.manual_seed(SEED)
    denoiser = Denoiser(CONFIG).to(memory_format=torch.channels_last)
    network, samples = denoiser.unet, Samples()
    average = EMAModel(network)
    optimizer = torch.optim.AdamW(network.parameters(), RATE, betas=(0.9, 0.99), weight_decay=1e-3)
    started = time.process_time()
    for step in range(steps):
        share = min((step + 1) / WARMUP, (steps - step) / (steps * COOLDOWN), 1)
        optimizer.param_groups[0]["lr"] = RATE * share
        clean, noisy, given = samples.batch(way, step)
        sigma = 2 * given[:, 0]
        terms = [preconditioning_terms(CONFIG.prediction, level) for level in sigma.tolist()]
        shrunk, kept, made = torch.tensor(terms)[..., None, None, None].unbind(1)
        found = network(shrunk * noisy, network.modulation(sigma, given[:, 1:]))
        errors = (kept * noisy + made * found - clean).square().mean((1, 2, 3))
        loss = (errors / (sigma + 0.01)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        average.update(network, min(DECAY, step / (step + 10)))
    network.load_state_dict(average.module.state_dict())
    return denoiser.eval(), time.process_time() - started


@torch.no_grad()
def denoise(denoiser: Denoiser, noisy: np.ndarray, given: tuple[float, ...]) -> np.ndarray:
    """A whole plane (H, W), denoised, in 0..1."""
    denoiser.set_level(given[0], given[1:])
    height, width = noisy.shape
    padded = pad_to_rule(torch.from_numpy(noisy)[None, None], CONFIG.size)
    return denoiser(padded)[0, 0, :height, :width].clamp(0, 1).numpy()


def scores(denoiser: Denoiser, way: Way) -> dict[str, float]:
    """Mean scores on the pictures held out, at the smallest and the largest ratio."""
    found: dict[str, list[float]] = {}
    for name, plane in HELD_OUT.items():
        clean = linear(photograph(name)[..., plane])
        for ratio in RATIOS:
            exposure = Exposure(ISOS[1], ratio)
            for seed in SEEDS:
                noisy = exposure.expose(clean, philox_generator(seed, 2, ratio, plane))
                made = denoise(denoiser, noisy, way.given(exposure))
                gain = float(np.vdot(made, clean) / np.vdot(made, made))
                for figure, value in {
                    "noisy_db": psnr(noisy.clip(0, 1), clean),
                    "db": psnr(made, clean),
                    "aligned_db": psnr(gain * made, clean),
                    "ssim": ssim(made, clean),
                }.items():
                    found.setdefault(f"x{ratio}_{figure}", []).append(value)
    return {name: round(float(np.mean(values)), 4) for name, values in found.items()}


def main() -> None:
    """One row for each training that is missing."""
    parser = row_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = ResultFile(
        "denoise_raw_noise", about=ABOUT, fresh=options.fresh, packages=("scikit-image",)
    )
    for name, way in WAYS.items():
        if options.only not in name or results.has(name):
            continue
        denoiser, seconds = train(way, options.steps)
        results.add(name, steps=options.steps, cpu_s=round(seconds, 1), **scores(denoiser, way))


if __name__ == "__main__":
    main()
