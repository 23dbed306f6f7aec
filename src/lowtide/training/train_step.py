"""Forward, losses and backward of one batch, in micro-batches that fit the budget.

A peak above the prediction does not end a training of days: `RetryingTrainStep` repeats a step with
less memory where that runs out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.attention.patch import RoutedAttention, use
from lowtide.core.errors import NotFiniteError, OutOfMemoryError, UsageError
from lowtide.memory.oom import OutOfMemoryCatcher, trim_allocators
from lowtide.memory.tracing.checkpointing import Checkpointing, checkpointed
from lowtide.training.distributed import SINGLE_PROCESS, ProcessGroup
from lowtide.training.task import NOT_FINITE_HINT, Batch, LossTerm, Objective, TrainableNetwork


@dataclass
class TrainStep:
    """Forward and backward passes of one batch, with gradient accumulation.

    Gradients are left in the networks; the caller steps the optimizers.

    The blocks of the first of ``networks`` are checkpointed. ``backward`` computes the gradients of
    a loss. ``micro_batches`` is the number of micro-batches. ``read_values`` False skips everything
    that reads tensor values, as fake tensors need. With several processes the batch is this one's
    share, and gradients are summed over the ``process_group``.
    """

    networks: Mapping[str, TrainableNetwork]
    objectives: Sequence[Objective]
    backward: Callable[[Tensor], None]
    checkpointing: Checkpointing = "none"
    micro_batches: int = 1
    read_values: bool = True
    process_group: ProcessGroup = SINGLE_PROCESS

    def __call__(self, batch: Batch, step: int) -> dict[str, float]:
        """Accumulate gradients of one batch; return the mean of each unweighted loss.

        Raises `NotFiniteError` naming a loss that is not finite, and as
        `TrainableNetwork.check_gradients`.
        """
        mean_losses: dict[str, float] = {}
        objectives = [one for one in self.objectives if step >= one.start_iter]
        for part in zip(*(one.chunk(self.micro_batches) for one in batch), strict=True):
            share = len(part[0]) / len(batch[0])
            for name, value in self._run_micro_batch(objectives, part, step, share).items():
                mean_losses[name] = mean_losses.get(name, 0.0) + value * share
        for network in self.networks.values():
            weights = network.network.parameters()
            self.process_group.all_reduce(one.grad for one in weights if one.grad is not None)
        if self.read_values:
            for objective in objectives:
                for name in objective.trains:
                    self.networks[name].check_gradients(step - objective.start_iter, name)
        return mean_losses

    def _run_micro_batch(
        self, objectives: Sequence[Objective], batch: Batch, step: int, share: float
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        first = next(iter(self.networks.values())).network
        with checkpointed(first, self.checkpointing):
            for objective in objectives:
                terms, results = objective(self.networks, batch, step)
                values |= self._loss_values(terms, step)
                total = torch.stack([one.loss * one.weight for one in terms.values()]).sum()
                self.backward(total * (share / self.process_group.world_size))
                batch = (*batch, *(one.detach() for one in results))
        return values

    def _loss_values(self, terms: Mapping[str, LossTerm], step: int) -> dict[str, float]:
        if not self.read_values:
            return {}
        values = {name: term.loss.item() for name, term in terms.items()}
        values = self.process_group.mean(values, next(iter(terms.values())).loss.device)
        for name, value in values.items():
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"the loss {name} is {value} in step {step}", hint=NOT_FINITE_HINT
                )
        return values


class RetryingTrainStep:
    """`TrainStep` that is repeated with less memory if it runs out, from then on.

    It checkpoints the blocks, then takes attention by `lowtide.attention.use`, then more and more
    micro-batches of the same batch; what a network has no use for is left out. Each change gives
    the same gradients up to rounding, except that batch norms see a micro-batch at a time. Smaller
    inputs would train another model, so they are only suggested.

    Nothing is repeated with several processes, whose others wait for this one's step.

    Args:
        step: The step, which is changed.
        device: Its device, ``"cpu"`` or that whose cache is emptied.
        warn: Gets a sentence that names the step and the changes, once it succeeded with them.
        hint: What the user can make smaller.
        is_compiled: Whether the networks are compiled, so that their attention is fixed.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        device: str,
        warn: Callable[[str], None],
        hint: str,
        is_compiled: bool = False,
    ) -> None:
        self._step, self._device, self._warn, self._hint = step, device, warn, hint
        # Of each network, once it is tried.
        self._attention: list[RoutedAttention] | None = [] if is_compiled else None
        # Numbers of the buffers that steps write; None before the first. Compiled ones do not tell.
        self._written: set[int] | None = None
        self._is_compiled = is_compiled

    def __call__(self, batch: Batch, step: int) -> dict[str, float]:
        """Run `TrainStep`; raises `OutOfMemoryError` where nothing is left to change."""
        buffers = list(self._buffers())
        versions = [buffer._version for buffer in buffers]
        kept = range(len(buffers)) if self._written is None else self._written
        saved = {number: buffers[number].clone() for number in kept}
        before, routed = dataclasses.replace(self._step), self._attention
        failed = False
        while (losses := self._attempt(batch, step)) is None:
            failed = True
            if not _restore(buffers, versions, saved) or not self._take_less(len(batch[0])):
                changes = self._changes(before, routed)
                raise OutOfMemoryError(
                    f"memory ran out in step {step + 1:,}"
                    + (f", also with {', '.join(changes)}" if changes else ""),
                    hint=self._hint,
                )
        written = {n for n, buffer in enumerate(buffers) if buffer._version != versions[n]}
        self._written = set(kept) if self._is_compiled else written | set(self._written or ())
        if failed:
            changes = self._changes(before, routed)
            how = f"with {', '.join(changes)} from here on" if changes else "unchanged"
            self._warn(f"memory ran out in step {step + 1:,}, which was repeated {how}")
        return losses

    def _attempt(self, batch: Batch, step: int) -> dict[str, float] | None:
        """Return the losses of the step, None after freeing all of it if memory ran out."""
        if not self._step.process_group.is_single:
            return self._step(batch, step)
        with OutOfMemoryCatcher(self._device):
            return self._step(batch, step)
        for network in self._step.networks.values():
            network.optimizer.zero_grad()
        trim_allocators(self._device)
        return None

    def _buffers(self) -> Iterator[Tensor]:
        """Yield what a forward pass may change: running statistics, spectral norms' vectors."""
        for one in self._step.networks.values():
            weights = {name for name, _ in one.network.named_parameters(remove_duplicate=False)}
            state = one.network.state_dict(keep_vars=True)
            yield from (value for name, value in state.items() if name not in weights)

    def _take_less(self, batch: int) -> bool:
        """Make the next change; return False if there is none."""
        step = self._step
        if step.checkpointing != "full" and self._can_checkpoint():
            step.checkpointing = "full"
        elif self._attention is None:
            self._attention = [use(one.network) for one in step.networks.values()]
        else:
            counts = range(2 * step.micro_batches, batch + 1)
            parts = next((count for count in counts if batch % count == 0), None)
            if parts is None:
                return False
            step.micro_batches = parts
        return True

    def _can_checkpoint(self) -> bool:
        first = next(iter(self._step.networks.values())).network
        try:
            with checkpointed(first, "full"):
                return True
        except UsageError:
            return False

    def _changes(self, before: TrainStep, routed: list[RoutedAttention] | None) -> list[str]:
        """Name what is not as it was ``before``; attention is undone where there is none."""
        step, names = self._step, []
        if step.checkpointing != before.checkpointing:
            names.append(f"{step.checkpointing} checkpointing")
        if self._attention is not routed:
            if any(used.calls for used in self._attention or ()):
                names.append("attention without score matrices")
            else:
                for used in self._attention or ():
                    used.remove()
        if step.micro_batches != before.micro_batches:
            names.append(f"{step.micro_batches} micro-batches")
        return names


def _restore(buffers: list[Tensor], versions: list[int], saved: dict[int, Tensor]) -> bool:
    """Undo what a failed pass wrote; return False where it wrote more than was saved."""
    written = {n for n, buffer in enumerate(buffers) if buffer._version != versions[n]}
    if not written <= saved.keys():
        return False
    for number in written:
        buffers[number].copy_(saved[number])
    return True
