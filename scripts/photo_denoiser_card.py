"""Scores and model card of the denoiser of pictures: see ``train_photo_denoiser.py``."""

from __future__ import annotations

import math

import numpy as np
import torch
from camera_noise import as_8_bits, as_jpeg, bilinear, blurred, normal
from more_photographs import MORE, WALLPAPERS
from torch import Tensor
from training_photographs import PHOTOS, TUNING, listed, photograph

from lowtide.models.denoiser.config import FiniteDenoiserConfig
from lowtide.models.denoiser.finite_denoiser import FiniteDenoiser, haar_levels

NAME, CONFIG = "lowtide-photo-denoise", FiniteDenoiserConfig()
BATCH, PATCH, RATE, SEED, DECAY = 16, 96, 1.5e-3, 7, 0.999


def held_out() -> dict[str, tuple[Tensor, Tensor]]:
    """Noisy and clean parts (3, H, W) of the pictures held out, by name."""
    draw, rows = np.random.default_rng(0), {}
    for name in TUNING:
        picture = torch.from_numpy(photograph(name).copy()).permute(2, 0, 1).float() / 255
        clean = picture[:, 40:296, 120:376]

        def white(sigma: float, clean: Tensor = clean) -> Tensor:
            return clean + sigma / 255 * normal(draw, *clean.shape)

        for sigma in (10, 25, 50):
            rows[f"{name}, white {sigma}"] = as_8_bits(white(sigma)), clean
        mosaic, _ = bilinear(clean, lambda raw: 20 / 255 * normal(draw, *raw.shape), (0, 0))
        rows[f"{name}, demosaiced 20"] = as_8_bits(mosaic), clean
        coarse = blurred(normal(draw, *clean.shape), 1.5)
        rows[f"{name}, blurred 20"] = as_8_bits(clean + 20 / 255 * coarse / coarse.std()), clean
        for sigma in (10, 25):
            coded = as_jpeg(white(sigma), 60, full_color=False)
            rows[f"{name}, JPEG q60 of {sigma}"] = coded, clean
    return rows


def scores(denoiser: FiniteDenoiser) -> dict[str, tuple[float, float]]:
    """PSNR in dB of the pictures held out, noisy and denoised, the levels told."""

    def psnr(one: Tensor, other: Tensor) -> float:
        return -10 * math.log10(float((one.clamp(0, 1) - other).square().mean()))

    found = {}
    for name, (noisy, clean) in held_out().items():
        levels = haar_levels((noisy - clean)[None])[0]
        denoiser.set_level(1.0, levels.tolist())
        with torch.inference_mode():
            made = denoiser(noisy[None])[0]
        found[name] = psnr(noisy, clean), psnr(made, clean)
    return found


def card(denoiser: FiniteDenoiser, steps: int, digest: str) -> str:
    """The model card, in Markdown."""
    parameters = sum(one.numel() for one in denoiser.parameters())
    sources = PHOTOS | {name: one.source for name, one in (MORE | WALLPAPERS).items()}
    table = "\n".join(
        f"| {name} | {before:.2f} | {after:.2f} |"
        for name, (before, after) in scores(denoiser).items()
    )
    return f"""# {NAME}

Removes the noise of color pictures as people have them: white noise, and noise that neighboring
pixels share, as after demosaicing, resizing, smoothing in the camera or JPEG. Ships with the
package, as what `lowtide denoise` runs on them.

- Architecture: `FiniteDenoiser`, {CONFIG.features} features doubled at each of
  {len(CONFIG.blocks)} levels, {CONFIG.blocks} gated blocks, {parameters:,} parameters, kept in half
  precision. It looks a finite way: no attention and no norm over the picture
- Input and output: RGB, 0..1, and the noise in the diagonal Haar bands of 1, 2 and 4 pixels, of
  brightness and of color
- License: MIT, like the package
- SHA-256: `{digest}`

## Intended use

Color pictures with noise of a sigma up to {CONFIG.max_sigma * 255:.0f} of 255. Level and kind are
estimated.

## Limits

Trained on {len(sources)} photographs. What the noise has hidden becomes smooth; nothing is
invented. Gray pictures, camera RAW files, volumes and tables of a camera's noise are for
`lowtide-denoise`.

## Data

Trained on photographs that ship inside scikit-image, scikit-learn, SciPy, stdlib and Debian, with
the sources they state:

{listed(sources)}

Held out, of scikit-image:

{listed(TUNING)}

## Training

Made by `scripts/train_photo_denoiser.py` with PyTorch {torch.__version__}: {steps:,} steps, seed
{SEED}, batch {BATCH}, patches of {PATCH} pixels, AdamW at {RATE:g} with warm-up and cosine decay to
1 %, absolute error of the clean picture, bfloat16 autocast, weights averaged with a decay of
{DECAY}. Each photograph at three to six sizes; turned, mirrored, with colors mixed, exchanged or
gone, and other contrasts; 8 % flat fields. Of the noise 40 % is white, 35 % of a color mosaic that
was demosaiced, most of it shot and read noise before gamma, 15 % in blotches or stronger in color,
and the rest hardly there; a part is made smaller, and then coded as a JPEG of quality 45 to 97 or
rounded to 8 bits. The levels told are those of the noise, off by about 15 %.

## Scores on the held-out photographs

PSNR in dB of parts of 256 × 256 pixels, 8 bits, the levels told:

| picture and noise | noisy | {NAME} |
|---|---|---|
{table}
"""
