"""What ``ldm4ts_memory.py`` runs in fresh processes: training steps of LDM4TS, and samples."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from common import in_turns
from memory_worker import Pages, warm_up
from torch import Tensor, nn

from lowtide.core.heap import trim_heap
from lowtide.memory.live_peak import live_peak_bytes
from lowtide.memory.tracing.steps import optimizer_state
from lowtide.models.ldm4ts.model import LDM4TSModel
from lowtide.training.task import TrainTask
from lowtide.training.tasks.forecast_config import ForecastConfig
from lowtide.training.tasks.forecasting import make_denoising_task
from lowtide.training.trainer import Trainer

STEPS = 3
# Horizons by image size: the usual one, and those of the documented call.
HORIZONS = {16: [96], 64: [96], 224: [15, 60, 240]}


def config_of(
    side: int, batch: int, backend: str, checkpointing: str, **network: int
) -> ForecastConfig:
    """A configuration whose batch is not cut."""
    return ForecastConfig.from_values(
        {
            "name": "benchmark",
            "horizons": HORIZONS[side],
            "datasets": {
                "train": {"table": "none.csv", "batch_size_per_gpu": batch, "accum_iter": 1}
            },
            "network": {
                "image_size": [side, side],
                "attention_backend": backend,
                "period": 24,
                **network,
            },
            "train": {"total_iter": STEPS, "checkpointing": checkpointing},
        }
    )


class Noise:
    """The same batch again and again."""

    skipped: ClassVar[dict[Path, str]] = {}

    def __init__(self, config: ForecastConfig, model: LDM4TSModel) -> None:
        batch, generator = (
            config.datasets.train.batch_size_per_gpu,
            torch.Generator().manual_seed(0),
        )
        shapes = (config.network.look_back, 1), (config.horizon, 1), model.latent_shape
        self.batch = (
            *(torch.randn(batch, *shape, generator=generator) for shape in shapes),
            (torch.arange(batch) * 37 % config.network.diffusion_steps),
        )

    def prefetch(self, first: int) -> Iterator[tuple[Tensor, ...]]:
        """As `BatchLoader` does it."""
        while True:
            yield self.batch

    def example(self, batch: int) -> tuple[Tensor, ...]:
        """As `BatchLoader` does it."""
        return tuple(one[:batch].to("meta") for one in self.batch)


def task_of(config: ForecastConfig) -> TrainTask:
    """The real task, on noise."""
    network = config.network.model_dump()
    network["frequency"] = network.pop("spectrum")
    model = LDM4TSModel(horizons=config.horizons, **network)
    return make_denoising_task(
        config,
        model,
        Noise(config, model),
        save=lambda path, made: path,
        make_validator=lambda folder, device: None,
        files={},
    )


def peak_of_steps(side: int, batch: int, backend: str, checkpointing: str) -> dict[str, int]:
    """What a training adds to this process, which must be fresh; building it is no peak.

    ``peak_bytes`` is resident memory, ``tensor_bytes`` what PyTorch's allocator gave out of it.
    """
    warm_up(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        # Imports and libraries, by another network of small images.
        run_steps(config_of(16, 2, backend, checkpointing, width=16), folder, Pages())
        trim_heap(collect=True)
        pages = Pages()
        trainer, batches = run_steps(config_of(side, batch, backend, checkpointing), folder, pages)
        network, average = trainer.task.networks["denoiser"], trainer.ema_network
        kept = [*tensors_of_both(network), *tensors_of_both(average), *batches]
        kept += optimizer_state(trainer._networks["denoiser"].optimizer)
        more = live_peak_bytes(lambda: trainer._run_step(batches))
    return {
        "peak_bytes": pages.measured_bytes,
        "high_water_bytes": pages.high_water_bytes,
        "tensor_bytes": sum(one.nbytes for one in kept) + more,
    }


def run_steps(
    config: ForecastConfig, folder: str, pages: Pages
) -> tuple[Trainer, tuple[Tensor, ...]]:
    """A few steps, whose peak ``pages`` has; their trainer and batch."""
    trainer = Trainer(config, Path(folder), task_of(config))
    given = next(trainer.task.data.prefetch(0))
    trim_heap(collect=True)
    with pages:
        for _ in range(STEPS):
            trainer._run_step(given)
    return trainer, given


def tensors_of_both(network: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*network.parameters(), *network.buffers()]


def compare_checkpointing(
    side: int, batch: int, ways: list[str], pairs: int
) -> dict[str, dict[str, Any]]:
    """What a step holds beyond what is there between steps, and its processor seconds."""
    found: dict[str, dict[str, Any]] = {way: {"cpu_s": []} for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        trainers: dict[str, Trainer] = {}
        for way in ways:
            config = config_of(side, batch, "default", way)
            trainer = trainers[way] = Trainer(config, Path(folder) / way, task_of(config))
            given = next(trainer.task.data.prefetch(0))
            trainer._run_step(given)  # makes the optimizer's state
            found[way]["activations_bytes"] = live_peak_bytes(
                lambda trainer=trainer, given=given: trainer._run_step(given)
            )
        for _, way in in_turns(ways, pairs):
            started = time.process_time()
            trainers[way]._run_step(given)
            found[way]["cpu_s"].append(round(time.process_time() - started, 4))
        weights = [list(trainer.ema_network.parameters()) for trainer in trainers.values()]
    for way, own in zip(ways, weights, strict=True):
        pairs_of = zip(own, weights[0], strict=True)
        found[way]["max_weight_difference"] = max((a - b).abs().max().item() for a, b in pairs_of)
    return found


def sampling_bytes(side: int, counts: list[int]) -> dict[str, int]:
    """Peaks of drawing samples for one window, less the samples themselves."""
    model = LDM4TSModel((side, side), HORIZONS[side]).eval()
    window = torch.randn(model.config.look_back, 1, generator=torch.Generator().manual_seed(0))
    found = {}
    for count in (counts[0], *counts):  # the first one sets libraries up
        result = 4 * count * model.config.horizon
        peak = live_peak_bytes(
            lambda count=count: model.sample_residuals(window, count, seed=0, steps=2)
        )
        found[str(count)] = peak - result
    return found
