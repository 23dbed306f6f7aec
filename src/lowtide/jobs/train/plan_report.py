"""Plans of training steps, as data and as text."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from pydantic import BaseModel, Field

from lowtide._version import __version__
from lowtide.core.errors import BudgetError
from lowtide.core.schema import SCHEMA_VERSION
from lowtide.core.units import format_bytes
from lowtide.jobs.train.memory import TrainStepPlan
from lowtide.memory.training.fit_search import FitReport


class TrainingPlan(BaseModel):
    """Predicted memory of a training step on one device, and changes that make it fit.

    ``fit_report.requested`` is the estimate of the step as requested, with its ledger.
    ``parameters`` is a count, all other sizes are bytes. A plan of a configuration has its
    number of ``steps`` and the ``training`` as it would run: its step is the one requested.
    ``notes`` say what of the model is not as it was asked for.
    """

    schema_version: int = SCHEMA_VERSION
    lowtide: str = __version__
    torch: str = Field(default_factory=partial(version, "torch"))
    model: str
    parameters: int
    device: str
    device_title: str
    budget_bytes: int
    training: TrainStepPlan | None = None
    steps: int | None = None
    notes: list[str] = []
    fit_report: FitReport

    @property
    def fits(self) -> bool:
        """Return whether any option fits the budget."""
        return self.fit_report.chosen is not None

    def require(self) -> None:
        """Raise `BudgetError` that names the smallest option if none fits."""
        self.fit_report.require()

    def __str__(self) -> str:
        asked = self.fit_report.requested
        ledger = ", ".join(
            f"{row.name} {format_bytes(row.value)}" for row in asked.ledger if row.value
        )
        memory, most, tensors, budget = map(
            format_bytes,
            (asked.predicted_bytes, asked.upper_bytes, asked.live_bytes, self.budget_bytes),
        )
        lines = [
            f"{self.model}: {self.parameters:,} parameters",
            f"  device     {self.device_title}, budget {budget}",
            f"  step       {self.fit_report.options[0].settings}",
            f"  memory     expected {memory}, at most {most}",
            f"  peak       in {asked.phase}, at {asked.operator}; tensors alone take {tensors}",
            f"  ledger     {ledger}",
            *(f"  note       {note}" for note in (*asked.notes, *self.notes)),
        ]
        if self.training is not None and self.steps is not None:
            lines[3:3] = [
                f"  training   {self.steps:,} steps: {self.training}",
                f"  time       {self.training.time_text(self.steps)}",
            ]
        return "\n".join([*lines, "", str(self.fit_report)])


class DeviceTrainingPlans(BaseModel):
    """Plans of the same training step for every GPU that has a device profile."""

    schema_version: int = SCHEMA_VERSION
    plans: list[TrainingPlan]

    @property
    def fits(self) -> bool:
        """Return whether the step fits any of the GPUs."""
        return any(plan.fits for plan in self.plans)

    def require(self) -> None:
        """Raise `BudgetError` if the step fits none of the GPUs."""
        if not self.fits:
            smallest = min(plan.fit_report.smallest.upper_bytes or 0 for plan in self.plans)
            raise BudgetError(
                f"nothing fits any GPU: the smallest option needs up to {format_bytes(smallest)}",
                smallest=smallest,
                hint="a smaller model",
            )

    def __str__(self) -> str:
        lines = ["device            budget  requested   at most  first option that fits"]
        for plan in self.plans:
            asked, choice = plan.fit_report.requested, plan.fit_report.choice
            budget, expected, most = map(
                format_bytes, (plan.budget_bytes, asked.predicted_bytes, asked.upper_bytes)
            )
            lines.append(
                f"{plan.device:<14}  {budget:>8}  {expected:>9}  {most:>8}"
                f"  {choice.name if choice else 'none'}"
            )
        return "\n".join(lines)
