"""Train a denoiser of photographs within a budget: the job of `lowtide train denoise`."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from lowtide.attention.backends import get_backend
from lowtide.attention.spec import LocalDevice
from lowtide.jobs.denoise.validation import DenoiseValidator
from lowtide.jobs.train.run import RunOptions, TrainReport, run_training
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.batches import BatchLoader
from lowtide.training.data.photographs import PhotographFolders
from lowtide.training.distributed import ProcessGroup
from lowtide.training.state import collect_file_facts
from lowtide.training.task import TrainTask, Validator
from lowtide.training.tasks.denoise_config import (
    CleanPicturesSection,
    DenoiseConfig,
    PhotographDataSection,
)
from lowtide.training.tasks.denoising import (
    NoiseModelSampler,
    NoisyPatches,
    denoiser_network_config,
    make_denoiser_task,
    noise_model_sampler,
    uses_linear_light,
)


def train_denoise(
    config: str | Path | DenoiseConfig,
    output: str | Path = "experiments",
    **options: Unpack[RunOptions],
) -> TrainReport:
    """Train the denoiser of ``config`` in ``output``/name, whose weights `lowtide.denoise` takes.

    With a table of ``datasets.train.noise`` the weights' file names the camera and the table, and
    denoising needs that same table. Resuming, budgets and processes are as in `train_sr`.

    Args:
        config: A configuration, or its file.
        output: Parent of the run's folder.
        options: As `RunOptions`.

    Raises:
        UsageError, InputError: The configuration, the photographs or the table cannot be used, or
            the folder holds files that are not of a training of that name.
        BudgetError: No split of the batch fits the budget.
        OutputError: A file cannot be written.
        NotFiniteError: A loss or a gradient is not finite.
        Cancelled: ``cancel`` was set.
    """
    chosen = config if isinstance(config, DenoiseConfig) else DenoiseConfig.from_file(config)
    report = run_training(chosen, make_denoise_task, output, **options)
    if report.status == "done":
        report.warnings += _attention_notes(chosen, report.device)
    return report


def make_denoise_task(config: DenoiseConfig, processes: ProcessGroup) -> TrainTask:
    """Build the task of a configuration, with the data of one of ``processes``."""
    data, noise = config.datasets.train, noise_model_sampler(config.datasets.train)
    network = denoiser_network_config(config, noise)
    photographs = _open(data, data, noise, gray=_gray_share(config))
    batches = BatchLoader(
        NoisyPatches(photographs, noise, config),
        batch=data.batch_size_per_gpu * processes.world_size,
        shard=(processes.rank, processes.world_size),
        seed=config.manual_seed,
        workers=data.num_worker_per_gpu,
        skip_broken=data.skip_broken,
    )

    def make_validator(folder: Path, device: str) -> Validator | None:
        if config.datasets.val is None:
            return None
        pictures = _open(config.datasets.val, data, noise, gray=_gray_share(config, whole=True))
        return DenoiseValidator(config, pictures, noise, folder, device)

    files = collect_file_facts(photographs.files())
    if noise.table is not None:
        ((path, facts),) = collect_file_facts([Path(data.noise)]).items()
        # By its content: another table of the same size would be another training.
        files[f"{path} ({noise.table.sha256[:12]})"] = facts
    return make_denoiser_task(config, network, batches, make_validator=make_validator, files=files)


def _open(
    folders: PhotographDataSection | CleanPicturesSection,
    data: PhotographDataSection,
    noise: NoiseModelSampler,
    gray: float,
) -> PhotographFolders:
    return PhotographFolders(
        folders.dataroot_gt,
        gray=gray,
        linear=uses_linear_light(data, noise),
        cfa=data.cfa,
        augmentation=Augmentation(data.use_hflip, data.use_rot, data.color),
    )


def _gray_share(config: DenoiseConfig, *, whole: bool = False) -> float:
    """Return the share of gray patches: all of them in a network of one channel."""
    if config.network.channels == 1:
        return 1.0
    return 0.0 if whole else config.datasets.train.gray


def _attention_notes(config: DenoiseConfig, device: str) -> list[str]:
    """Return a sentence on attention that is not installed."""
    if config.network.attention != "flash":
        return []
    import torch

    missing = get_backend("flash2").missing_requirement(LocalDevice.of(torch.device(device)))
    if missing is None:
        return []
    return [f"attention flash: {missing.reason}; fused SDPA ran instead ({missing.fix})"]
