"""Steps to measure and predict: one inference call, or one whole training step.

The same step object runs a real model and its fake twin, so that a prediction and a measurement
are of the same computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from lowtide.core.errors import UsageError
from lowtide.memory.tracing.checkpointing import Checkpointing, checkpointed

Optimizer = Literal["adamw", "adamw-foreach", "adamw-fused", "sgd", "sgd-momentum"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)


class StepObserver(Protocol):
    """Protocol of a step's observer: a tracer, a measured region, or nothing, as this one."""

    def mark(self, phase: str) -> None:
        """Start a named phase of the step."""

    def label(self, tensors: Iterable[Tensor], kind: Any) -> None:
        """Assign a kind (weights, inputs, ...) to tensors of any shape."""


class NullStepObserver(StepObserver):
    """Observer that records nothing."""


@dataclass(frozen=True)
class InferenceStep:
    """One call of a model without gradients.

    ``inputs`` and ``keywords`` are the arguments of the model; ``autocast`` is the low precision
    in which suitable operators run while the weights keep theirs.
    """

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None

    training = False

    def prepare(self, model: nn.Module) -> Callable[[StepObserver], None]:
        """Return the call as a closure that can run any number of times."""
        model.eval()

        def run(observer: StepObserver) -> None:
            observer.mark("inference")
            with torch.inference_mode(), _autocast(self.autocast):
                model(*self.inputs, **self.keywords)

        return run


@dataclass(frozen=True)
class TrainingStep:
    """One training step as it repeats in a long run: forward, backward and optimizer.

    Attributes:
        inputs: One micro-batch, of which ``accumulate`` make a step.
        loss: Reduces the model's output to a scalar. The default is the mean square, which keeps
            the least memory.
        ema: Whether a second copy of the weights follows the first.
        validation: Inputs of a pass without gradients after the step, which may be larger than
            those of training.
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

    def prepare(self, model: nn.Module) -> Callable[[StepObserver], None]:
        """Return one step as a closure.

        The optimizer's state exists already, as from the second step of a run on.
        """
        if self.accumulate < 1:
            raise UsageError(f"accumulate must be at least 1, not {self.accumulate}")
        model.train()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not weights:
            raise UsageError("this model has no weights to train: none requires gradients")
        optimizer = make_named_optimizer(self.optimizer, weights)
        init_optimizer_state(optimizer, weights)
        average = [weight.detach().clone() for weight in weights] if self.ema else []

        def run(observer: StepObserver) -> None:
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

    def _forward_backward(self, model: nn.Module, observer: StepObserver) -> None:
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
            "selective checkpointing saves results that this model later changes in place",
            hint="use full checkpointing, or activations that do not run in place",
        ) from error


class TraceableStep(Protocol):
    """Protocol of a step that can be traced.

    A dataclass, whose ``inputs`` and ``keywords`` may be replaced.
    """

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Positional arguments of the model."""
        ...

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Keyword arguments of the model."""
        ...

    def prepare(self, model: Any) -> Callable[[StepObserver], None]:
        """Return the step on ``model`` as a closure that can run any number of times."""
        ...


Step = InferenceStep | TrainingStep


def input_tensors(step: TraceableStep) -> list[Tensor]:
    """Return the input tensors of a step, of any shape, validation inputs included."""
    validation = step.validation if isinstance(step, TrainingStep) else None
    return tensors_of([list(step.inputs), dict(step.keywords), list(validation or ())])


def mean_square_loss(result: Any) -> Tensor:
    """Return the mean square of all elements of a model's output, a scalar in fp32.

    The means of several output tensors are added. Raises `UsageError` if none is floating point.
    """
    tensors = [tensor for tensor in tensors_of(result) if tensor.is_floating_point()]
    if not tensors:
        raise UsageError("the model's output contains no floating-point tensor", hint="pass loss=")
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors in a model's output, of any shape.

    The output is one tensor, or tuples, lists and mappings of them.
    """
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, list | tuple):
        return [tensor for part in result for tensor in tensors_of(part)]
    return []


def make_named_optimizer(name: Optimizer, weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Create an optimizer of tensors of any shape, by its name.

    The names include forms that differ in the memory that a step takes.
    """
    if name.startswith("adamw") and name in OPTIMIZERS:
        foreach, fused = name.endswith("-foreach"), name.endswith("-fused")
        return torch.optim.AdamW(weights, lr=1e-4, foreach=foreach, fused=fused)
    if name in ("sgd", "sgd-momentum"):
        momentum = 0.9 if name == "sgd-momentum" else 0.0
        return torch.optim.SGD(weights, lr=1e-4, momentum=momentum, foreach=False)
    raise UsageError(f"optimizer {name!r} is not known", hint=f"one of {', '.join(OPTIMIZERS)}")


def init_optimizer_state(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
    """Create the optimizer's state by a step that changes no weight."""
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
    """Return the tensors of an optimizer's state, most of the same shape as a parameter."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
