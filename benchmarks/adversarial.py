"""An adversarial training on photographs: its losses, and what each branch adds.

    python benchmarks/adversarial.py [--steps 300] [--fresh]

ParagonSR2 nano ×2 with MUNet, by the trainer of `lowtide train sr`, on scikit-image's photographs.
A row for each kind of adversarial loss, with the losses of generator and discriminator every ten
steps (means of these) and whether all of them, and all weights at the end, are finite. Also, before
the training and after it, how the generator's gradient of that loss changes when one branch of
MUNet is removed: the norm of the difference, as a share of the whole gradient's norm.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from attention_helps import write_photographs
from common import ResultFile
from torch import Tensor, nn

from lowtide.models.paragonsr2.munet import BRANCHES, MUNet
from lowtide.training.data.batches import BatchLoader
from lowtide.training.data.degrade import bicubic_downscale
from lowtide.training.data.pairs import HighResolutionFolders, PatchSamples
from lowtide.training.losses.gan import generator_loss
from lowtide.training.setup import make_discriminator, make_generator
from lowtide.training.tasks.sr_config import SrConfig
from lowtide.training.tasks.super_resolution import make_pairs_task
from lowtide.training.train_log import read_log
from lowtide.training.trainer import Trainer

# Kinds of the adversarial loss, and the penalty that the last one is published with.
KINDS: dict[str, dict[str, Any]] = {"vanilla": {}, "hinge": {}, "r3gan": {"r1_weight": 1.0}}
SCALE, PATCH, BATCH, EVERY = 2, 24, 4, 10


def config_of(kind: str, folder: Path, steps: int) -> SrConfig:
    """Pixels and the opponent, from the first step on."""
    gan = {"type": "ganloss", "gan_type": kind, "loss_weight": 0.1, **KINDS[kind]}
    return SrConfig.from_values(
        {
            "name": kind,
            "scale": SCALE,
            "datasets": {
                "train": {
                    "dataroot_gt": str(folder),
                    "lq_size": PATCH,
                    "batch_size_per_gpu": BATCH,
                }
            },
            "network_g": {"type": "paragonsr2_nano", "attention": "window"},
            "network_d": {"type": "munet"},
            "train": {"total_iter": steps, "losses": [{"type": "l1loss"}, gan]},
            "logger": {"print_freq": EVERY, "save_checkpoint_freq": steps},
        }
    )


def changes(generator: nn.Module, opponent: nn.Module, kind: str, batch: Any) -> dict[str, float]:
    """By branch, how much the generator's gradient changes without it."""
    assert isinstance(opponent, MUNet)
    low, high = batch
    weights = [one for one in generator.parameters() if one.requires_grad]

    def gradient(without: str | None) -> Tensor:
        made = generator(low)
        found = opponent.branches(made)
        found = {name: one.detach() if name == without else one for name, one in found.items()}
        loss = generator_loss(kind, opponent.fuse(found, made), opponent(high))
        parts = torch.autograd.grad(loss, weights, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    whole = gradient(None)
    return {
        name: round(((gradient(name) - whole).norm() / whole.norm()).item(), 4) for name in BRANCHES
    }


def trained(kind: str, photos: Path, steps: int) -> dict[str, Any]:
    """One training, and what was seen."""
    config = config_of(kind, photos, steps)
    generator = make_generator(config.network_g, SCALE, 0)
    opponent = make_discriminator(config.network_d, 0)
    pictures = HighResolutionFolders([photos], SCALE, bicubic_downscale)
    data = BatchLoader(PatchSamples(pictures, PATCH), batch=BATCH, seed=0)
    held = data.at(steps)
    before = changes(generator, opponent, kind, held)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        task = make_pairs_task(config, generator, data, opponent)
        Trainer(config, Path(folder), task).run()
        rows = read_log(Path(folder))
    seconds = time.process_time() - started
    figures = [value for row in rows for value in row.values() if isinstance(value, float)]
    weights = [*generator.parameters(), *opponent.parameters()]
    return {
        "kind": kind,
        "steps": steps,
        "cpu_s": round(seconds, 1),
        "losses": rows,
        "finite": all(map(math.isfinite, figures))
        and all(bool(one.isfinite().all()) for one in weights),
        "without_branch": {"before": before, "after": changes(generator, opponent, kind, held)},
    }


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "adversarial",
        fresh=options.fresh,
        packages=("accelerate", "scikit-image"),
        about="Adversarial trainings on photographs: losses, and what each branch tells.",
    )
    with tempfile.TemporaryDirectory() as place:
        photos = Path(place) / "photos"
        write_photographs(photos, Path(place) / "held_out")
        for kind in KINDS:
            row = f"nano ×{SCALE} with MUNet, {kind}, {options.steps} steps"
            if not results.has(row):
                results.add(row, **trained(kind, photos, options.steps))


if __name__ == "__main__":
    main()
