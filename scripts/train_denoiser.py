"""Train the bundled denoiser, from photographs out of scikit-image.

    nice -n 15 python scripts/train_denoiser.py --steps 7500
    nice -n 15 python scripts/train_denoiser.py --start 7500 --steps 9000

Samples are patches of `photographs.PHOTOS` at several sizes with noise of a sigma up to 60 of 255
at mid-gray: half of them Gaussian, half Poisson-Gaussian; a quarter clipped to 8 bits as a camera's
file is, half of them gray; from step 7500 on a fifth have an area of one color. Every number is
drawn by Philox from (seed, step). The second line goes on from the weights of the first, with its
learning rate anew. Then
``lowtide-denoise.safetensors``, its log and its card are written into the package's weights folder
(or ``--output``), and the hash to pin in `lowtide.models.bundled` is printed. Nothing held out is
read before that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from photographs import PHOTOS, SHRINK, TUNING, photograph
from safetensors.torch import save as to_safetensors
from torch import Tensor
from train_bundled import sorted_header

import lowtide.models
from lowtide.core.philox import philox
from lowtide.models import lowtide_files
from lowtide.models.denoiser.denoiser import Denoiser, preconditioning
from lowtide.models.denoiser.noise_models import MID_GRAY, PoissonGaussianNoise
from lowtide.models.denoiser.slim_unet import SlimUNet
from lowtide.models.denoiser.slim_unet_config import SlimUNetConfig
from lowtide.models.resample import resize_cubic
from lowtide.training.ema import MovingAverage

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
LOG_EVERY = 100
SCORED = (10, 15, 25, 50)


class Samples:
    """Clean patches and noise, a function of seed and step."""

    def __init__(self) -> None:
        self.pictures = []
        for name in PHOTOS:
            photo = photograph(name)
            for share in SHRINK:
                size = [round(side * share) for side in photo.shape[:2]]
                if min(size) >= PATCH:
                    self.pictures.append(resize_cubic(photo, *size))
        areas = np.array([one.size for one in self.pictures], float)
        self.shares = areas / areas.sum()

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return clean and noisy (B, C, H, W) in -1..1, noise levels (B,) of that range.

        And the shares of shot noise (B, 1).
        """
        draw = philox(SEED, 0, step, 0)
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


def loss_of(
    network: SlimUNet, clean: Tensor, noisy: Tensor, sigma: Tensor, share: Tensor
) -> Tensor:
    """Return the mean squared error of the clean image, relative to the noise.

    At a tenth of the noise the best error is about a tenth too, so that all levels count alike.
    """
    terms = [preconditioning(CONFIG.prediction, level) for level in sigma.tolist()]
    shrunk, kept, made = torch.tensor(terms)[..., None, None, None].unbind(1)
    found = network(
        (noisy * shrunk).contiguous(memory_format=torch.channels_last),
        network.modulation(sigma, share),
    )
    errors = (kept * noisy + made * found - clean).square().mean((1, 2, 3))
    return (errors / (sigma + 0.01)).mean()


