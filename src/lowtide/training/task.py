"""Training task: networks, objectives, data, validation and saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lowtide.core.errors import NotFiniteError, UsageError
from lowtide.training.run_config import OptimSection
from lowtide.training.state import FileFacts

Batch = tuple[Tensor, ...]
"""Tensors of any rank with the same first dimension B, by which they are split alike."""


# Steps by which each weight must have had a gradient: some have none until others leave 0, as what
# embeds a noise level does until three layers after it have.
_GRADIENT_CHECK_STEPS = 4
NOT_FINITE_HINT = "try a lower learning rate, train.grad_clip, or precision: fp32"


class LossTerm(NamedTuple):
    """A scalar loss, which is logged as it is, and its weight in the sum to minimize."""

    loss: Tensor
    weight: float = 1.0


class ObjectiveLosses(NamedTuple):
    """Losses of one pass by name, and results for the objectives after it."""

    terms: dict[str, LossTerm]
    results: Batch = ()


@dataclass
class TrainableNetwork:
    """Network with its optimizer, and the forward function that objectives call.

    ``forward`` runs the network, plain or wrapped (autocast, `torch.compile`).
    ``has_scaled_gradients`` says that its gradients are scaled for fp16. ``without_gradient`` names
    the weights without a gradient so far.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[..., Any]
    has_scaled_gradients: bool = False
    without_gradient: set[str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        return self.forward(*args, **kwargs)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Context in which inputs get gradients, but the weights do not."""
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        try:
            for weight in weights:
                weight.requires_grad_(False)
            yield
        finally:
            for weight in weights:
                weight.requires_grad_(True)

    def check_gradients(self, step: int, network_name: str) -> None:
        """Check that every weight gets a finite, nonzero gradient in the first steps.

        Raises `UsageError` naming weights without one, and `NotFiniteError` naming a weight whose
        gradient is not finite.
        """
        if (
            step >= _GRADIENT_CHECK_STEPS
            and self.without_gradient is not None
            and not self.without_gradient
        ):
            return
        if self.without_gradient is None:
            self.without_gradient = {
                n for n, one in self.network.named_parameters() if one.requires_grad
            }
        for name, weight in self.network.named_parameters():
            if weight.grad is None or name not in self.without_gradient:
                continue
            # The scaler skips the step of fp16 gradients that overflow and lowers its scale.
            if not self.has_scaled_gradients and not bool(weight.grad.isfinite().all()):
                raise NotFiniteError(
                    f"the gradient of the {network_name}'s {name} is not finite in step {step}",
                    hint=NOT_FINITE_HINT,
                )
            if bool(weight.grad.any()):
                self.without_gradient.discard(name)
        if step == _GRADIENT_CHECK_STEPS - 1 and self.without_gradient:
            names = ", ".join(sorted(self.without_gradient)[:3])
            raise UsageError(
                f"{len(self.without_gradient)} weights of the {network_name} had no gradient in"
                f" {_GRADIENT_CHECK_STEPS} steps and would never be trained: {names}"
            )


class Objective(nn.Module):
    """Forward pass and losses of one optimization, on one micro-batch.

    Modules that it owns, such as a frozen feature network, are moved and counted with it, but not
    trained. Objectives of a task run one after another, each with its own backward pass: a later
    one gets the batch followed by the detached ``results`` of those before it.

    Attributes:
        trains: Names of the networks that get gradients.
        start_iter: The step with which it begins.
    """

    trains: tuple[str, ...]
    start_iter: int = 0

    def forward(
        self, networks: Mapping[str, TrainableNetwork], batch: Batch, step: int
    ) -> ObjectiveLosses:
        """Return the losses of ``batch`` in ``step``, scalars that are means over B.

        Random numbers belong into the batch: drawn here, they would depend on its split.
        """
        raise NotImplementedError


class BatchSource(Protocol):
    """Source of batches that are a function of the step; `BatchLoader` is one.

    ``skipped`` maps files that could not be used to the reason.
    """

    @property
    def skipped(self) -> Mapping[Path, str]:
        """Files that could not be used, with the reason."""
        ...

    def prefetch(self, first_step: int) -> Iterator[Batch]:
        """Yield this process's batches of ``first_step`` and all later steps."""
        ...

    def example(self, batch: int) -> Batch:
        """Return a batch of ``batch`` samples as meta tensors, for predicting memory."""
        ...


class Validator(Protocol):
    """Validation of a network: scores by metric name; the first selects the best.

    ``lower_is_better`` is of the first score, and ``conditions`` say how it is measured: scores
    compare only if these are equal.
    """

    @property
    def lower_is_better(self) -> bool:
        """Whether the first score of better weights is lower."""
        ...

    @property
    def conditions(self) -> dict[str, Any]:
        """Settings other than the weights that the first score depends on."""
        ...

    def __call__(self, network: nn.Module, step: int) -> dict[str, float]:
        """Return the scores of ``network`` after ``step`` steps."""
        ...


@dataclass(frozen=True)
class TrainTask:
    """Networks, objectives and data of a training.

    ``networks`` and ``optims`` have the same names. The first network is the result: it is
    averaged, validated and saved by ``save``, which writes and returns a file.
    ``make_validator`` gets the run's folder and the device. ``files`` are facts of the data's
    files, which are compared when a run resumes. ``title`` says what a batch counts, and
    ``smaller`` what can be made smaller where memory runs out.
    """

    networks: Mapping[str, nn.Module]
    optims: Mapping[str, OptimSection]
    objectives: Sequence[Objective]
    data: BatchSource
    save: Callable[[Path, nn.Module], Path]
    make_validator: Callable[[Path, str], Validator | None] | None = None
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    title: str = "samples"
    smaller: str = "a smaller network"
