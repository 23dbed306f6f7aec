"""Train the bundled denoiser of pictures as people have them.

    nice -n 19 python scripts/train_photo_denoiser.py --folder FOLDER

Photographs are those of `train_photo.py`, at several sizes. Noise is white, of a camera's mosaic
that was demosaiced, in blotches, or hardly there, and then coded as a JPEG or rounded; the network
is told its levels in Haar bands, a little wrong. ``FOLDER/state.pt`` has all that a training goes
on with after it was stopped: what a step sees depends on its number alone. At the end, or of the
state as it is with ``--stage``, ``lowtide-photo-denoise.safetensors``, its log and its card are
written into the package's weights folder (or ``--output``), and the hash to pin in
`lowtide.models.bundled` is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from camera_noise import as_8_bits, as_jpeg, developed, normal, resized, shared
from photo_denoiser_card import BATCH, CONFIG, DECAY, NAME, PATCH, RATE, SEED, card, scores
from torch import Tensor
from train_bundled import write_weights
from train_photo import training_pictures

from lowtide.models.denoiser.finite_denoiser import FiniteDenoiser, haar_levels

STEPS, WARM_UP = 6500, 500
EVERY, SCORE_EVERY = 100, 1000  # steps
# Pixels around a patch, the least side of a photograph, and the most of one that is made smaller.
MARGIN, LEAST_SIDE, MOST_SIDE = 16, 160, 152
LEAST_LEVEL = 0.2 / 255  # that the network is told


class Samples:
    """Patches with noise and without, by the number of a step."""

    def __init__(self, folder: Path) -> None:
        self._photos = [
            torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
            for _, image in training_pictures(folder / "photographs")
            if min(image.shape[:2]) >= LEAST_SIDE
        ]
        areas = np.array([float(photo[0].numel()) for photo in self._photos]) ** 0.75
        self._shares = areas / areas.sum()

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy and clean (B, 3, H, W), and the levels (B, 6) that the network is told."""
        draw = np.random.default_rng([SEED, step])
        pairs = [self._pair(draw) for _ in range(BATCH)]
        noisy, clean = (torch.stack(side) for side in zip(*pairs, strict=True))
        levels = haar_levels(noisy - clean)
        far, high = draw.random((BATCH, 1)) < 0.12, draw.uniform(1, 1.7, (BATCH, 1))
        errors = np.where(far, high, np.exp(0.12 * draw.standard_normal((BATCH, 1))))
        errors = errors * np.exp(0.08 * draw.standard_normal((BATCH, 6)))
        levels = (levels * torch.from_numpy(errors).float()).clamp_min(LEAST_LEVEL)
        return noisy.contiguous(memory_format=torch.channels_last), clean, levels

    def _pair(self, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
        side, kind = PATCH + 2 * MARGIN, draw.random()
        share = draw.uniform(0.5, 0.95) if kind > 0.35 and draw.random() < 0.25 else 1.0
        full = min(math.ceil(side / share / 2) * 2, MOST_SIDE) if share < 1 else side
        clean = self._clean(draw, full)
        sigma = float(draw.uniform(0, 55) if draw.random() < 0.6 else draw.uniform(0, 20)) / 255
        if kind < 0.40:
            noisy = _white(clean, sigma, draw)
        elif kind < 0.75:
            noisy, clean = developed(clean, sigma, draw)
        elif kind < 0.90:
            noisy = shared(clean, min(sigma, 35 / 255), draw)
        else:
            noisy = clean
            if draw.random() < 0.6:
                noisy = clean + draw.uniform(0, 2.5) / 255 * normal(draw, *clean.shape)
        if share < 1:
            size = max(side, round(full * share))
            noisy, clean = resized(noisy, size), resized(clean, size)
        clean = clean.clamp(0, 1)
        if draw.random() < (0.25 if kind < 0.40 else 0.6):
            noisy = as_jpeg(noisy, int(draw.integers(45, 98)), full_color=draw.random() < 0.25)
        elif draw.random() < 0.6:
            noisy = as_8_bits(noisy)
        top, left = (int(at) for at in draw.integers(0, noisy.shape[1] - PATCH + 1, size=2))
        rows, columns = slice(top, top + PATCH), slice(left, left + PATCH)
        return noisy[:, rows, columns], clean[:, rows, columns]

    def _clean(self, draw: np.random.Generator, side: int) -> Tensor:
        """A part (3, ``side``, ``side``) of a photograph, of many colors and contrasts."""
        if draw.random() < 0.08:
            return _flat_fields(draw, side)
        photo = self._photos[draw.choice(len(self._photos), p=self._shares)]
        top, left = (int(draw.integers(length - side + 1)) for length in photo.shape[1:])
        image = photo[:, top : top + side, left : left + side].float() / 255
        image = torch.rot90(image, int(draw.integers(4)), (1, 2))
        if draw.integers(2):
            image = image.flip(2)
        image = _other_colors(image, draw)
        if draw.random() < 0.25:
            contrast = draw.uniform(0.4, 1)
            image = image * contrast + (1 - contrast) * draw.random()
        if draw.random() < 0.15:
            image = image ** draw.uniform(0.7, 1.6)
        return image.contiguous()


def _white(clean: Tensor, sigma: float, draw: np.random.Generator) -> Tensor:
    """White noise, at times not alike in all colors, and at times stronger where it is bright."""
    deviation = torch.full((3, 1, 1), sigma)
    if draw.random() < 0.2:
        deviation = deviation * torch.from_numpy(draw.uniform(0.4, 1.6, (3, 1, 1))).float()
    noise = normal(draw, *clean.shape) * deviation
    if draw.random() < 0.15:
        noise = noise * (0.3 + clean).sqrt()
    return clean + noise


def _flat_fields(draw: np.random.Generator, side: int) -> Tensor:
    """One color or a ramp between two, saturated ones too, with rectangles of others."""
    extreme = draw.random() < 0.4
    values = draw.choice([0.0, 0.03, 0.97, 1.0], (4, 3)) if extreme else draw.random((4, 3))
    colors = torch.from_numpy(values).float()[..., None, None]
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angle = draw.uniform(0, 2 * math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)
    along = (along - along.min()) / (along.max() - along.min()) * (draw.random() < 0.5)
    image = colors[0] + (colors[1] - colors[0]) * along
    if draw.random() < 0.7:
        for color in colors[2:]:
            top, left = draw.integers(side, size=2)
            height, width = draw.integers(1, side // 2, size=2)
            image[:, top : top + height, left : left + width] = color
    return image.contiguous()


def _other_colors(image: Tensor, draw: np.random.Generator) -> Tensor:
    """Colors mixed, exchanged, gone, stronger, or as they are."""
    kind = draw.random()
    if kind < 0.35:
        mix = torch.from_numpy(draw.exponential(size=(3, 3))).float()
        return torch.einsum("ij,jhw->ihw", mix / mix.sum(1, keepdim=True), image)
    if kind < 0.5:
        return image[torch.from_numpy(draw.permutation(3))]
    gray = image.mean(0, keepdim=True)
    if kind < 0.6:
        return gray.expand(3, -1, -1)
    return (gray + (image - gray) * draw.uniform(1, 2.5)).clamp(0, 1) if kind < 0.7 else image


def run(denoiser: FiniteDenoiser, noisy: Tensor, levels: Tensor) -> Tensor:
    """Denoise (B, 3, H, W), each image told its own levels (B, 6)."""
    strongest = levels.amax(1)[:, None, None, None]
    return noisy - strongest * denoiser.unet(noisy - 0.5, levels[:, :, None, None])


def train(folder: Path, steps: int) -> None:
    """Train up to so many steps, from where ``folder`` has it."""
    torch.manual_seed(0)
    model, average = (FiniteDenoiser(CONFIG) for _ in range(2))
    model = model.to(memory_format=torch.channels_last)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    path, start, began = folder / "state.pt", 0, time.process_time()
    if path.is_file():
        state = torch.load(path, weights_only=True)
        model.unet.load_state_dict(state["model"])
        average.unet.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    samples, total = Samples(folder), 0.0
    for step in range(start, steps):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (0.01 + 0.99 * cosine)
        noisy, clean, levels = samples.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            made = run(model, noisy, levels)
        weight = 1 / (levels.amax(1)[:, None, None, None] + 0.02).sqrt()
        loss = ((made.float() - clean).abs() * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 1 - min(DECAY, step / (step + 10)))
        total += loss.item()
        if (step + 1) % EVERY == 0:
            row: dict[str, Any] = {"step": step + 1, "loss": round(total / EVERY, 5)}
            row["cpu_seconds"] = round(time.process_time() - began)
            if (step + 1) % SCORE_EVERY == 0:
                row |= {name: round(after, 2) for name, (_, after) in scores(average).items()}
            total = 0.0
            with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            save(path, model, average, optimizer, step + 1)


def save(
    path: Path,
    model: FiniteDenoiser,
    average: FiniteDenoiser,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    """Write the state of a training, whole or not at all."""
    state = {"model": model.unet.state_dict(), "average": average.unet.state_dict()}
    part = path.with_suffix(".part")
    torch.save(state | {"optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def stage(folder: Path, output: Path) -> None:
    """Write weights and card of a training, finished or not, and its log where it has one."""
    state = torch.load(folder / "state.pt", weights_only=True)
    path = output / f"{NAME}.safetensors"
    weights = {f"unet.{name}": one.half() for name, one in state["average"].items()}
    digest = write_weights(path, weights, CONFIG)
    denoiser = FiniteDenoiser(CONFIG).eval()
    denoiser.load_state_dict(weights)
    path.with_suffix(".md").write_text(card(denoiser, state["step"], digest), encoding="utf-8")
    if (log := folder / "log.jsonl").is_file():
        rows = [json.loads(line) for line in log.open(encoding="utf-8")]
        kept = [row for row in rows if row["step"] % SCORE_EVERY == 0]
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    """Train, and keep what was trained."""
    parser = argparse.ArgumentParser(description="Train the bundled denoiser of pictures.")
    parser.add_argument("--folder", type=Path, default=Path("demo") / "photo")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stage", action="store_true", help="keep the weights so far")
    default = Path(__file__).parents[1] / "src/lowtide/models/weights"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    if not options.stage:
        train(options.folder, options.steps)
    stage(options.folder, options.output)


if __name__ == "__main__":
    main()
