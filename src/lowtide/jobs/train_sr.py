"""Train a super-resolution model within a budget: the job of `lowtide train sr`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from lowtide.core.errors import UsageError
from lowtide.core.progress import Cancel
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.devices import resolve_device
from lowtide.jobs.train_folder import require_own_folder, write_config
from lowtide.jobs.train_memory import StepPlan, plan_step
from lowtide.jobs.train_validation import TrainImages, TrainValidation
from lowtide.memory.budget import Budget
from lowtide.training.data import (
    Batches,
    HighResolutionFolders,
    PairedFolders,
    RealDegradation,
    bicubic_downscale,
    collect_file_facts,
)
from lowtide.training.distributed import ProcessGroup
from lowtide.training.network_factory import load_pretrained, make_discriminator, make_generator
from lowtide.training.train_config import TrainConfig, TrainData, ValData, read_config
from lowtide.training.trainer import StepEvent, Trainer
from lowtide.training.weights import save_weights


class TrainReport(BaseModel):
    """Report of a training run.

    ``plan`` is the predicted memory of a step, ``scores`` the last validation's. ``weights`` and
    ``best_weights`` are files: the averaged weights at the end, and those with the best score.
    ``warnings`` are sentences on what was unexpected but did not stop the run: a damaged state,
    images that were rewritten.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    folder: str
    device: str
    parameters: int
    steps: int
    resumed_step: int
    plan: StepPlan
    weights: str
    best_weights: str | None
    scores: dict[str, float]
    skipped_images: dict[str, str]
    warnings: list[str] = []


def train_sr(
    config: str | Path | TrainConfig,
    output: str | Path = "experiments",
    *,
    budget: str | int = "auto",
    device: str = "auto",
    on_plan: Callable[[StepPlan], None] | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
    accept_changed_data: bool = False,
    cancel: Cancel = None,
) -> TrainReport:
    """Train the super-resolution model of ``config`` in ``output``/name.

    Resumes a stopped run of the same configuration from its newest valid state. The batch is split
    into as many parts as ``budget`` requires. Processes started by ``torchrun`` or ``accelerate
    launch`` take a batch each, within ``budget`` each, and a step covers the batches of all; the
    first one writes, validates and reports.

    Args:
        config: A configuration, or its file.
        on_plan: Called with the predicted memory of a step before the first one.
        on_step: Called after steps.
        on_warning: Called with each unexpected finding that does not stop the run.
        accept_changed_data: Resume although the images have changed; refused by default.

    Raises:
        UsageError, InputError: The configuration or data cannot be used, or the folder holds
            files that are not of a training of that name; raised before the first step where
            possible.
        BudgetError: No split of the batch fits the budget.
        OutputError: A file cannot be written.
        NotFiniteError: A loss or a gradient is not finite.
        Cancelled: ``cancel`` was set.
    """
    chosen = config if isinstance(config, TrainConfig) else read_config(config)
    processes, data = ProcessGroup.from_environment(), chosen.datasets.train
    folder, local_device = Path(output) / chosen.name, _local_device(device, processes)
    require_own_folder(folder, chosen.name)
    images = _open_images(chosen, data)
    batches = _batches(chosen, images, processes)
    generator = make_generator(chosen.network_g, chosen.scale, chosen.manual_seed)
    discriminator = None
    if chosen.network_d is not None:
        discriminator = make_discriminator(chosen.network_d, chosen.manual_seed)
    if chosen.path.pretrain_network_g is not None:
        load_pretrained(generator, chosen.path.pretrain_network_g, strict=chosen.path.strict_load_g)
    parsed = Budget.parse(budget, device=local_device)
    plan = plan_step(chosen, generator, discriminator, parsed.device_bytes, local_device)
    if on_plan is not None and processes.is_main:
        on_plan(plan)
    trainer = Trainer(
        chosen,
        folder,
        generator,
        batches,
        discriminator=discriminator,
        micro_batches=plan.micro_batches,
        device=local_device,
        files=collect_file_facts(images.files()),
    )
    resumed = trainer.resume(accept_changed_data=accept_changed_data)
    if on_warning is not None and processes.is_main:
        for warning in trainer.warnings:
            on_warning(warning)
    validation, last = None, folder / f"{chosen.name}.safetensors"
    if processes.is_main:
        write_config(folder, chosen)
        validation = _validation(chosen, folder, local_device)
    trainer.run(validation, on_step=on_step if processes.is_main else None, cancel=cancel)
    if processes.is_main:
        save_weights(last, trainer.ema_network, chosen)
    best = validation.best if validation is not None else None
    return TrainReport(
        name=chosen.name,
        folder=str(folder),
        device=local_device,
        parameters=sum(one.numel() for one in generator.parameters()),
        steps=trainer.completed_steps,
        resumed_step=resumed,
        plan=plan,
        weights=str(last),
        best_weights=str(best) if best is not None else None,
        scores=validation.scores if validation is not None else {},
        skipped_images={str(path): why for path, why in batches.skipped.items()},
        warnings=trainer.warnings,
    )


def _local_device(device: str, processes: ProcessGroup) -> str:
    """Return the device of this process."""
    place = resolve_device(device)
    return place if processes.is_single or place == "cpu" else f"cuda:{processes.local_rank}"


def _batches(config: TrainConfig, images: TrainImages, processes: ProcessGroup) -> Batches:
    data = config.datasets.train
    return Batches(
        images,
        patch=data.lq_size,
        batch=data.batch_size_per_gpu * processes.world_size,
        shard=(processes.rank, processes.world_size),
        seed=config.manual_seed,
        workers=data.num_worker_per_gpu,
        use_hflip=data.use_hflip,
        use_rot=data.use_rot,
        color=data.color,
        skip_broken=data.skip_broken,
    )


def _open_images(config: TrainConfig, data: TrainData | ValData) -> TrainImages:
    """Return paired images, or high-resolution images that are downscaled on the fly."""
    if data.dataroot_lq:
        return PairedFolders(
            data.dataroot_gt, data.dataroot_lq, config.scale, filename_tmpl=data.filename_tmpl
        )
    real = isinstance(data, TrainData) and data.degradation == "real"
    if real and config.scale > 4:
        raise UsageError("degradation: real is for scales up to 4")
    return HighResolutionFolders(
        data.dataroot_gt, config.scale, RealDegradation() if real else bicubic_downscale
    )


def _validation(config: TrainConfig, folder: Path, device: str) -> TrainValidation | None:
    if config.datasets.val is None:
        return None
    return TrainValidation(config, _open_images(config, config.datasets.val), folder, device)
