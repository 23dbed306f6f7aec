"""Train any task within a budget: the common part of the jobs of `lowtide train`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict, TypeVar, Unpack

from pydantic import BaseModel

from lowtide.core.atomic_file import (
    atomic_output,
    remove_part_files,
    require_name,
    require_output_folder,
    require_replaceable,
)
from lowtide.core.errors import UsageError
from lowtide.core.folder_lock import locked_folder
from lowtide.core.heap import set_heap_mode
from lowtide.core.input_file import is_folder
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.jobs.engine.devices import resolve_device
from lowtide.jobs.engine.settings import settings_fields
from lowtide.jobs.train.memory import TrainStepPlan, plan_step
from lowtide.jobs.train.settings import TrainRunSettings
from lowtide.memory.budget import Budget
from lowtide.memory.cpu_half_precision import slowdown_note
from lowtide.memory.profiles import load_profile
from lowtide.training.distributed import ProcessGroup
from lowtide.training.run_config import RunConfig
from lowtide.training.task import TrainTask
from lowtide.training.trainer import Trainer, TrainStepEvent

ConfigT = TypeVar("ConfigT", bound=RunConfig)
_CONFIG = "config.json"
# Files that a training run makes in its folder, in addition to the weights named after it.
_MADE = (
    _CONFIG,
    "log.jsonl",
    "models",
    "tensorboard",
    "training_states",
    "validation",
    "visualization",
)


class TrainReport(BaseModel):
    """Report of a training run, or of one that is only ``planned`` (`TrainRunSettings.dry_run`).

    ``plan`` is the predicted memory of a step, ``scores`` the last validation's, ``best_score`` the
    first of the best's. ``weights`` and ``best_weights`` are files: the averaged weights at the
    end, and those with the best score. ``notes`` are sentences on how the training ended.
    ``warnings`` are sentences on what was unexpected but did not stop the run: a damaged state,
    images that were rewritten, a step that was repeated with less memory.
    """

    schema_version: int = SCHEMA_VERSION
    status: Literal["done", "planned"] = "done"
    name: str
    folder: str
    device: str
    parameters: int
    steps: int
    resumed_step: int
    plan: TrainStepPlan
    weights: str
    best_weights: str | None
    scores: dict[str, float]
    best_score: float | None = None
    skipped_images: dict[str, str]
    warnings: list[str] = []
    notes: list[str] = []

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.steps:,} steps, {self.parameters:,} parameters"]
        if self.status == "planned":
            time = self.plan.time_text(self.steps)
            lines += [f"device: {self.device}", f"memory: {self.plan}", f"time: {time}"]
            return "\n".join(lines)
        if self.resumed_step:
            lines.append(f"resumed after step {self.resumed_step:,}")
        lines += [f"{name}: {score:.4f}" for name, score in self.scores.items()]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"skipped: {path} ({why})" for path, why in self.skipped_images.items()]
        lines.append(f"weights: {self.weights}")
        if self.best_weights:
            lines.append(f"best:    {self.best_weights}")
        return "\n".join(lines)


class RunOptions(TypedDict, total=False):
    """Keywords of every training: callbacks, and the fields of `TrainRunSettings`.

    Attributes:
        on_plan: Called with the predicted memory of a step before the first one.
        on_step: Called after steps.
        on_warning: Called with each unexpected finding that does not stop the run.
        cancel: Stops the run after the current step, once its state is saved.
    """

    on_plan: Callable[[TrainStepPlan], None] | None
    on_step: Callable[[TrainStepEvent], None] | None
    on_warning: Callable[[str], None] | None
    cancel: Cancel
    budget: str | int
    device: str
    dry_run: bool
    accept_changed_data: bool


def run_training(
    config: ConfigT,
    make_task: Callable[[ConfigT, ProcessGroup], TrainTask],
    output: str | Path,
    **options: Unpack[RunOptions],
) -> TrainReport:
    """Train the task of ``config`` in ``output``/name within ``--budget``, or resume it.

    ``make_task`` builds the task with the data of one process. The keywords are `RunOptions`, and
    what is raised is as in `train_sr`.
    """
    processes = ProcessGroup.from_environment()
    require_name(output)
    require_output_folder(Path(output))
    folder = Path(output) / config.name
    _require_own_folder(folder, config.name)
    chosen = TrainRunSettings.of(
        **{name: options[name] for name in settings_fields(TrainRunSettings) if name in options}
    )
    if chosen.dry_run:
        return _plan(config, make_task, folder, processes, chosen)
    with locked_folder(folder) if processes.is_main else contextlib.nullcontext():
        return _train(config, make_task, folder, processes, chosen, options)


def _plan(
    config: ConfigT,
    make_task: Callable[[ConfigT, ProcessGroup], TrainTask],
    folder: Path,
    processes: ProcessGroup,
    chosen: TrainRunSettings,
) -> TrainReport:
    """Return what a training would take, on a device that need not be present."""
    device, budget = device_and_budget(chosen.device, chosen.budget, processes)
    task = make_task(config, processes)
    trained = next(iter(task.networks.values()))
    plan = plan_step(config, task, budget, device)
    if _is_local(chosen.device) and processes.is_single:
        set_heap_mode("trim" if plan.heap == "trim" else "cache")
        parts = plan.micro_batches
        trainer = Trainer(config, folder, task, micro_batches=parts, device=device)
        plan.measured_seconds = trainer.measure_step()
    return TrainReport(
        status="planned",
        name=config.name,
        folder=str(folder),
        device=device,
        parameters=sum(one.numel() for one in trained.parameters()),
        steps=config.train.total_iter,
        resumed_step=0,
        plan=plan,
        weights=str(folder / f"{config.name}.safetensors"),
        best_weights=None,
        scores={},
        skipped_images={},
    )


def _train(
    config: ConfigT,
    make_task: Callable[[ConfigT, ProcessGroup], TrainTask],
    folder: Path,
    processes: ProcessGroup,
    chosen: TrainRunSettings,
    options: RunOptions,
) -> TrainReport:
    local_device = _local_device(chosen.device, processes)
    task = make_task(config, processes)
    parsed = Budget.parse(chosen.budget, device=local_device)
    on_warning = options.get("on_warning") if processes.is_main else None
    slow = slowdown_note(config.precision) if local_device == "cpu" else None
    if slow and on_warning is not None:
        on_warning(slow)
    plan = plan_step(config, task, parsed.device_bytes, local_device)
    if (on_plan := options.get("on_plan")) is not None and processes.is_main:
        on_plan(plan)
    if processes.is_single:  # several stop after the same step
        raise_if_cancelled(options.get("cancel"))
    set_heap_mode("trim" if plan.heap == "trim" else "cache")
    trainer = Trainer(
        config,
        folder,
        task,
        micro_batches=plan.micro_batches,
        device=local_device,
        on_warning=on_warning,
    )
    resumed = trainer.resume(accept_changed_data=chosen.accept_changed_data)
    validator, weights = None, folder / f"{config.name}.safetensors"
    if processes.is_main:
        _write_config(folder, config)
        if task.make_validator is not None:
            validator = task.make_validator(folder, local_device)
    on_step = options.get("on_step") if processes.is_main else None
    trainer.run(validator, on_step=on_step, cancel=options.get("cancel"))
    if processes.is_main:
        task.save(weights, trainer.ema_network)
    best = trainer.best_weights if validator is not None else None
    return TrainReport(
        name=config.name,
        folder=str(folder),
        device=local_device,
        parameters=sum(one.numel() for one in trainer.ema_network.parameters()),
        steps=trainer.completed_steps,
        resumed_step=resumed,
        plan=plan,
        weights=str(weights),
        best_weights=str(best) if best is not None and best.is_file() else None,
        scores=trainer.scores,
        best_score=trainer.best_score,
        skipped_images={str(path): why for path, why in task.data.skipped.items()},
        warnings=([slow] if slow else []) + trainer.warnings,
        notes=trainer.notes,
    )


def device_and_budget(device: str, budget: str | int, processes: ProcessGroup) -> tuple[str, int]:
    """Return the device of a training and its budget in bytes; the device need not be present."""
    if _is_local(device):
        device = _local_device(device, processes)
        return device, Budget.parse(budget, device=device).device_bytes
    return device, Budget.for_profile(load_profile(device), budget).device_bytes


def _is_local(device: str) -> bool:
    """Return whether a device is one of this machine, and not a profile's."""
    return device == "auto" or device.partition(":")[0] in ("cpu", "cuda")


