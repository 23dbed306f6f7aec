"""Report of `fit_to_budget`: the options tried, as data and as a table."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from lowtide.core.errors import BudgetError
from lowtide.core.units import format_bytes
from lowtide.memory.prediction.estimate import Estimate
from lowtide.memory.training.options import Accuracy, StepSettings

Status = Literal["requested", "taken", "not needed", "frees nothing", "not applicable"]
# Statuses whose change stays when the next one is added.
STEPS: tuple[Status, ...] = ("requested", "taken", "not needed")


class FitOption(BaseModel):
    """One memory-saving option, on top of those taken before it.

    ``predicted_bytes`` and ``upper_bytes`` are the step's peak with it, as in `Estimate`.
    ``freed_bytes`` is relative to the option before, ``freed_in_all_bytes`` to the step as
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
    freed_in_all_bytes: int | None = None
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
    does. ``asked`` is the estimate of the step as requested, with its trace.
    """

    device: str
    budget_bytes: int
    asked: Estimate
    rungs: tuple[FitOption, ...]
    chosen: int | None
    seconds: float

    @property
    def choice(self) -> FitOption | None:
        """The first option that fits, or None."""
        return None if self.chosen is None else self.rungs[self.chosen]

    @property
    def smallest(self) -> FitOption:
        """The option with the lowest upper bound, among those that can be taken."""
        on_the_way = [rung for rung in self.rungs if rung.upper_bytes and rung.status in STEPS]
        return min(on_the_way, key=lambda rung: rung.upper_bytes or 0)

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
        rows = [_HEAD, *(_cells(rung, at == self.chosen) for at, rung in enumerate(self.rungs))]
        full = [row for row in rows if len(row) == len(_HEAD)]
        widths = [max(len(row[column]) for row in full) for column in range(len(_HEAD))]
        widths[1] = max(len(row[1]) for row in rows)
        return "\n".join([*(_line(row, widths) for row in rows), "", _verdict(self)])


_HEAD = (
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
    "taken": "+",
    "not needed": " ",
    "frees nothing": "-",
    "not applicable": "-",
}
_LEFT = (0, 1, 7, 9, 10)


def _cells(rung: FitOption, chosen: bool) -> tuple[str, ...]:
    mark = ">" if chosen else _MARKS[rung.status]
    if rung.predicted_bytes is None or rung.upper_bytes is None:
        return mark, rung.name, f"does not apply: {rung.reason}"
    freed = (
        "" if rung.status == "requested" or count is None else format_bytes(count)
        for count in (rung.freed_bytes, rung.freed_in_all_bytes, rung.freed_alone_bytes)
    )
    results = "change" if rung.accuracy == "changes results" else "same"
    return (
        mark,
        rung.name,
        format_bytes(rung.predicted_bytes),
        format_bytes(rung.upper_bytes),
        *freed,
        "yes" if rung.fits else "no",
        "" if rung.work is None else f"{rung.work:.2f}×",
        "" if rung.status == "requested" else results,
        _remarks(rung),
    )


def _remarks(rung: FitOption) -> str:
    if rung.status == "requested":
        return f"peak in {rung.phase}"
    parts = ["skipped, frees nothing here"] if rung.status == "frees nothing" else []
    if rung.host_bytes and rung.name.startswith("EMA"):
        parts.append(f"{format_bytes(rung.host_bytes)} of host memory")
    return "; ".join([*parts, *([rung.reason] if rung.reason else [])])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    if len(cells) < len(widths):
        return f"{cells[0]:<{widths[0]}} {cells[1]:<{widths[1]}}  {cells[2]}"
    parts = [
        cell.ljust(width) if column in _LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"{parts[0]} {'  '.join(parts[1:])}".rstrip()


def _verdict(ladder: FitReport) -> str:
    budget = format_bytes(ladder.budget_bytes)
    rung = ladder.choice
    if rung is None or rung.upper_bytes is None:
        least = ladder.smallest
        return (
            f"no option fits in {budget}: the smallest, {least.name}, needs up to"
            f" {format_bytes(least.upper_bytes or 0)}"
        )
    return f"fits in {budget}, up to {format_bytes(rung.upper_bytes)} of it: {rung.settings}"
