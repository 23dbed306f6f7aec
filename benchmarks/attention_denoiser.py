"""A small denoiser with each attention module: what it learns in 500 steps, and what that takes.

    python benchmarks/attention_denoiser.py [--steps 500] [--fresh]

Noise of 25/255 on patches of scikit-image's photographs; judged on one that was not trained on.
The networks differ in the attention of two blocks only, and start from the same seed. Seconds are
the processor's, over all steps; the peak is of one step, by the allocator's events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from common import ResultFile
from skimage import data
from torch import Tensor, nn

from lowtide.attention.spatial import (
    ChannelAttention,
    HierarchicalAttention,
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
)
from lowtide.memory.live_peak import live_peak_bytes

CHANNELS, PATCH, BATCH, NOISE = 32, 64, 2, 25 / 255
TRAINED_ON = "astronaut", "coffee", "rocket", "hubble_deep_field", "retina"
MODULES: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "local window, halo": lambda: LocalWindowAttention(CHANNELS),
    "local window, halo, decomposed": lambda: LocalWindowAttention(CHANNELS, position="decomposed"),
    "local window, blended": lambda: LocalWindowAttention(CHANNELS, form="blended"),
    "hierarchical": lambda: HierarchicalAttention(CHANNELS),
    "linear": lambda: LinearAttention(CHANNELS),
    "channel": lambda: ChannelAttention(CHANNELS),
    "transposed": lambda: TransposedAttention(CHANNELS),
}


class Block(nn.Module):
    """Attention and two convolutions, each with a skip connection."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, CHANNELS)
        self.attention = attention
        self.mix = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        """The same shape."""
        if not isinstance(self.attention, nn.Identity):
            image = image + self.attention(self.norm(image))
        return image + self.mix(image)


class Denoiser(nn.Module):
    """From a noisy image in 0..1 to what is to be subtracted from it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.Sequential(Block(make()), Block(make()))
        self.last = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """The clean image."""
        return image - self.last(self.blocks(self.first(image)))


def photograph(name: str) -> Tensor:
    """(3, height, width) in 0..1."""
    pixels = np.asarray(getattr(data, name)())[..., :3]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


def patches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """(noisy, clean) batches without end."""
    images = [photograph(name) for name in TRAINED_ON]

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    while True:
        chosen = []
        for _ in range(BATCH):
            image = images[draw(len(images))]
            top, left = (draw(side - PATCH + 1) for side in image.shape[1:])
            chosen.append(image[:, top : top + PATCH, left : left + PATCH])
        clean = torch.stack(chosen)
        yield clean + NOISE * torch.randn(clean.shape, generator=generator), clean


def train(name: str, steps: int) -> dict[str, object]:
    """One network's training, and how well it does then."""
    torch.manual_seed(0)
    model = Denoiser(MODULES[name])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = patches(torch.Generator().manual_seed(0))
    losses: list[float] = []

    def step() -> None:
        noisy, clean = next(batches)
        loss = F.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    started = time.process_time()
    for _ in range(steps):
        step()
        schedule.step()
    seconds = time.process_time() - started
    peak = live_peak_bytes(step)
    return {
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": round(statistics.mean(losses[:20]), 6),
        "last_loss": round(statistics.mean(losses[steps - 50 : steps]), 6),
        **judged(model),
        "cpu_s": round(seconds, 1),
        "peak_bytes": peak,
    }


def judged(model: nn.Module) -> dict[str, float]:
    """PSNR of a photograph that was not trained on, before and after."""
    clean = photograph("chelsea")[None]
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    noisy = clean + NOISE * noise
    with torch.inference_mode():
        found = model.eval()(noisy)
    model.train()

    def psnr(image: Tensor) -> float:
        return round(float(-10 * (image.clamp(0, 1) - clean).square().mean().log10()), 2)

    return {"noisy_psnr_db": psnr(noisy), "psnr_db": psnr(found)}


def main() -> None:
    """Train what was not trained yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "attention_denoiser",
        fresh=options.fresh,
        packages=["scikit-image"],
        about="A small denoiser with each attention module, trained from scratch.",
    )
    for name in MODULES:
        if not results.has(name):
            results.add(name, **train(name, options.steps))


if __name__ == "__main__":
    main()
