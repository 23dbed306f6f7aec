"""Search for the options with which a training step fits a memory budget.

Each option is traced, because what a change frees depends on where the peak is: checkpointing does
nothing for a peak in the optimizer's step, and no attention kernel helps one in the convolutions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lowtide.core.errors import LowtideError, ModelError, UsageError
from lowtide.core.heap import HeapMode
from lowtide.memory.plan_store import StoredTable
from lowtide.memory.prediction.calibration import Calibration
from lowtide.memory.prediction.estimate import Estimate, traced_estimate
from lowtide.memory.profiles import DeviceProfile, load_profile
from lowtide.memory.tracing.macs_count import multiply_adds
from lowtide.memory.tracing.steps import TrainingStep, tensors_of
from lowtide.memory.training.fit_report import KEPT_STATUSES, FitOption, FitReport, Status
from lowtide.memory.training.options import (
    MakeStep,
    OptionChange,
    StepSettings,
    apply_settings,
    option_changes,
)

__all__ = ["FitOption", "FitReport", "MakeStep", "StepSettings", "fit_to_budget"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class _Figures(NamedTuple):
    estimate: Estimate
    work: float  # multiply-adds of a whole step, without validation


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
    sizes: Sequence[tuple[int, int]] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    full: bool = True,
    operators: StoredTable | None = None,
    calibration: Calibration | None = None,
    heap: HeapMode | None = None,
    progress: Callable[[str], None] | None = None,
) -> FitReport:
    """Find the changes with which ``step`` fits ``budget_bytes`` on ``device``.

    Every figure is that of a traced step (`traced_estimate`), none a fixed share. Changes are added
    one to another until the upper bound fits; the others are reported all the same. A change that
    frees nothing where it is tried is skipped, unless it costs nothing either, and of the batches
    between half and one only those that are needed are tried.

    Args:
        model: as in `estimate`, like ``device``, ``dtype``, ``operators``, ``calibration`` and
            ``heap``.
        make_step: ``make_step(batch, (height, width))`` returns a step with other inputs, from
            which inputs, keywords and loss are taken; without it batch and images stay unchanged.
        batch: the batch that it made ``step`` with, by default from the shape of the first tensor.
        size: the (height, width) that it made ``step`` with, by the same default.
        resize: ``resize((height, width))`` returns the model for images of another size, if it is
            made for images of one size.
        multiple: smaller images have sides that are a multiple of this.
        sizes: smaller images have one of these (height, width) instead.
        strict: whether to raise if nothing fits.
        full: if False, the search ends at the first option that fits, and no change is traced on
            its own, which takes a fraction of the time.
        progress: called with the name of each option before it is traced.

    Raises:
        BudgetError: if nothing fits and ``strict``; names the smallest option.
        ModelError: if the step as requested cannot be traced.
        UsageError: for invalid options.
    """
    started = time.perf_counter()
    if budget_bytes <= 0:
        raise UsageError(f"the budget must be above 0, not {budget_bytes} bytes")
    profile = load_profile(device) if isinstance(device, str) else device
    requested = StepSettings.from_step(step, batch, size)
    if make_step is not None:
        _check_factory(make_step, step, requested)
    report_progress = progress or (lambda name: None)
    report_progress("as requested")
    search = _OptionSearch(
        model,
        step,
        requested,
        profile,
        make_step,
        dtype,
        operators,
        calibration,
        heap,
        budget_bytes,
        resize,
    )
    options = search.run(
        list(
            option_changes(
                requested,
                step,
                model,
                profile,
                low_precision=_is_low_precision(model, dtype),
                resizable=make_step is not None,
                multiple=multiple,
                sizes=sizes,
            )
        ),
        full,
        report_progress,
    )
    fitting = (
        at for at, option in enumerate(options) if option.fits and option.status in KEPT_STATUSES
    )
    report = FitReport(
        device=profile.name,
        budget_bytes=budget_bytes,
        requested=search.baseline.estimate,
        options=tuple(options),
        chosen=next(fitting, None),
        seconds=time.perf_counter() - started,
    )
    if strict:
        report.require()
    return report


class _OptionSearch:
    """Traces each combination of settings once, and goes through the changes in order."""

    def __init__(
        self,
        model: nn.Module,
        step: TrainingStep,
        requested: StepSettings,
        profile: DeviceProfile,
        make_step: MakeStep | None,
        dtype: torch.dtype | None,
        operators: StoredTable | None,
        calibration: Calibration | None,
        heap: HeapMode | None,
        budget_bytes: int,
        resize: Callable[[tuple[int, int]], nn.Module] | None,
    ) -> None:
        self._resize = resize
        self._model, self._step, self._requested, self._profile = model, step, requested, profile
        self._make_step, self._dtype, self._operators = make_step, dtype, operators
        self._calibration, self._budget = calibration, budget_bytes
        self._heap: HeapMode | None = heap
        self._cache: dict[StepSettings, _Figures] = {}
        try:
            self.baseline = self._trace_settings(requested)
        except LowtideError:
            raise
        except Exception as error:
            raise ModelError(
                f"the training step cannot be traced: {_first_line(error)}",
                hint="check that the model accepts these inputs; run it once with real ones",
            ) from error

    def run(
        self, changes: list[OptionChange], full: bool, progress: Callable[[str], None]
    ) -> list[FitOption]:
        """Return the options tried, the step as requested first."""
        current, current_settings = self.baseline, self._requested
        options = [self._option("as requested", "requested", current_settings, current, current)]
        for change in changes:
            if _any_fits(options) and (change.intermediate or not full):
                continue
            progress(change.name)
            settings = current_settings.model_copy(update=change.values)
            try:
                figures = None if change.unavailable_reason else self._trace_settings(settings)
                freed_alone = (
                    self._freed_alone(change) if full and not change.unavailable_reason else None
                )
            except Exception as error:  # noqa: BLE001 - whatever the model cannot do is reported
                change, figures, freed_alone = _not_applicable(change, error), None, None
            if figures is None:
                options.append(
                    FitOption(
                        name=change.name,
                        status="not applicable",
                        settings=current_settings,
                        accuracy=change.accuracy,
                        reason=change.unavailable_reason or "",
                    )
                )
                continue
            status = self._status(change, options, current, figures)
            option = self._option(
                change.name, status, settings, figures, current, change, freed_alone
            )
            options.append(option)
            if status != "no gain":
                current, current_settings = figures, settings
        return options

    def _status(
        self, change: OptionChange, before: list[FitOption], now: _Figures, figures: _Figures
    ) -> Status:
        gain = now.estimate.upper_bytes - figures.estimate.upper_bytes
        if gain < 0 or (gain == 0 and not change.free):
            return "no gain"
        return "not needed" if _any_fits(before) else "applied"

    def _freed_alone(self, change: OptionChange) -> int:
        figures = self._trace_settings(self._requested.model_copy(update=change.values))
        return self.baseline.estimate.predicted_bytes - figures.estimate.predicted_bytes

    def _option(
        self,
        name: str,
        status: Status,
        settings: StepSettings,
        figures: _Figures,
        before: _Figures,
        change: OptionChange | None = None,
        freed_alone: int | None = None,
    ) -> FitOption:
        estimate, baseline = figures.estimate, self.baseline
        predicted = estimate.predicted_bytes
        return FitOption(
            name=name,
            status=status,
            settings=settings,
            accuracy=change.accuracy if change else "exact",
            reason=change.note if change else "",
            predicted_bytes=predicted,
            upper_bytes=estimate.upper_bytes,
            freed_bytes=before.estimate.predicted_bytes - predicted,
            freed_total_bytes=baseline.estimate.predicted_bytes - predicted,
            freed_alone_bytes=freed_alone,
            fits=estimate.upper_bytes <= self._budget,
            host_bytes=self._ema_bytes() if settings.ema == "host" else 0,
            work=figures.work / baseline.work if baseline.work else None,
            phase=estimate.phase,
            operator=estimate.operator,
        )

    def _ema_bytes(self) -> int:
        """Return bytes of an EMA of the weights: the trainable ones, in their dtype."""
        return sum(
            weight.numel() * (self._dtype or weight.dtype).itemsize
            for weight in self._model.parameters()
            if weight.requires_grad
        )

    def _trace_settings(self, settings: StepSettings) -> _Figures:
        if settings not in self._cache:
            step = apply_settings(self._step, self._requested, settings, self._make_step)
            model = self._model
            if self._resize is not None and settings.size not in (None, self._requested.size):
                model = self._resize(settings.size)
            estimate = traced_estimate(
                model,
                step,
                self._profile,
                dtype=self._dtype,
                operators=self._operators,
                calibration=self._calibration,
                heap=self._heap,
            )
            assert estimate.trace is not None
            work = multiply_adds(estimate.trace, ("forward", "backward"))
            passes = settings.accumulate / step.accumulate
            if self._cache:
                # Traces are large; only that of the requested step is used later.
                estimate._trace = None
            self._cache[settings] = _Figures(estimate, work * passes)
        return self._cache[settings]


def _any_fits(options: list[FitOption]) -> bool:
    return any(option.fits and option.status in KEPT_STATUSES for option in options)


def _not_applicable(change: OptionChange, error: Exception) -> OptionChange:
    message = error.message if isinstance(error, LowtideError) else _first_line(error)
    return OptionChange(change.name, {}, change.accuracy, unavailable_reason=message)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:120]


def _is_low_precision(model: nn.Module, dtype: torch.dtype | None) -> bool:
    return (dtype or next((w.dtype for w in model.parameters()), torch.float32)) in _LOW_PRECISION


def _check_factory(make_step: MakeStep, step: TrainingStep, requested: StepSettings) -> None:
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