def rate_at(step: int, steps: int) -> float:
    """Return the share of the learning rate: a warm-up, level, and a linear decay at the end."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return min(1, (steps - step) / (steps * COOLDOWN))


def train(
    steps: int, start: int = 0, state: dict[str, Tensor] | None = None
) -> tuple[SlimUNet, list[dict[str, float]]]:
    """Train from step ``start`` on, and return the averaged network and the log."""
    torch.manual_seed(SEED)
    network = SlimUNet(CONFIG)
    if state is not None:
        network.load_state_dict(state)
    network = network.to(memory_format=torch.channels_last)
    average, samples, log = MovingAverage(network), Samples(), []
    optimizer = torch.optim.AdamW(
        network.parameters(), RATE, betas=(0.9, 0.99), weight_decay=WEIGHT_DECAY
    )
    total, started = 0.0, time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(step, steps)
        loss = loss_of(network, *samples.batch(start + step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_LIMIT)
        optimizer.step()
        average.update(network, min(DECAY, step / (step + 10)))
        total += loss.item()
        if (step + 1) % LOG_EVERY == 0:
            seconds = round(time.process_time() - started, 1)
            log.append(
                {"step": start + step + 1, "loss": total / LOG_EVERY, "cpu_seconds": seconds}
            )
            print(log[-1], flush=True)
            total = 0.0
    module = average.module
    assert isinstance(module, SlimUNet)
    return module, log


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
            noise = philox(SEED, 1, sigma, 0).standard_normal(clean.shape)
            noisy = clean + noise * sigma / 255
            image = torch.from_numpy(np.float32(noisy)).permute(2, 0, 1)[None].expand(-1, 3, -1, -1)
            denoiser.set_level(sigma / 255, (0.0,))
            rows.append((name, sigma, psnr(noisy, clean), psnr(run(denoiser, image), clean)))
    return rows


@torch.no_grad()
def run(denoiser: Denoiser, image: Tensor) -> np.ndarray:
    """Denoise (1, 3, H, W), and return (H, W, 3) in 0..1."""
    from lowtide.models.loaded_model import pad

    height, width = image.shape[2:]
    made = denoiser(pad(image, CONFIG.size))[0, :, :height, :width].clamp(0, 1)
    return made.permute(1, 2, 0).numpy()


def card(denoiser: Denoiser, made_by: str, log: list[dict[str, float]], digest: str) -> str:
    """The model card, in Markdown."""
    parameters = sum(one.numel() for one in denoiser.parameters())
    photos = "\n".join(f"- `{name}`: {source}" for name, source in PHOTOS.items())
    held = "\n".join(f"- `{name}`: {source}" for name, source in TUNING.items())
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

{photos}

Held out, of scikit-image:

{held}

## Training

Made by {made_by} with PyTorch {torch.__version__}, in about
{log[-1]["cpu_seconds"] / 60:.0f} minutes of one CPU core: seed {SEED}, batch {BATCH}, patches of
{PATCH} pixels, AdamW at {RATE:g} with a linear decay over the last {COOLDOWN:.0%} of each run, squared
error of the clean image relative to the noise level, weights averaged with a decay of {DECAY}. Each
photograph at sizes from {SHRINK[0]:g} to {SHRINK[-1]:g}, turned, mirrored, of several contrasts and
other colors; {GRAY:.0%} of the samples gray, {1 - GAUSSIAN:.0%} with a share of shot noise,
{CLIPPED:.0%} clipped to 8 bits, from step {FLAT_FROM:,} on {FLAT:.0%} with an area of one color. The log lies in the same folder.

## Scores on the held-out photographs

PSNR in dB, Gaussian noise that is not clipped, the level given:

| photograph | sigma | noisy | {NAME} |
|---|---|---|---|
{table}
"""


def keep(network: SlimUNet, start: int, log: list[dict[str, float]], folder: Path) -> None:
    """Write weights, log and card."""
    path = folder / f"{NAME}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    denoiser = Denoiser(CONFIG)
    denoiser.unet.load_state_dict(network.state_dict())
    state = {name: one.half().contiguous() for name, one in denoiser.state_dict().items()}
    blob = sorted_header(to_safetensors(state, lowtide_files.metadata_for(CONFIG)))
    path.write_bytes(blob)
    digest = hashlib.sha256(blob).hexdigest()
    lines = "".join(json.dumps(row) + "\n" for row in log)
    path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
    denoiser = lowtide.models.load(path).module
    assert isinstance(denoiser, Denoiser)
    runs = [f"--steps {start}", f"--start {start} --steps {round(log[-1]['step']) - start}"]
    made_by = " and ".join(
        f"`scripts/train_denoiser.py {one}`" for one in (runs if start else runs[1:])
    )
    text = card(denoiser, made_by, log, digest)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text[text.index("## Scores") :])
    print(f"{path.name}: {path.stat().st_size} bytes, sha256 {digest}")


def main() -> None:
    """Train, and keep what was trained."""
    parser = argparse.ArgumentParser(description="Train the bundled denoiser.")
    parser.add_argument("--steps", type=int, default=7500)
    parser.add_argument(
        "--start", type=int, default=0, help="go on from the packaged weights of so many steps"
    )
    weights = Path(lowtide.models.__file__).parent / "weights"
    parser.add_argument("--output", type=Path, default=weights, help="folder to write into")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state, before = None, []
    if options.start:
        earlier = lowtide.models.load(weights / f"{NAME}.safetensors").module
        assert isinstance(earlier, Denoiser)
        state = earlier.unet.state_dict()
        before = [json.loads(line) for line in (weights / f"{NAME}.jsonl").open(encoding="utf-8")]
        if before[-1]["step"] != options.start:
            parser.error(f"the packaged weights have {before[-1]['step']} steps")
    network, log = train(options.steps, options.start, state)
    for row in log:
        row["cpu_seconds"] += before[-1]["cpu_seconds"] if before else 0
    keep(network, options.start, before + log, options.output)


if __name__ == "__main__":
    main()
