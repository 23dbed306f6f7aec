"""Train a super-resolution model within a budget: the job of `lowtide train sr`."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from lowtide.core.errors import UsageError
from lowtide.jobs.train.run import RunOptions, TrainReport, run_training
from lowtide.jobs.upscale.validation import TrainImages, UpscaleValidator
from lowtide.training.data.augment import Augmentation
from lowtide.training.data.batches import BatchLoader
from lowtide.training.data.degrade import PhotoDegradation, RealDegradation, bicubic_downscale
from lowtide.training.data.pairs import HighResolutionFolders, PairedImageFolders, PatchSamples
from lowtide.training.distributed import ProcessGroup
from lowtide.training.setup import load_pretrained, make_discriminator, make_generator
from lowtide.training.state import collect_file_facts
from lowtide.training.task import TrainTask, Validator
from lowtide.training.tasks.sr_config import PairFoldersSection, SrConfig, SrTrainDataSection
from lowtide.training.tasks.super_resolution import make_pairs_task


def train_sr(
    config: str | Path | SrConfig,
    output: str | Path = "experiments",
    **options: Unpack[RunOptions],
) -> TrainReport:
    """Train the super-resolution model of ``config`` in ``output``/name.

    Resumes a stopped run of the same configuration from its newest valid state. The batch is split
    into as many parts as ``budget`` requires. Processes started by ``torchrun`` or ``accelerate
    launch`` take a batch each, within ``budget`` each, and a step covers the batches of all; the
    first one writes, validates and reports.

    Args:
        config: A configuration, or its file.
        output: Parent of the run's folder.
        options: As `RunOptions`.

    Raises:
        UsageError, InputError: The configuration or data cannot be used, or the folder holds
            files that are not of a training of that name; raised before the first step where
            possible.
        BudgetError: No split of the batch fits the budget.
        OutputError: A file cannot be written.
        NotFiniteError: A loss or a gradient is not finite.
        Cancelled: ``cancel`` was set.
    """
    chosen = config if isinstance(config, SrConfig) else SrConfig.from_file(config)
    return run_training(chosen, make_sr_task, output, **options)


def make_sr_task(config: SrConfig, processes: ProcessGroup) -> TrainTask:
    """Build the task of a configuration, with the data of one of ``processes``."""
    images = _open_images(config, config.datasets.train)
    data = _batches(config, images, processes)
    generator = make_generator(config.network_g, config.scale, config.manual_seed)
    discriminator = None
    if config.network_d is not None:
        discriminator = make_discriminator(config.network_d, config.manual_seed)
    if config.path.pretrain_network_g is not None:
        load_pretrained(generator, config.path.pretrain_network_g, strict=config.path.strict_load_g)

    def make_validator(folder: Path, device: str) -> Validator | None:
        if config.datasets.val is None:
            return None
        return UpscaleValidator(config, _open_images(config, config.datasets.val), folder, device)

    return make_pairs_task(
        config,
        generator,
        data,
        discriminator,
        make_validator=make_validator,
        files=collect_file_facts(images.files()),
    )


def _batches(config: SrConfig, images: TrainImages, processes: ProcessGroup) -> BatchLoader:
    data = config.datasets.train
    return BatchLoader(
        PatchSamples(images, data.lq_size, Augmentation(data.use_hflip, data.use_rot, data.color)),
        batch=data.batch_size_per_gpu * processes.world_size,
        shard=(processes.rank, processes.world_size),
        seed=config.manual_seed,
        workers=data.num_worker_per_gpu,
        skip_broken=data.skip_broken,
    )


def _open_images(config: SrConfig, data: PairFoldersSection) -> TrainImages:
    """Return paired images, or high-resolution images that are downscaled on the fly."""
    if data.dataroot_lq:
        return PairedImageFolders(
            data.dataroot_gt, data.dataroot_lq, config.scale, filename_tmpl=data.filename_tmpl
        )
    name = data.degradation if isinstance(data, SrTrainDataSection) else "bicubic"
    if name != "bicubic" and config.scale > 4:
        raise UsageError(f"degradation: {name} is for scales up to 4")
    degradation = {"photo": PhotoDegradation(), "real": RealDegradation()}
    return HighResolutionFolders(
        data.dataroot_gt, config.scale, degradation.get(name, bicubic_downscale)
    )
