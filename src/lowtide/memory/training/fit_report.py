"""Report of `fit_to_budget`: the options tried, as data and as a table."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.errors import BudgetError
from lowtide.core.units import format_bytes
from lowtide.memory.prediction.estimate import Estimate
from lowtide.memory.training.options import Accuracy, StepSettings

Status = Literal["requested", "applied", "not needed", "no gain", "not applicable"]
# Statuses whose change stays when the next one is added.
KEPT_STATUSES: tuple[Status, ...] = ("requested", "applied", "not needed")


class FitOption(BaseModel):
    """One memory-saving option, on top of those taken before it.

    ``predicted_bytes`` and ``upper_bytes`` are the step's peak with it, as in `Estimate`.
    ``freed_bytes`` is relative to the option before, ``freed_total_bytes`` to the step as
    requested, ``freed_alone_bytes`` what the change frees as the only one; all of the predicted
    peak, negative where it takes more. ``work`` is the multiply-adds of a step relative to the
    requested one. An option that does not apply has ``reason`` and no figures.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    status: Status
    settings: StepSettings
    accuracy: Accuracy = "exact"
    predicted_bytes: int | None = None
    upper_bytes: int | None = None
    freed_bytes: int | None = None
    freed_total_bytes: int | None = None
    freed_alone_bytes: int | None = None
    host_bytes: int = 0
    fits: bool | None = None
    work: float | None = None
    phase: str = ""
    operator: str = ""
    reason: str = ""


class FitReport(BaseModel):
    """All options in the order in which they are tried, the step as requested first.

    ``chosen`` is the index of the first option whose upper bound fits the budget, None if none
    does. ``requested`` is the estimate of the step as requested, with its trace.
    """

    device: str
    budget_bytes: int
    requested: Estimate
    options: tuple[FitOption, ...]
    chosen: int | None
    seconds: float

    @property
    def choice(self) -> FitOption | None:
        """The first option that fits, or None."""
        return None if self.chosen is None else self.options[self.chosen]

    @property
    def smallest(self) -> FitOption:
        """The option with the lowest upper bound, among those that can be taken."""
        on_the_way = [
            option
            for option in self.options
            if option.upper_bytes and option.status in KEPT_STATUSES
        ]
        return min(on_the_way, key=lambda option: option.upper_bytes or 0)

    def require(self) -> FitOption:
        """Return the first option that fits.

        Raises:
            BudgetError: if none does; names the smallest.
        """
        if self.choice is not None:
            return self.choice
        least = self.smallest
        needs = least.upper_bytes or 0
        raise BudgetError(
            f"no option fits in {format_bytes(self.budget_bytes)} on {self.device}: the"
            f" smallest, {least.name}, needs up to {format_bytes(needs)}",
            smallest=needs,
            hint=f"a budget of {format_bytes(needs * 1.01)}, or a smaller model",
        )

    def __str__(self) -> str:
        """Return a table, one line per option, and which one is the first to fit.

        ``>`` marks that one, ``+`` the changes before it that are taken, ``-`` those that are
        skipped. ``frees`` is relative to the option before, ``in all`` to the step as requested,
        ``alone`` with no other change; ``work`` is the multiply-adds of a step relative to the
        requested one.
        """
        rows = [
            _HEADER,
            *(_cells(option, at == self.chosen) for at, option in enumerate(self.options)),
        ]
        full = [row for row in rows if len(row) == len(_HEADER)]
        widths = [max(len(row[column]) for row in full) for column in range(len(_HEADER))]
        widths[1] = max(len(row[1]) for row in rows)
        return "\n".join([*(_line(row, widths) for row in rows), "", _verdict(self)])


_HEADER = (
    "",
    "option",
    "predicted",
    "at most",
    "frees",
    "in all",
    "alone",
    "fits",
    "work",
    "results",
    "",
)
_MARKS = {
    "requested": " ",
    "applied": "+",
    "not needed": " ",
    "no gain": "-",
    "not applicable": "-",
}
_LEFT_ALIGNED = (0, 1, 7, 9, 10)


def _cells(option: FitOption, chosen: bool) -> tuple[str, ...]:
    mark = ">" if chosen else _MARKS[option.status]
    if option.predicted_bytes is None or option.upper_bytes is None:
        return mark, option.name, f"does not apply: {option.reason}"
    freed = (
        "" if option.status == "requested" or count is None else format_bytes(count)
        for count in (option.freed_bytes, option.freed_total_bytes, option.freed_alone_bytes)
    )
    results = "change" if option.accuracy == "changes results" else "same"
    return (
        mark,
        option.name,
        format_bytes(option.predicted_bytes),
        format_bytes(option.upper_bytes),
        *freed,
        "yes" if option.fits else "no",
        "" if option.work is None else f"{option.work:.2f}×",
        "" if option.status == "requested" else results,
        _remarks(option),
    )


def _remarks(option: FitOption) -> str:
    if option.status == "requested":
        return f"peak in {option.phase}"
    parts = ["skipped, frees nothing here"] if option.status == "no gain" else []
    if option.host_bytes and option.name.startswith("EMA"):
        parts.append(f"{format_bytes(option.host_bytes)} of host memory")
    return "; ".join([*parts, *([option.reason] if option.reason else [])])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    if len(cells) < len(widths):
        return f"{cells[0]:<{widths[0]}} {cells[1]:<{widths[1]}}  {cells[2]}"
    parts = [
        cell.ljust(width) if column in _LEFT_ALIGNED else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"{parts[0]} {'  '.join(parts[1:])}".rstrip()


def _verdict(report: FitReport) -> str:
    budget = format_bytes(report.budget_bytes)
    option = report.choice
    if option is None or option.upper_bytes is None:
        least = report.smallest
        return (
            f"no option fits in {budget}: the smallest, {least.name}, needs up to"
            f" {format_bytes(least.upper_bytes or 0)}"
        )
    return f"fits in {budget}, up to {format_bytes(option.upper_bytes)} of it: {option.settings}"
