"""Train the bundled upscalers, from photographs that ship inside scikit-image.

    python scripts/train_bundled.py --scale 2
    python scripts/train_bundled.py --scale 4

Writes ``lowtide-xN.safetensors``, its training log and its card into the package's weights
folder (or ``--output``), and prints the hash to pin in `lowtide.models.bundled`. Everything is
fixed but the seed: photographs, patches, steps. The same machine and PyTorch give the same
weights; others give weights of the same quality. No benchmark picture is read here; `TUNING`
are the only pictures a choice was made on.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as to_safetensors
from torch import Tensor
from training_photographs import PHOTOS, TUNING, Patches, bicubic, listed, photograph, shrink

import lowtide.models
from lowtide.core.metrics import psnr_y
from lowtide.models import lowtide_files
from lowtide.models.paragonsr2.config import FileConfig, ParagonConvConfig
from lowtide.models.paragonsr2.paragon_conv import ParagonConv

REPORT_EVERY = 500


@dataclass(frozen=True)
class Recipe:
    """What differs between the scales. ``patch`` is in low-resolution pixels."""

    config: ParagonConvConfig
    steps: int
    trunk_steps: int
    rate: float
    patch: int
    batch: int = 16


RECIPES = {
    2: Recipe(ParagonConvConfig(scale=2, features=32, blocks=5), 14000, 0, 3e-3, 32),
    4: Recipe(ParagonConvConfig(scale=4, features=48, blocks=6), 11000, 4000, 2e-3, 24),
}


def enlarged(model: torch.nn.Module, low: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) as the model enlarges it."""
    with torch.inference_mode():
        image = model(torch.from_numpy(low).permute(2, 0, 1)[None].float() / 255.0)
    return (image[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()


def tuning_scores(model: ParagonConv) -> dict[str, float]:
    """PSNR-Y in dB on the photographs that are not trained on."""
    scale, scores = model.config.scale, {}
    for name in TUNING:
        low, high = shrink(photograph(name), scale)
        scores[name] = round(psnr_y(enlarged(model, low), high, scale), 3)
    return scores


def require_gradients(model: ParagonConv, step: int) -> None:
    """A tensor without a gradient in the second step will never be trained: stop at once."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
            raise RuntimeError(f"{name} has no finite, non-zero gradient in step {step}")


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over 300 steps, then a cosine down to 2 %."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return min(1.0, (step + 1) / 300) * (0.02 + 0.98 * cosine)


def train(
    config: ParagonConvConfig,
    recipe: Recipe,
    steps: int,
    seed: int,
    log: list[dict],
    trunk: ParagonConv | None = None,
) -> ParagonConv:
    """Train for exactly ``steps`` steps and return the averaged weights (EMA)."""
    torch.manual_seed(seed)
    model = ParagonConv(config).to(memory_format=torch.channels_last)
    if trunk is not None:
        model.conv_in.load_state_dict(trunk.conv_in.state_dict())
        model.body.load_state_dict(trunk.body.state_dict())
    average = copy.deepcopy(model).requires_grad_(False)
    data = Patches(config.scale, recipe.patch, recipe.batch, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    total = 0.0
    for step in range(1, steps + 1):
        low, high = data.next()
        with torch.autocast("cpu", torch.bfloat16):
            detail = model.detail(low)
        # The base stays in fp32: its rounding would be learned as if it were detail.
        image = F.pixel_shuffle(detail.float() + model.base(low), config.scale)
        loss = F.l1_loss(image, high)
        optimizer.zero_grad()
        loss.backward()
        if step == 2:
            require_gradients(model, step)
        optimizer.step()
        schedule.step()
        decay = min(0.999, step / (step + 10))
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now.detach(), 1 - decay)
        total += loss.item()
        if step % REPORT_EVERY == 0 or step == steps:
            row = {"scale": config.scale, "step": step, "l1": round(total / REPORT_EVERY, 5)}
            log.append({**row, **tuning_scores(average)})
            print(json.dumps({**log[-1], "cpu_s": round(time.process_time())}), flush=True)
            total = 0.0
    return average


def card(recipe: Recipe, seed: int, model: ParagonConv, digest: str) -> str:
    """The model card, in Markdown."""
    config, scale = recipe.config, recipe.config.scale
    parameters = sum(parameter.numel() for parameter in model.parameters())
    start = f" after {recipe.trunk_steps} steps of its trunk at x2" if recipe.trunk_steps else ""
    scores = "\n".join(
        f"| {name} | {score:.2f} | {bicubic(name, scale):.2f} |"
        for name, score in tuning_scores(model).items()
    )
    return f"""# lowtide-x{scale}

Enlarges photographs {scale} times. Small enough to ship with the package and to run on a
processor without a GPU; made so that Lowtide does something useful with no download.

- Architecture: `ParagonConv`, {config.features} features, {config.blocks} blocks,
  {parameters:,} parameters; after ParagonSR2's idea of a fixed path plus a learned one
- Input and output: RGB, 0..1. An output pixel depends on {config.reach} input pixels to
each side - License: MIT, like the package
- SHA-256: `{digest}`

## Intended use

Clean photographs that were made smaller with an antialiased cubic filter, and any picture for
which faithful pixels matter more than invented ones.

## Limits

Trained on eleven photographs. It does not remove noise, JPEG blocks or camera blur; it makes
them larger and slightly sharper. It invents no texture: trained for the smallest absolute
error, it prefers smooth to wrong. Larger models, trained on larger sets, score up to 2 dB more.

## Data

Trained on photographs that ship inside scikit-image, with the sources it states:

{listed(PHOTOS)}

Held out, to tune on:

{listed(TUNING)}

## Training

Made by `scripts/train_bundled.py --scale {scale} --seed {seed}` with PyTorch {torch.__version__}:
{recipe.steps} steps{start}, batch {recipe.batch}, patches of {recipe.patch} low-resolution pixels,
Adam at {recipe.rate:g} with warm-up and cosine decay to 2 %, L1 loss on RGB, bfloat16 autocast,
weights averaged with a decay of 0.999. Each photograph at six sizes from 1 to 0.5, shrunk by
MATLAB's antialiased cubic filter, turned, mirrored, and in half of each batch with colors
mixed, contrast weakened or values inverted. The log lies beside this card.

## Scores on the held-out photographs

PSNR-Y in dB (BT.601 luma, 8-bit rounding, {scale} pixels cropped):

| photograph | lowtide-x{scale} | cubic |
|---|---|---|
{scores}
"""


def training_parser(about: str, scales: Iterable[int] = ()) -> argparse.ArgumentParser:
    """The command line of a training of bundled weights, which takes one thread."""
    # Patches are small: a second thread gains little, and on a shared machine it loses a lot.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=about)
    if scales:
        parser.add_argument("--scale", type=int, choices=sorted(scales), required=True)
    weights = Path(lowtide.models.__file__).parent / "weights"
    parser.add_argument("--output", type=Path, default=weights, help="folder to write into")
    return parser


def sorted_header(blob: bytes) -> bytes:
    """The same safetensors file with its header's keys sorted.

    The library writes metadata in the order of a randomized hash table; without this, equal
    weights would not make equal files.
    """
    length = int.from_bytes(blob[:8], "little")
    header = json.dumps(json.loads(blob[8 : 8 + length]), sort_keys=True, separators=(",", ":"))
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    return len(padded).to_bytes(8, "little") + padded + blob[8 + length :]


def write_weights(path: Path, tensors: dict[str, Tensor], config: FileConfig) -> str:
    """Write a model file, print what it is, and return its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blob = sorted_header(to_safetensors(tensors, lowtide_files.metadata_for(config)))
    path.write_bytes(blob)
    digest = hashlib.sha256(blob).hexdigest()
    print(f"{path.name}: {len(blob)} bytes, sha256 {digest}")
    return digest


def save(model: ParagonConv, recipe: Recipe, seed: int, log: list[dict], folder: Path) -> None:
    """Write weights, log and card."""
    path = folder / f"lowtide-x{recipe.config.scale}.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    digest = write_weights(path, tensors, recipe.config)
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    path.with_suffix(".md").write_text(card(recipe, seed, model, digest))


def main() -> None:
    """Parse the command line and train one scale."""
    parser = training_parser("Train a bundled upscaler.", RECIPES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recipe, log, trunk = RECIPES[options.scale], [], None
    if recipe.trunk_steps:
        # Detail is learned faster at x2, where more of it is left; the trunk carries over.
        smaller = ParagonConvConfig(2, recipe.config.features, recipe.config.blocks)
        trunk = train(smaller, recipe, recipe.trunk_steps, options.seed + 1, log)
    model = train(recipe.config, recipe, recipe.steps, options.seed, log, trunk)
    save(model, recipe, options.seed, log, options.output)


if __name__ == "__main__":
    main()
