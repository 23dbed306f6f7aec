"""Search for the options with which a training step fits a memory budget, and its report.

Each option is traced, because what a change frees depends on where the peak is: checkpointing does
nothing for a peak in the optimizer's step, and no attention kernel helps one in the convolutions.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict
from torch import nn

from lowtide.core.errors import BudgetError, LowtideError, ModelError, UsageError
from lowtide.core.heap import HeapMode
from lowtide.core.units import format_bytes
from lowtide.memory.prediction.estimate import Estimate, TracesOfStep, traced_estimate
from lowtide.memory.prediction.operator_costs import multiply_adds
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.memory.tracing.steps import TraceableStep, TrainingStep, tensors_of
from lowtide.memory.training.options import (
    Accuracy,
    MakeStep,
    OptionChange,
    StepMemorySettings,
    change_settings,
    option_changes,
)

Status = Literal["requested", "applied", "not needed", "no gain", "not applicable"]
# An option stays when the next one is added unless it is skipped, which "-" marks.
_MARKS = {
    "requested": " ",
    "applied": "+",
    "not needed": " ",
    "no gain": "-",
    "not applicable": "-",
}
_HEADER = (
    "",
    "option",
    *("predicted", "at most", "frees", "in all", "alone", "fits", "work", "results"),
    "",
)
_LEFT_ALIGNED = (0, 1, 7, 9, 10)


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
    settings: StepMemorySettings
    accuracy: Accuracy = "exact"
    predicted_bytes: int | None = None
    upper_bytes: int | None = None
    freed_bytes: int | None = None
    freed_total_bytes: int | None = None
    freed_alone_bytes: int | None = None
    fits: bool | None = None
    work: float | None = None
    phase: str = ""
    operator: str = ""
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Whether the change stays when the next one is added."""
        return _MARKS[self.status] != "-"

    def _cells(self, chosen: bool) -> tuple[str, ...]:
        mark = ">" if chosen else _MARKS[self.status]
        if self.predicted_bytes is None:
            return mark, self.name, f"does not apply: {self.reason}"
        first = self.status == "requested"
        freed = self.freed_bytes, self.freed_total_bytes, self.freed_alone_bytes
        skipped = "skipped, frees nothing here" if self.status == "no gain" else ""
        remarks = (
            f"peak in {self.phase}" if first else "; ".join(filter(None, [skipped, self.reason]))
        )
        return (
            mark,
            self.name,
            format_bytes(self.predicted_bytes),
            format_bytes(self.upper_bytes or 0),
            *("" if first or size is None else format_bytes(size) for size in freed),
            "yes" if self.fits else "no",
            "" if self.work is None else f"{self.work:.2f}×",
            "" if first else "same" if self.accuracy == "exact" else "change",
            remarks,
        )


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
        return min(
            (option for option in self.options if option.kept),
            key=lambda option: option.upper_bytes or 0,
        )

    def require(self) -> FitOption:
        """Return the first option that fits.

        Raises:
            BudgetError: if none does; names the smallest.
        """
        if self.choice is not None:
            return self.choice
        needs = self.smallest.upper_bytes or 0
        raise BudgetError(
            f"no option fits in {format_bytes(self.budget_bytes)} on {self.device}: the"
            f" smallest, {self.smallest.name}, needs up to {format_bytes(needs)}",
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
        rows = [_HEADER, *(one._cells(at == self.chosen) for at, one in enumerate(self.options))]
        full = [row for row in rows if len(row) == len(_HEADER)]
        widths = [max(map(len, column)) for column in zip(*full, strict=True)]
        widths[1] = max(len(row[1]) for row in rows)
        budget = format_bytes(self.budget_bytes)
        if self.choice is None:
            needs = format_bytes(self.smallest.upper_bytes or 0)
            verdict = f"no option fits in {budget}: the smallest, {self.smallest.name}, needs up to"
            verdict = f"{verdict} {needs}"
        else:
            taken = format_bytes(self.choice.upper_bytes or 0)
            verdict = f"fits in {budget}, up to {taken} of it: {self.choice.settings}"
        return "\n".join([*(_line(row, widths) for row in rows), "", verdict])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    # The text of an option that does not apply stands across all columns.
    whole = len(cells) == len(widths)
    parts = [
        f"{cell:<{width}}" if column in _LEFT_ALIGNED or not whole else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return f"{parts[0]} {'  '.join(parts[1:])}".rstrip()


def fit_to_budget(
    model: nn.Module,
    step: TrainingStep,
    *,
    budget_bytes: int,
    device: str | DeviceProfile = "cpu",
    make_step: MakeStep | None = None,
    batch: int | None = None,
    size: tuple[int, int] | None = None,
    resize: Callable[[tuple[int, int]], nn.Module] | None = None,
    multiple: int = 16,
    full: bool = True,
    progress: Callable[[str], None] | None = None,
    traces: TracesBySettings | None = None,
) -> FitReport:
    """Find the changes with which ``step`` fits ``budget_bytes`` on ``device``.

    Every figure is that of a traced step (`traced_estimate`), none a fixed share. Changes are added
    one to another until the upper bound fits; the others are reported all the same. A change that
    frees nothing where it is tried is skipped, unless it costs nothing either, and of the batches
    between half and one only those that are needed are tried. On the CPU the figures are those of
    a process with the C heap as it comes.

    Args:
        model: as in `estimate`, like ``device``.
        make_step: ``make_step(batch, (height, width))`` returns a step with other inputs, from
            which inputs, keywords and loss are taken; without it batch and images stay unchanged.
        batch: the batch that it made ``step`` with, by default from the shape of the first tensor.
        size: the (height, width) that it made ``step`` with, by the same default.
        resize: ``resize((height, width))`` returns the model for images of another size, if it is
            made for images of one size.
        multiple: smaller images have sides that are a multiple of this.
        full: if False, the search ends at the first option that fits, and no change is traced on
            its own, which takes a fraction of the time.
        progress: called with the name of each option before it is traced.
        traces: as in `find_fit`.

    Raises:
        ModelError: if the step as requested cannot be traced.
        UsageError: for invalid options.
    """
    profile = load_profile(device) if isinstance(device, str) else device
    requested = StepMemorySettings.from_step(step, batch, size)
    if make_step is not None:
        _check_factory(make_step, step, requested)
    variants = _ModuleVariants(requested, model, step, make_step, resize, multiple)
    return find_fit(variants, profile, budget_bytes, full=full, progress=progress, traces=traces)


class StepVariants(Protocol):
    """A training step, and those with other settings."""

    @property
    def requested(self) -> StepMemorySettings:
        """Settings of the step."""
        ...

    @property
    def heap(self) -> HeapMode | None:
        """Heap of the process that will run it, as in `estimate`."""
        ...

    def changes(self, profile: DeviceProfile) -> Iterable[OptionChange]:
        """Iterate over the options of the step on a device, in the order of trial."""
        ...

    def build(self, settings: StepMemorySettings) -> tuple[nn.Module, TraceableStep, int]:
        """Return the module, the step and how many micro-batches of ``settings`` it traces."""
        ...


# Traces by the settings of their step, which devices share where it allocates alike.
TracesBySettings = defaultdict[StepMemorySettings, TracesOfStep]


def find_fit(
    variants: StepVariants,
    profile: DeviceProfile,
    budget_bytes: int,
    *,
    full: bool = True,
    progress: Callable[[str], None] | None = None,
    traces: TracesBySettings | None = None,
) -> FitReport:
    """Find the changes with which a step fits ``budget_bytes`` on a device.

    ``traces`` are those of the same step for other devices, which are used and added to. All else
    is as in `fit_to_budget`.
    """
    started = time.perf_counter()
    if budget_bytes <= 0:
        raise UsageError(f"the budget must be above 0, not {budget_bytes} bytes")
    tell = progress or (lambda name: None)
    tell("as requested")
    search = _Search(variants, profile, budget_bytes, traces)
    search.run(variants.changes(profile), full, tell)
    return FitReport(
        device=profile.name,
        budget_bytes=budget_bytes,
        requested=search.baseline.estimate,
        options=tuple(search.options),
        chosen=search.chosen,
        seconds=time.perf_counter() - started,
    )


class _Figures(NamedTuple):
    estimate: Estimate
    work: float  # multiply-adds of a whole step, without validation


@dataclass(frozen=True)
class _ModuleVariants:
    """Variants of a step of any module: the arguments of `fit_to_budget`.

    On the CPU the training itself will run in a process that sets nothing.
    """

    requested: StepMemorySettings
    model: nn.Module
    step: TrainingStep
    make_step: MakeStep | None
    resize: Callable[[tuple[int, int]], nn.Module] | None
    multiple: int
    heap: HeapMode | None = "default"

    def changes(self, profile: DeviceProfile) -> Iterable[OptionChange]:
        return option_changes(
            self.requested,
            self.step,
            self.model,
            profile,
            resizable=self.make_step is not None,
            multiple=self.multiple,
        )

    def build(self, settings: StepMemorySettings) -> tuple[nn.Module, TraceableStep, int]:
        step = change_settings(self.step, self.requested, settings, self.make_step)
        model = self.model
        if self.resize is not None and settings.size not in (None, self.requested.size):
            model = self.resize(settings.size)
        return model, step, step.accumulate


@dataclass
class _Search:
    """Prices each combination of settings once, and goes through the changes in order."""

    variants: StepVariants
    profile: DeviceProfile
    budget_bytes: int
    traces: TracesBySettings | None
    options: list[FitOption] = field(default_factory=list)
    known: dict[StepMemorySettings, _Figures] = field(default_factory=dict)

    @functools.cached_property
    def baseline(self) -> _Figures:
        try:
            return self.figures(self.variants.requested)
        except LowtideError:
            raise
        except Exception as error:
            raise ModelError(
                f"the training step cannot be traced: {_first_line(error)}",
                hint="check that the model accepts these inputs; run it once with real ones",
            ) from error

    @property
    def chosen(self) -> int | None:
        fitting = (at for at, option in enumerate(self.options) if option.fits and option.kept)
        return next(fitting, None)

    def run(self, changes: Iterable[OptionChange], full: bool, tell: Callable[[str], None]) -> None:
        now, settings = self.baseline, self.variants.requested
        self._add("as requested", "requested", settings, now, now)
        for change in changes:
            fits = self.chosen is not None
            if fits and (change.intermediate or not full):
                continue
            tell(change.name)
            changed = settings.model_copy(update=change.values)
            found = change.refusal or self._attempt(changed)
            more: dict[str, Any] = {"accuracy": change.accuracy, "reason": change.note}
            if isinstance(found, str):
                more["reason"] = found
                self.options.append(
                    FitOption(name=change.name, status="not applicable", settings=settings, **more)
                )
                continue
            if full:
                alone = self._attempt(self.variants.requested.model_copy(update=change.values))
                more["freed_alone_bytes"] = None if isinstance(alone, str) else self._freed(alone)
            gain = now.estimate.upper_bytes - found.estimate.upper_bytes
            kept = gain > 0 or (gain == 0 and change.free)
            status = "no gain" if not kept else "not needed" if fits else "applied"
            self._add(change.name, status, changed, found, now, **more)
            if kept:
                now, settings = found, changed

    def _attempt(self, settings: StepMemorySettings) -> _Figures | str:
        """Return the figures of a step with ``settings``, or why the model cannot run it."""
        try:
            return self.figures(settings)
        except LowtideError as error:
            return error.message
        except Exception as error:  # noqa: BLE001 - whatever the model cannot do is reported
            return _first_line(error)

    def _freed(self, figures: _Figures) -> int:
        return self.baseline.estimate.predicted_bytes - figures.estimate.predicted_bytes

    def _add(
        self,
        name: str,
        status: Status,
        settings: StepMemorySettings,
        figures: _Figures,
        before: _Figures,
        **more: Any,
    ) -> None:
        found, base_work = figures.estimate, self.baseline.work
        self.options.append(
            FitOption(
                name=name,
                status=status,
                settings=settings,
                predicted_bytes=found.predicted_bytes,
                upper_bytes=found.upper_bytes,
                freed_bytes=before.estimate.predicted_bytes - found.predicted_bytes,
                freed_total_bytes=self._freed(figures),
                fits=found.upper_bytes <= self.budget_bytes,
                work=figures.work / base_work if base_work else None,
                phase=found.phase,
                operator=found.operator,
                **more,
            )
        )

    def figures(self, settings: StepMemorySettings) -> _Figures:
        if settings in self.known:
            return self.known[settings]
        model, step, traced = self.variants.build(settings)
        traces = None if self.traces is None else self.traces[settings]
        estimate = traced_estimate(
            model, step, self.profile, heap=self.variants.heap, traced=traces
        )
        assert estimate.trace is not None
        work = multiply_adds(estimate.trace, ("forward", "backward"))
        if self.known:
            # Traces are large; only that of the requested step is used later.
            estimate._trace = None
        figures = _Figures(estimate, work * settings.accumulate / traced)
        return self.known.setdefault(settings, figures)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:120]


def _check_factory(make_step: MakeStep, step: TrainingStep, requested: StepMemorySettings) -> None:
    """Check that ``make_step`` reproduces ``step``: other figures would not compare."""
    if requested.batch is None or requested.size is None:
        raise UsageError("could not infer batch= and size= from the step's inputs: pass them")
    made = make_step(requested.batch, requested.size)
    shapes = [
        [tuple(tensor.shape) for tensor in tensors_of([list(s.inputs), dict(s.keywords)])]
        for s in (step, made)
    ]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"make_step({requested.batch}, {requested.size}) returns inputs of shapes {shapes[1]},"
            f" but those of the step are {shapes[0]}",
            hint="pass the batch= and size= that the step was made with",
        )
