"""Training task: networks, objectives, data, validation and saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from lowtide.training.run_config import Optim
from lowtide.training.state import FileFacts

if TYPE_CHECKING:
    from lowtide.training.train_step import TrainableNetwork

Batch = tuple[Tensor, ...]
"""Tensors of any rank with the same first dimension B, by which they are split alike."""


class LossTerm(NamedTuple):
    """A scalar loss, which is logged as it is, and its weight in the sum to minimize."""

    loss: Tensor
    weight: float = 1.0


class ObjectiveLosses(NamedTuple):
    """Losses of one pass by name, and results for the objectives after it."""

    terms: dict[str, LossTerm]
    results: Batch = ()


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
    optims: Mapping[str, Optim]
    objectives: Sequence[Objective]
    data: BatchSource
    save: Callable[[Path, nn.Module], Path]
    make_validator: Callable[[Path, str], Validator | None] | None = None
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    title: str = "samples"
    smaller: str = "a smaller network"
