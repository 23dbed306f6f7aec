"""Training step for a dry run on fake tensors, which predicts its peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.memory.tracing.steps import StepObserver, init_optimizer_state, optimizer_state
from lowtide.training.run_config import OptimSection, RunConfig
from lowtide.training.setup import EMAModel, exclude_from_autocast, make_optimizer, set_train_layout
from lowtide.training.task import Batch, Objective, TrainableNetwork, TrainTask
from lowtide.training.train_step import TrainStep

# Micro-batches that are traced: from the second on, the gradients of the first exist already.
TRACED_MICRO_BATCHES = 2


class TaskModules(nn.Module):
    """Module with all networks of a task and of its objectives."""

    def __init__(self, config: RunConfig, task: TrainTask) -> None:
        super().__init__()
        for network in task.networks.values():
            set_train_layout(network, channels_last=config.channels_last)
        self.networks = nn.ModuleDict(dict(task.networks))
        self.objectives = nn.ModuleList(task.objectives)


@dataclass(frozen=True)
class TracedTrainStep:
    """One steady-state step of `Trainer` for tracing, with optimizers and EMA.

    Traced with `TaskModules`. No tensor value is read, so that fake tensors suffice.

    ``inputs`` are a whole batch, run in ``micro_batches`` micro-batches. ``optims`` are those of
    the task. ``foreach`` selects optimizers that update all weights at once, as on a GPU.
    ``autocast`` is the dtype of the networks' forward passes, None for no autocast.
    """

    inputs: Batch
    config: RunConfig
    optims: Mapping[str, OptimSection]
    micro_batches: int = 1
    foreach: bool = False
    autocast: torch.dtype | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, model: TaskModules) -> Callable[[StepObserver], None]:
        """Return a function that runs one step; the optimizer state is allocated already."""
        train = self.config.train
        first = next(iter(model.networks.values()))
        average = EMAModel(first)
        networks = {
            name: self._trained_network(network, self.optims[name])
            for name, network in model.networks.items()
        }
        objectives = [one for one in model.objectives if isinstance(one, Objective)]
        state = [one for each in networks.values() for one in optimizer_state(each.optimizer)]
        persistent = [*state, *average.module.parameters(), *average.module.buffers()]

        def run(observer: StepObserver) -> None:
            observer.label(persistent, "optimizer")
            observer.mark("forward")
            step = TrainStep(
                networks,
                objectives,
                _marked_backward(observer),
                train.checkpointing,
                min(self.micro_batches, TRACED_MICRO_BATCHES),
                read_values=False,
            )
            followed = TRACED_MICRO_BATCHES * -(-len(self.inputs[0]) // self.micro_batches)
            # The last step: by then every objective and loss has started.
            step(tuple(one[:followed] for one in self.inputs), train.total_iter - 1)
            observer.mark("optimizer")
            for each in networks.values():
                observer.label(_gradients(each.network), "gradients")
                each.optimizer.step()
                each.optimizer.zero_grad()
            average.update(first, train.ema_decay)

        return run

    def _trained_network(self, network: nn.Module, optim: OptimSection) -> TrainableNetwork:
        exclude_from_autocast(network)
        weights = list(network.parameters())
        optimizer = make_optimizer(optim, weights, foreach=self.foreach)
        init_optimizer_state(optimizer, weights)

        def call(*args: Any, **kwargs: Any) -> Any:
            cast = self.autocast
            with nullcontext() if cast is None else torch.autocast("cpu", cast):
                result = network(*args, **kwargs)
            return result.float() if isinstance(result, Tensor) else result

        return TrainableNetwork(network, optimizer, call)


def _marked_backward(observer: StepObserver) -> Callable[[Tensor], None]:
    """Return a backward function that marks its phase; a forward phase follows it."""

    def backward(loss: Tensor) -> None:
        observer.mark("backward")
        loss.backward()
        observer.mark("forward")

    return backward


def _gradients(network: nn.Module) -> list[Tensor]:
    return [one.grad for one in network.parameters() if one.grad is not None]