def _local_device(device: str, processes: ProcessGroup) -> str:
    """Return the device of this process."""
    place = resolve_device(device)
    return place if processes.is_single or place == "cpu" else f"cuda:{processes.local_rank}"


def _require_own_folder(folder: Path, name: str) -> None:
    """Raise `UsageError` if training ``name`` would overwrite files of another origin."""
    if os.path.lexists(folder) and not is_folder(folder):
        raise UsageError(f"{folder} is not a folder", hint="use another name, or move it away")
    if not is_folder(folder) or _is_run_folder(folder, name):
        return
    for made in (f"{name}.safetensors", f"{name}.json", *_MADE):
        if os.path.lexists(folder / made):
            raise UsageError(
                f"{folder / made} already exists and is not from a training run of this name",
                hint="use another name or -o FOLDER, or move it away",
            )


def _write_config(folder: Path, config: RunConfig) -> None:
    """Write the configuration that marks ``folder`` as a training run's.

    Removes what a killed run left unfinished.

    Raises:
        OutputError: A file cannot be written.
    """
    weights = config.name, f"models/{config.name}_best", "models/validated"
    made = (f"{name}.{kind}" for name in weights for kind in ("safetensors", "json"))
    for name in (_CONFIG, *made, "models/forecast.json", "models/forecaster.npz"):
        remove_part_files(folder / name)
        require_replaceable(folder / name)  # not after all steps
    with atomic_output(folder / _CONFIG) as part:
        part.write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n")


def _is_run_folder(folder: Path, name: str) -> bool:
    """Return whether a training run began in the folder: a config or a state is there."""
    config = folder / _CONFIG
    try:
        known = json.loads(config.read_bytes()) if config.is_file() else None
    except (OSError, ValueError, RecursionError):
        known = None
    if isinstance(known, dict) and known.get("name") == name and "train" in known:
        return True
    return any(path.stem.isdigit() for path in folder.glob("training_states/*.state"))
