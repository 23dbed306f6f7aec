"""Training loop of any `TrainTask`, with EMA, checkpoints and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.core.errors import (
    Cancelled,
    LowtideError,
    OutputError,
    UsageError,
    describe_changes,
)
from lowtide.core.progress import Cancel, raise_if_cancelled
from lowtide.memory.oom import naming_out_of_memory
from lowtide.training.distributed import ProcessGroup
from lowtide.training.run_config import OptimSection, RunConfig
from lowtide.training.setup import (
    EMAModel,
    ema_decay,
    exclude_from_autocast,
    lr_factor,
    make_accelerator,
    make_optimizer,
    set_train_layout,
)
from lowtide.training.state import (
    FileFacts,
    TrainState,
    changed_files,
    load_latest_state,
    rewritten_files,
    save_state,
)
from lowtide.training.task import Batch, TrainableNetwork, TrainTask, Validator
from lowtide.training.train_log import TrainLog
from lowtide.training.train_step import RetryingTrainStep, TrainStep

# Steps past the last, as which a step is measured.
_STEPS_AFTER_ALL = 10


@dataclass
class TrainStepEvent:
    """Progress report of a finished step.

    ``seconds`` is the time since the loop started.
    """

    step: int
    total: int
    losses: dict[str, float]
    seconds: float


class Trainer:
    """Training of a `TrainTask` by a `RunConfig`, resumable exactly.

    `resume` restores the newest intact state in ``folder``; the losses are then those of a run
    that was never stopped. ``warnings`` has a sentence for each thing that was not as expected,
    ``notes`` say why it ended early, ``scores`` are those of the last validation.

    Args:
        config: The configuration of the run.
        folder: Output folder for the log, the states and the best weights.
        task: What to train; with several processes, on this one's share of the data.
        micro_batches: Micro-batches per step in each process.
        device: ``cpu`` for training on the CPU; otherwise accelerate chooses the device.
        on_warning: Called with each sentence of ``warnings`` when it is added.

    With several processes, rank 0 writes and validates.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        task: TrainTask,
        *,
        micro_batches: int = 1,
        device: str = "cpu",
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.folder, self.task = config, folder, task
        self._accelerator = make_accelerator(config, device)
        self._process_group = ProcessGroup.from_environment()
        for network in task.networks.values():
            set_train_layout(network, channels_last=config.channels_last)
        self._ema = EMAModel(next(iter(task.networks.values())))
        self._ema.module.to(self._accelerator.device)
        self._networks = {
            name: self._prepare_network(network, task.optims[name])
            for name, network in task.networks.items()
        }
        self._first = next(iter(self._networks.values()))
        self._train_step = RetryingTrainStep(
            TrainStep(
                self._networks,
                [objective.to(self._accelerator.device) for objective in task.objectives],
                self._accelerator.backward,
                config.train.checkpointing,
                micro_batches,
                process_group=self._process_group,
            ),
            device=str(self._accelerator.device),
            warn=self._warn,
            hint=task.smaller,
            is_compiled=config.train.compile,
        )
        self._state = TrainState(0, {}, files=dict(task.files))
        self._saved_step = 0
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._on_warning = on_warning
        self.scores: dict[str, float] = {}

    def _prepare_network(self, network: nn.Module, optim: OptimSection) -> TrainableNetwork:
        exclude_from_autocast(network)
        optimizer = make_optimizer(optim, network.parameters())
        # evaluation_mode avoids the DistributedDataParallel wrapper: `TrainStep` sums gradients.
        wrapped = self._accelerator.prepare_model(network, evaluation_mode=True)
        optimizer = self._accelerator.prepare_optimizer(optimizer)
        call = torch.compile(wrapped) if self.config.train.compile else wrapped
        scaled = self._accelerator.scaler is not None
        return TrainableNetwork(self._accelerator.unwrap_model(wrapped), optimizer, call, scaled)

    @property
    def ema_network(self) -> nn.Module:
        """The network with EMA weights, which is the result of a training."""
        return self._ema.module

    @property
    def best_weights(self) -> Path:
        """File of the weights with the best first score, which exists after a validation."""
        return self.folder / "models" / f"{self.config.name}_best.safetensors"

    @property
    def best_score(self) -> float | None:
        """The best first score of a validation, if there was one."""
        return self._state.best

    @property
    def completed_steps(self) -> int:
        """Number of finished steps."""
        return self._state.step

    def resume(self, *, accept_changed_data: bool = False) -> int:
        """Restore the newest intact state and return its step, 0 if there is none.

        Args:
            accept_changed_data: Resume although the training files changed, with a warning.

        Raises:
            UsageError: If the state is of another configuration or of other files.
            InputError: If all states are damaged.
        """
        state, damaged = load_latest_state(self.folder / "training_states")
        if state is None:
            return 0
        for path, reason in damaged.items():
            self._warn(
                f"{path} is damaged ({reason}): the state of step {state.step} was loaded instead"
            )
        before, now = map(_fixed_entries, (state.config, self._config_record()))
        if changes := describe_changes(before, now):
            raise UsageError(
                f"{self.folder} contains a training with another configuration: {changes}",
                hint="set them as they were, choose another name, or remove the folder",
            )
        if state.files:
            self._check_files(state.files, accept_changed_data)
        for name, part in self._stateful_parts().items():
            part.load_state_dict(state.parts[name])
        state.files = dict(self.task.files)
        self._state, self._saved_step = state, state.step
        if state.step > self.config.train.total_iter:
            self._warn(
                f"train.total_iter is {self.config.train.total_iter:,}, and {state.step:,} steps"
                " were done already: the weights are those"
            )
        return state.step

    def _check_files(self, before: Mapping[str, FileFacts], accepted: bool) -> None:
        """Compare the training files with those of the saved state."""
        now = self.task.files
        other, rewritten = changed_files(before, now), rewritten_files(before, now)
        if other and not accepted:
            raise UsageError(
                f"{self.folder} contains a training on other files: {other}",
                hint="restore them, or pass --accept-changed-data to go on with the current ones",
            )
        differences = ", ".join(words for words in (other, rewritten) if words)
        if differences:
            self._warn(f"the training continues with other files than before: {differences}")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        if self._on_warning is not None:
            self._on_warning(text)

    def _stateful_parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"average": self._ema.module}
        for name, one in self._networks.items():
            found[name], found[f"{name} optimizer"] = one.network, one.optimizer
        if self._accelerator.scaler is not None:
            found["scaler"] = self._accelerator.scaler
        return found

    def run(
        self,
        validate: Validator | None = None,
        *,
        on_step: Callable[[TrainStepEvent], None] | None = None,
        cancel: Cancel = None,
    ) -> None:
        """Train to the last step of the configuration, or until nothing is gained any more.

        If the state is there already or past it, nothing is done.

        Args:
            validate: Validation when the configuration says so, and at the end.
            on_step: Called after each step.
            cancel: Checked after each step but the last.

        Raises:
            OutputError: If a file cannot be written; names the steps done so far.
            Cancelled: After a state was saved.
            NotFiniteError: As `TrainStep`, as are other errors of a step.
            OutOfMemoryError: As `RetryingTrainStep`, and where memory runs out elsewhere.
        """
        config, logger = self.config, self.config.logger
        writes = self._process_group.is_main
        log = (
            TrainLog(self.folder, self.completed_steps, tensorboard=logger.use_tb_logger)
            if writes
            else None
        )
        started, first = time.perf_counter(), self.completed_steps
        total = config.train.total_iter
        try:
            with naming_out_of_memory(
                lambda: f"after step {self.completed_steps:,}",
                f"a smaller --budget, or {self.task.smaller}",
            ):
                # Empty if the state is as far or further, as when total_iter was lowered.
                steps = range(first, total if not self._gains_nothing else first)
                for _, batch in zip(steps, self.task.data.prefetch(first), strict=False):
                    losses = self._run_step(batch)
                    done = self.completed_steps
                    if on_step is not None:
                        on_step(TrainStepEvent(done, total, losses, time.perf_counter() - started))
                    if log is not None:
                        self._log_and_save(log, validate)
                    if self._has_ended():
                        break
                    if done < total:
                        self._stop_if_cancelled(cancel)
        except OutputError as error:
            raise self._with_progress(error) from error
        finally:
            if log is not None:
                log.close()

    def measure_step(self) -> float:
        """Return the seconds of the second of two steps, by which the networks are changed.

        Every objective takes part, as in the last steps of a run. Nothing is written.
        """
        # Beyond the steps in which gradients are checked.
        self._state.step = self.config.train.total_iter + _STEPS_AFTER_ALL
        seconds = 0.0
        batches = self.task.data.prefetch(0)
        for _ in range(2):
            started = time.perf_counter()
            self._run_step(next(batches))
            if self._accelerator.device.type == "cuda":
                torch.cuda.synchronize(self._accelerator.device)
            seconds = time.perf_counter() - started
        return seconds

    def _with_progress(self, error: OutputError) -> OutputError:
        saved = f"the state of step {self._saved_step:,}" if self._saved_step else "no state yet"
        return OutputError(
            f"{error.message}; step {self.completed_steps:,} of {self.config.train.total_iter:,} is"
            f" done, and {saved} is saved in {self.folder}",
            hint=f"{error.hint or 'fix the cause'}; the same command resumes from there",
        )

    def _log_and_save(self, log: TrainLog, validate: Validator | None) -> None:
        """Write the log rows, scores and states that are due after this step."""
        config, logger, done = self.config, self.config.logger, self.completed_steps
        last, scores = done == config.train.total_iter, dict[str, Any]()
        if validate is not None and (config.val.is_due(done) or last):
            scores = self._saved_if_it_fails(validate)
        last = last or self._gains_nothing
        if done % logger.print_freq == 0 or last:
            log.add(done, self._log_row())
        if scores:
            log.add(done, scores)
        if done % logger.save_checkpoint_freq == 0 or last:
            self._save_state()

    @property
    def _gains_nothing(self) -> bool:
        patience = self.config.val.patience
        return patience is not None and self._state.since_best >= patience

    def _has_ended(self) -> bool:
        """Whether rank 0, which validates, has found no gain; after the same step for all."""
        config, done = self.config, self.completed_steps
        if config.val.patience is None or not config.val.is_due(done):
            return False
        ended = self._process_group.any(self._gains_nothing, self._accelerator.device)
        if ended and done < config.train.total_iter and self._process_group.is_main:
            self.notes.append(
                f"stopped after {done:,} of {config.train.total_iter:,} steps:"
                f" {self._state.since_best} validations were no better than that after step"
                f" {self._state.best_step:,}"
            )
        return ended

    def _run_step(self, batch: Batch) -> dict[str, float]:
        config, step = self.config.train, self.completed_steps
        lr_scale = lr_factor(config.scheduler, step, config.total_iter, config.warmup_iter)
        for name, one in self._networks.items():
            for group in one.optimizer.param_groups:
                group["lr"] = self.task.optims[name].lr * lr_scale
            one.optimizer.zero_grad()
        losses = self._train_step(self._to_device(batch), step)
        for one in self._networks.values():
            if config.grad_clip is not None:
                self._accelerator.clip_grad_norm_(one.network.parameters(), config.grad_clip)
            one.optimizer.step()
        decay = ema_decay(config.ema_decay, config.ema_warmup, step)
        self._ema.update(self._first.network, decay)
        state = self._state
        state.step, state.counted = step + 1, state.counted + 1
        for name, loss in losses.items():
            state.sums[name] = state.sums.get(name, 0.0) + loss
        return losses

    def _to_device(self, batch: Batch) -> Batch:
        """Move a batch; images that come first, the network's input, are laid out like it."""
        first, *others = (one.to(self._accelerator.device) for one in batch)
        if self.config.channels_last and first.ndim == 4:
            first = first.contiguous(memory_format=torch.channels_last)
        return first, *others

    def _log_row(self) -> dict[str, Any]:
        """Return the mean losses since the last log row, and reset the sums."""
        state = self._state
        means = {name: total / state.counted for name, total in state.sums.items()}
        state.sums, state.counted = {}, 0
        return {**means, "lr": self._first.optimizer.param_groups[0]["lr"]}

    def _saved_if_it_fails(self, validate: Validator) -> dict[str, Any]:
        """Validate; where that fails, such as by its budget, save the state before the error."""
        try:
            return self._validate(validate)
        except Exception as error:
            self._save_state()
            if isinstance(error, LowtideError) and not isinstance(error, OutputError):
                error.hint = (
                    f"{error.hint or 'fix the cause'}; step {self.completed_steps:,} is saved, and"
                    " the same command goes on from there"
                )
            raise

    def _validate(self, validate: Validator) -> dict[str, Any]:
        scores = self.scores = validate(self.ema_network, self.completed_steps)
        score = next(iter(scores.values()))
        state, lower = self._state, validate.lower_is_better
        best = state.best if state.scored_by in ({}, validate.conditions) else None
        state.scored_by = validate.conditions
        if best is None or (score < best if lower else score > best):
            state.best, state.best_step, state.since_best = score, self.completed_steps, 0
            self.task.save(self.best_weights, self.ema_network)
        else:
            state.since_best += 1
        return {**scores, "best": state.best == score}

    def _save_state(self) -> None:
        self._state.parts = {
            name: part.state_dict() for name, part in self._stateful_parts().items()
        }
        self._state.config = self._config_record()
        save_state(self.folder / "training_states", self._state)
        self._state.parts, self._saved_step = {}, self.completed_steps

    def _config_record(self) -> dict[str, Any]:
        """Return the configuration as plain values, with the number of processes."""
        return {**self.config.model_dump(mode="json"), "processes": self._process_group.world_size}

    def _stop_if_cancelled(self, cancel: Cancel) -> None:
        """Stop all processes after the same step if one is cancelled."""
        error: Cancelled | None = None
        try:
            raise_if_cancelled(cancel)
        except Cancelled as found:
            error = found
        if self._process_group.any(error is not None, self._accelerator.device):
            if self._process_group.is_main:
                self._save_state()
            raise error or Cancelled("another process of this training was cancelled")


def _fixed_entries(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that must not change on resume.

    These are all but the number of steps, the log and validation.
    """
    train = {key: one for key, one in config["train"].items() if key != "total_iter"}
    same = {key: one for key, one in config.items() if key not in ("logger", "val", "train")}
    return {"processes": 1, **same, "train": train}
