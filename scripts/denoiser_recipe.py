"""What the bundled denoiser is, and what it is trained on: see ``train_denoiser.py``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from training_photographs import PHOTOS, SHRINK, photograph, scaled

from lowtide.core.philox import philox_generator
from lowtide.models.denoiser.config import SlimUNetConfig
from lowtide.models.denoiser.noise_models import MID_GRAY, PoissonGaussianNoise

NAME = "lowtide-denoise"
CONFIG = SlimUNetConfig(
    multipliers=(1, 2, 3),
    blocks=2,
    embedding=64,
    noise_model="poisson-gaussian",
    noise_parameters=1,
)
BATCH, PATCH, RATE, SEED = 6, 96, 2e-3, 0
# Share of samples with an area of one color, and the step from which on there are such.
FLAT, FLAT_FROM = 0.2, 7500
WARMUP, DECAY, WEIGHT_DECAY, GRADIENT_LIMIT = 100, 0.998, 1e-3, 1.0
CLIPPED, GRAY, GAUSSIAN, MIXED, COOLDOWN = 0.25, 0.5, 0.5, 0.5, 0.5


class Samples:
    """Clean patches and noise, a function of seed and step."""

    def __init__(self) -> None:
        self.pictures = []
        for name in PHOTOS:
            photo = photograph(name)
            for share in SHRINK:
                if round(min(photo.shape[:2]) * share) >= PATCH:
                    self.pictures.append(scaled(photo, share))
        areas = np.array([one.size for one in self.pictures], float)
        self.shares = areas / areas.sum()

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return clean and noisy (B, C, H, W) in -1..1, noise levels (B,) of that range.

        And the shares of shot noise (B, 1).
        """
        draw = philox_generator(SEED, 0, step, 0)
        flat = FLAT if step >= FLAT_FROM else 0.0
        made = [self._sample(draw, flat) for _ in range(BATCH)]
        clean, noisy = (torch.from_numpy(np.stack([one[at] for one in made])) for at in (0, 1))
        sigma, share = torch.tensor([one[2:] for one in made], dtype=torch.float32).unbind(1)
        return clean, noisy, sigma, share[:, None]

    def _sample(
        self, draw: np.random.Generator, flat: float
    ) -> tuple[np.ndarray, np.ndarray, float, float]:
        clean = self._patch(draw)
        if flat and draw.random() < flat:
            clean = with_flat_area(clean, draw)
        if gray := draw.random() < GRAY:
            clean = clean @ draw.dirichlet((2, 2, 2))[:, None]
        sigma = draw.random() * CONFIG.max_sigma
        share = 0.0 if draw.random() < GAUSSIAN else draw.random()
        shot, rest = share * sigma**2 / MID_GRAY, (1 - share) ** 0.5 * sigma
        noisy = PoissonGaussianNoise(a=shot, b=rest).sample(clean, draw)
        if draw.random() < CLIPPED:
            noisy = np.rint(noisy.clip(0, 1) * 255) / 255
        pair = (np.float32(2 * one - 1).transpose(2, 0, 1) for one in (clean, noisy))
        return *(np.repeat(one, 3, 0) if gray else one for one in pair), 2 * sigma, share

    def _patch(self, draw: np.random.Generator) -> np.ndarray:
        """Return a patch (H, W, 3) in 0..1, turned, mirrored and of another contrast."""
        picture = self.pictures[draw.choice(len(self.pictures), p=self.shares)]
        top, left = (draw.integers(side - PATCH + 1) for side in picture.shape[:2])
        patch = np.rot90(picture[top : top + PATCH, left : left + PATCH], draw.integers(4))
        patch = patch[:, ::-1] if draw.random() < 0.5 else patch
        patch = patch / 255
        if draw.random() < MIXED:
            # Other colors: each band a mixture of all three, and half of these as a negative.
            patch = patch @ draw.dirichlet((1, 1, 1), 3).T
            patch = 1 - patch if draw.random() < 0.5 else patch
        contrast = draw.uniform(0.6, 1)
        return patch * contrast + draw.uniform(0, 1 - contrast)


def with_flat_area(patch: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return a patch (H, W, 3) of which one side of a curve is black, or of another color.

    Medical images, drawings and margins have such areas, photographs have none.
    """
    color = np.zeros(3) if draw.random() < 0.5 else draw.random(3)
    rows, columns = np.indices(patch.shape[:2]) / PATCH
    (y, x), (tall, wide) = draw.random(2), draw.uniform(0.2, 1, 2)
    outside = ((rows - y) / tall) ** 2 + ((columns - x) / wide) ** 2 > 1
    return np.where(outside[..., None], color, patch)
