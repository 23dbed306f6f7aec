"""What is measured and predicted: one inference call, or one whole training step.

The same step object runs a real model and its fake twin, so that a prediction and a measurement
are of the same thing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.memory.tracing.checkpointing import Checkpointing, checkpointed

Optimizer = Literal["adamw", "adamw-foreach", "adamw-fused", "sgd", "sgd-momentum"]
OPTIMIZERS: tuple[Optimizer, ...] = (
    "adamw",
    "adamw-foreach",
    "adamw-fused",
    "sgd",
    "sgd-momentum",
)


class Observer(Protocol):
    """What follows a step: a tracer, or nothing."""

    def mark(self, phase: str) -> None:
        """A part of the step begins."""
        ...

    def label(self, tensors: Iterable[Tensor], kind: Any) -> None:
        """What tensors are for."""
        ...


class NullObserver:
    """Follows nothing."""

    def mark(self, phase: str) -> None:
        """Ignored."""

    def label(self, tensors: Iterable[Tensor], kind: Any) -> None:
        """Ignored."""


@dataclass(frozen=True)
class InferenceStep:
    """One call of a model without gradients.

    ``inputs`` and ``keywords`` are what the model is called with; ``autocast`` the low
    precision in which suitable operators run while the weights keep theirs.
    """

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    training = False

    def prepare(self, model: nn.Module) -> Callable[[Observer], None]:
        """The call, ready to be run (any number of times)."""
        model.eval()

        def run(observer: Observer) -> None:
            observer.mark("inference")
            with torch.inference_mode(), _autocast(self.autocast):
                model(*self.inputs, **self.keywords)

        return run


@dataclass(frozen=True)
class TrainingStep:
    """Forward, loss, backward and optimizer step of one batch, as they repeat in a long run.

    ``inputs`` are one micro-batch, of which ``accumulate`` make a step. ``loss`` takes the
    model's output to a number (mean square by default: it keeps the least). With ``ema`` a
    second copy of the weights follows the first. ``validation`` are the inputs of a pass
    without gradients after the step, which may be larger than those of training.
    """

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Optimizer = "adamw"
    checkpointing: Checkpointing = "none"
    autocast: torch.dtype | None = None
    accumulate: int = 1
    ema: bool = False
    validation: tuple[Any, ...] | None = None
    loss: Callable[[Any], Tensor] | None = None

    training = True

    def prepare(self, model: nn.Module) -> Callable[[Observer], None]:
        """One step, ready to be run; the optimizer's state exists already, as it will from the
        second step of a run on."""
        if self.accumulate < 1:
            raise UsageError(f"accumulate is {self.accumulate}, which is less than 1")
        model.train()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not weights:
            raise UsageError("this model has no weights to train")
        optimizer = make_optimizer(self.optimizer, weights)
        prime_optimizer(optimizer, weights)
        average = [weight.detach().clone() for weight in weights] if self.ema else []

        def run(observer: Observer) -> None:
            observer.label([*optimizer_state(optimizer), *average], "optimizer")
            for _ in range(self.accumulate):
                self._forward_backward(model, observer)
                observer.label([w.grad for w in weights if w.grad is not None], "gradients")
            observer.mark("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for old, weight in zip(average, weights, strict=False):
                old.lerp_(weight.detach(), 0.001)
            if self.validation is not None:
                observer.mark("validation")
                with torch.no_grad(), _autocast(self.autocast):
                    model(*self.validation, **self.keywords)

        return run

    def _forward_backward(self, model: nn.Module, observer: Observer) -> None:
        observer.mark("forward")
        with checkpointed(model, self.checkpointing):
            with _autocast(self.autocast):
                result = model(*self.inputs, **self.keywords)
                loss = (self.loss or mean_square_loss)(result)
            del result
            observer.mark("backward")
            _backward(loss)


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        if "selective activation checkpoint has been mutated" not in str(error):
            raise
        raise UsageError(
            "selective checkpointing keeps results that this model then changes in place",
            hint="full checkpointing, or activations that are not in place",
        ) from error


class Traceable(Protocol):
    """What can be traced: what it is given, and how a model is made ready for it.

    A dataclass, whose ``inputs`` and ``keywords`` may be replaced.
    """

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the model is called with."""
        ...

    @property
    def keywords(self) -> Mapping[str, Any]:
        """And by name."""
        ...

    def prepare(self, model: Any) -> Callable[[Observer], None]:
        """The step on ``model``, ready to be run any number of times."""
        ...


Step = InferenceStep | TrainingStep


def input_tensors(step: Traceable) -> list[Tensor]:
    """The tensors that a step is given, validation inputs included."""
    validation = step.validation if isinstance(step, TrainingStep) else None
    return tensors_of([list(step.inputs), dict(step.keywords), list(validation or ())])


def mean_square_loss(result: Any) -> Tensor:
    """Mean of the squares of all the numbers that a model gives, in fp32."""
    tensors = [tensor for tensor in tensors_of(result) if tensor.is_floating_point()]
    if not tensors:
        raise UsageError("the model's output holds no floating tensor", hint="pass loss=")
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in a model's output: itself, or those in its tuples, lists and mappings."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, list | tuple):
        return [tensor for part in result for tensor in tensors_of(part)]
    return []


def make_optimizer(name: Optimizer, weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An optimizer in one of its forms, which differ in the memory that a step takes."""
    if name.startswith("adamw") and name in OPTIMIZERS:
        foreach, fused = name.endswith("-foreach"), name.endswith("-fused")
        return torch.optim.AdamW(weights, lr=1e-4, foreach=foreach, fused=fused)
    if name in ("sgd", "sgd-momentum"):
        momentum = 0.9 if name == "sgd-momentum" else 0.0
        return torch.optim.SGD(weights, lr=1e-4, momentum=momentum, foreach=False)
    raise UsageError(f"optimizer {name!r} is not known", hint=f"one of {', '.join(OPTIMIZERS)}")


def prime_optimizer(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
    """Make the optimizer's state by a step that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What an optimizer keeps from step to step."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
