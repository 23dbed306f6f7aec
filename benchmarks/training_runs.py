"""What ``training_memory.py`` runs in fresh processes: steps of the trainer, and validations."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from common import in_turns
from torch import Tensor, nn

import lowtide
from lowtide.core.metrics import psnr_y
from lowtide.jobs.upscale.validation import UpscaleValidator
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.models.resample import resize_cubic
from lowtide.training.data.degrade import bicubic_downscale
from lowtide.training.data.image_cache import read_rgb
from lowtide.training.data.pairs import HighResolutionFolders
from lowtide.training.setup import make_discriminator, make_generator, save_weights
from lowtide.training.task import TrainTask
from lowtide.training.tasks.sr_config import SrConfig
from lowtide.training.tasks.super_resolution import make_pairs_task
from lowtide.training.trainer import Trainer

SCALE, STEPS = 2, 3
# Small enough that libraries are set up by it and nothing of its size is kept.
_TINY = {"lq_size": 16, "batch_size_per_gpu": 2}
_GAN = {"type": "ganloss", "loss_weight": 0.1}
# Of each configuration: the generator, patch, batch, checkpointing, and the adversarial loss.
CONFIGURATIONS: dict[str, tuple[str, int, int, str, dict[str, Any] | None]] = {
    "nano": ("nano", 64, 16, "none", None),
    "tiny": ("tiny", 64, 8, "none", None),
    "s": ("s", 64, 4, "none", None),
    "s, full checkpointing": ("s", 64, 4, "full", None),
    "tiny with MUNet": ("tiny", 32, 4, "none", _GAN),
    "tiny with MUNet and R1": ("tiny", 32, 4, "none", {**_GAN, "r1_weight": 1.0}),
    "s with MUNet, full checkpointing": ("s", 32, 4, "full", _GAN),
    "m": ("m", 32, 4, "none", None),
}


def config_of(title: str, checkpointing: str = "", **data: Any) -> SrConfig:
    """A configuration by its name, whose batch is not cut; ``data`` is changed in its patches."""
    name, patch, batch, kept, gan = CONFIGURATIONS[title]
    losses: list[dict[str, Any]] = [{"type": "l1loss"}]
    patches = {"lq_size": patch, "batch_size_per_gpu": batch, "accum_iter": 1}
    return SrConfig.from_values(
        {
            "name": "benchmark",
            "scale": SCALE,
            "datasets": {"train": {"dataroot_gt": "none", **patches, **data}},
            "network_g": {"type": f"paragonsr2_{name}", "attention": "window"},
            **({"network_d": {"type": "munet"}} if gan else {}),
            "train": {
                "total_iter": STEPS,
                "losses": losses + ([gan] if gan else []),
                "checkpointing": checkpointing or kept,
            },
        }
    )


class Noise:
    """The same batch again and again."""

    skipped: ClassVar[dict[Path, str]] = {}

    def __init__(self, config: SrConfig) -> None:
        data = config.datasets.train
        side, generator = SCALE * data.lq_size, torch.Generator().manual_seed(0)
        self.high = torch.rand(data.batch_size_per_gpu, 3, side, side, generator=generator)
        self.low = nn.functional.avg_pool2d(self.high, SCALE)

    def prefetch(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `BatchLoader` does it."""
        while True:
            yield self.low, self.high

    def example(self, batch: int) -> tuple[Tensor, Tensor]:
        """As `BatchLoader` does it."""
        return self.low[:batch].to("meta"), self.high[:batch].to("meta")


def task_of(config: SrConfig) -> TrainTask:
    """The real task, on noise."""
    generator = make_generator(config.network_g, config.scale, 0)
    discriminator = make_discriminator(config.network_d, 0) if config.network_d else None
    return make_pairs_task(config, generator, Noise(config), discriminator)


def trainer_of(config: SrConfig, folder: str) -> Trainer:
    """The real trainer."""
    return Trainer(config, Path(folder), task_of(config))


_warm: list[str] = []


def run_steps(title: str) -> None:
    """A few steps; the first call, which is not measured, takes tiny patches."""
    data: dict[str, Any] = {} if _warm else _TINY
    _warm.append(title)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(config_of(title, **data), folder).run()


def compare_checkpointing(title: str, ways: list[str], pairs: int) -> dict[str, dict[str, Any]]:
    """What a step holds beyond what is there between steps, and its processor seconds."""
    found: dict[str, dict[str, Any]] = {way: {"cpu_s": []} for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {way: trainer_of(config_of(title, way), f"{folder}/{way}") for way in ways}
        batch = Noise(config_of(title))
        for way, trainer in trainers.items():
            trainer._run_step((batch.low, batch.high))  # makes the optimizer's state
            found[way]["activations_bytes"] = live_peak_bytes(
                lambda trainer=trainer: trainer._run_step((batch.low, batch.high))
            )
        for _, way in in_turns(ways, pairs):
            started = time.process_time()
            trainers[way]._run_step((batch.low, batch.high))
            found[way]["cpu_s"].append(round(time.process_time() - started, 4))
        weights = [list(trainer.ema_network.parameters()) for trainer in trainers.values()]
    for way, own in zip(ways, weights, strict=True):
        pairs_of = zip(own, weights[0], strict=True)
        found[way]["max_weight_difference"] = max((a - b).abs().max().item() for a, b in pairs_of)
    return found


def validate(name: str, photos: str, folder: str, budget: str) -> dict[str, float]:
    """Scores of a network by the trainer's own validation."""
    config = SrConfig.from_values(
        {
            "name": "benchmark",
            "scale": SCALE,
            "datasets": {"train": {"dataroot_gt": photos}, "val": {"dataroot_gt": photos}},
            "network_g": {"type": f"paragonsr2_{name}", "attention": "window"},
            "train": {"total_iter": 1},
            "val": {"budget": budget},
        }
    )
    data = HighResolutionFolders([Path(photos)], SCALE, bicubic_downscale)
    return UpscaleValidator(config, data, Path(folder), "cpu")(
        make_generator(config.network_g, config.scale, 0), 1
    )


def validate_whole(name: str, photos: str, folder: str) -> dict[str, float]:
    """The same score of the picture run at once."""
    import pyvips

    (path,) = Path(photos).iterdir()
    config = config_of(name)
    weights = save_weights(
        Path(folder) / "whole.safetensors",
        make_generator(config.network_g, config.scale, 0),
        config,
    )
    high = read_rgb(path)
    small, large = (Path(folder) / f"{word}.png" for word in ("small", "large"))
    low = resize_cubic(high, *(side // SCALE for side in high.shape[:2]))
    pyvips.Image.new_from_array(low).pngsave(str(small))
    lowtide.upscale(
        small, large, model=str(weights), strategy="whole", device="cpu", force=True
    ).raise_for_failures()
    return {"psnr": psnr_y(read_rgb(large), high, SCALE)}
