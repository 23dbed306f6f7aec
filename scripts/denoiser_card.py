"""Scores and model card of the bundled denoiser: see ``train_denoiser.py``."""

from __future__ import annotations

import numpy as np
import torch
from denoiser_recipe import (
    BATCH,
    CLIPPED,
    CONFIG,
    COOLDOWN,
    DECAY,
    FLAT,
    FLAT_FROM,
    GAUSSIAN,
    GRAY,
    NAME,
    PATCH,
    RATE,
    SEED,
)
from torch import Tensor
from training_photographs import PHOTOS, SHRINK, TUNING, listed, photograph

from lowtide.core.philox import philox_generator
from lowtide.models.denoiser.denoiser import Denoiser
from lowtide.models.loaded_model import pad_to_rule

SCORED = (10, 15, 25, 50)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR in dB of values in 0..1."""
    return float(-10 * np.log10(np.square(one - other).mean()))


def scores(denoiser: Denoiser) -> list[tuple[str, int, float, float]]:
    """Return (photograph, sigma, noisy, denoised) in dB for those held out, unclipped noise."""
    rows = []
    for name in TUNING:
        clean = photograph(name) / 255
        if (clean == clean[..., :1]).all():
            clean = clean[..., :1]
        for sigma in SCORED:
            noise = philox_generator(SEED, 1, sigma, 0).standard_normal(clean.shape)
            noisy = clean + noise * sigma / 255
            image = torch.from_numpy(np.float32(noisy)).permute(2, 0, 1)[None].expand(-1, 3, -1, -1)
            denoiser.set_level(sigma / 255, (0.0,))
            rows.append((name, sigma, psnr(noisy, clean), psnr(run(denoiser, image), clean)))
    return rows


@torch.no_grad()
def run(denoiser: Denoiser, image: Tensor) -> np.ndarray:
    """Denoise (1, 3, H, W), and return (H, W, 3) in 0..1."""
    height, width = image.shape[2:]
    made = denoiser(pad_to_rule(image, CONFIG.size))[0, :, :height, :width].clamp(0, 1)
    return made.permute(1, 2, 0).numpy()


def card(denoiser: Denoiser, made_by: str, log: list[dict[str, float]], digest: str) -> str:
    """The model card, in Markdown."""
    parameters = sum(one.numel() for one in denoiser.parameters())
    table = "\n".join(
        f"| {name} | {sigma} | {before:.2f} | {after:.2f} |"
        for name, sigma, before, after in scores(denoiser)
    )
    return f"""# {NAME}

Removes Gaussian and Poisson-Gaussian noise from photographs. Ships with the package, as what
`lowtide denoise` runs.

- Architecture: `SlimUNet`, {CONFIG.features} features times {CONFIG.multipliers},
  {CONFIG.blocks} blocks per level, linear attention at the lowest one, {parameters:,} parameters,
  kept in half precision
- Input and output: RGB, 0..1, with the noise level and the share of shot noise; gray as three
  equal bands
- License: MIT, like the package
- SHA-256: `{digest}`

## Intended use

Photographs with noise of a sigma up to {CONFIG.max_sigma * 255:.0f} of 255, equal everywhere or
with a share of shot noise, whose variance grows with brightness. The level is estimated or given.

## Limits

Trained on {len(PHOTOS)} photographs. Noise that neighboring pixels share, or that JPEG has encoded,
is not what it knows: it leaves some of that, or takes it for detail. What the noise has hidden
becomes smooth; nothing is invented.

## Data

Trained on photographs that ship inside scikit-image, with the sources they state:

{listed(PHOTOS)}

Held out, of scikit-image:

{listed(TUNING)}

## Training

Made by {made_by} with PyTorch {torch.__version__}, in about
{log[-1]["cpu_seconds"] / 60:.0f} minutes of one CPU core: seed {SEED}, batch {BATCH}, patches of
{PATCH} pixels, AdamW at {RATE:g} with a linear decay over the last {COOLDOWN:.0%} of each run,
squared error of the clean image relative to the noise level, weights averaged with a decay of
{DECAY}. Each photograph at sizes from {SHRINK[0]:g} to {SHRINK[-1]:g}, turned, mirrored, of several
contrasts and other colors; {GRAY:.0%} of the samples gray, {1 - GAUSSIAN:.0%} with a share of shot
noise, {CLIPPED:.0%} clipped to 8 bits, and from step {FLAT_FROM:,} on {FLAT:.0%} with an area of
one color. The log lies in the same folder.

## Scores on the held-out photographs

PSNR in dB, Gaussian noise that is not clipped, the level given:

| photograph | sigma | noisy | {NAME} |
|---|---|---|---|
{table}
"""
