"""Commit computed images, and replan after an out-of-memory error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.units import format_bytes
from lowtide.jobs.planning import ImageTaskPlan
from lowtide.jobs.report import ImageReport, MemoryReport
from lowtide.jobs.session import UpscaleSession
from lowtide.media import AsyncWriter, ImageSink
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.meter import Usage
from lowtide.memory.oom import free_exception, is_out_of_memory
from lowtide.memory.plan import Plan
from lowtide.memory.prediction.calibration import Residual, ResidualStore

_TRIES = 3
_STEP_DOWN = 0.7


@dataclass
class ImageJob:
    """One image of a job, and its state across retries.

    ``before_commit`` is called when the file is complete but not yet renamed to ``target``;
    ``part`` is its temporary name until then, or None for a random one. ``below`` is the limit in
    bytes for the next plan after an out-of-memory error.
    """

    source: Path
    target: Path
    index: int
    before_commit: Callable[[], None] | None = None
    part: Path | None = None
    tries: int = 0
    below: int | None = None
    events: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass
class ComputedImage:
    """Image whose rows are all computed; `land` waits until they are written.

    ``writing`` is the memory that it holds until then, and ``beside`` the memory of other images
    that were being written while it was computed. ``alone`` is true while no other image has begun
    since; ``again`` computes the image once more.
    """

    context: UpscaleSession
    work: ImageJob
    task: ImageTaskPlan
    sink: ImageSink | AsyncWriter
    report: ImageReport
    used: Usage
    measuring: Usage | None
    writing: LedgerRow
    beside: LedgerRow
    again: Callable[[UpscaleSession, ImageJob], ComputedImage]
    alone: bool = True

    def land(self) -> ImageReport:
        """Rename the complete file to its target and finish the report.

        After an out-of-memory error the image runs again with a smaller plan.
        """
        clock = JobTimer(self.work)
        failure: BaseException | None = None
        try:
            if self.work.before_commit is not None:
                self.work.before_commit()
            self.sink.commit()
            # Some encoders run only on commit, on the whole image.
            self.used = self.used.with_more(self.context.lap())
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = error
        finally:
            self.sink.abort()  # no effect after the commit
            clock.stop()
        if failure is None:
            return self._reported()
        replan_smaller(self.context, self.work, self.task, failure)
        return self.again(self.context, self.work).land()

    def _reported(self) -> ImageReport:
        work, report, plan = self.work, self.report, self.task.plan
        report.notes = [*self.task.notes, *self.sink.notes]
        report.memory = _memory(plan, self.used, self.measuring, self.beside)
        usual = plan.heap != "gives back" and plan.lanes == 1
        usual = usual and not plan.compiled and not plan.recorded
        usual = usual and self.context.prepared.network.let_go is None
        if self.alone and not report.events and usual:
            # A replanned run is no measure of its plan, and a special mode is no measure of other
            # plans.
            kind = "streamed" if plan.strategy == "streamed" else "tiled"
            predicted = plan.predicted_bytes + self.beside.value
            ResidualStore(plan.device, kind).add(
                Residual(predicted=predicted, measured=self.used.peak_bytes)
            )
        report.events[:0] = work.events
        report.seconds, report.cpu_seconds = work.seconds, work.cpu_seconds
        return report


class JobTimer:
    """Timer that adds wall and CPU seconds to an `ImageJob` on `stop`."""

    def __init__(self, work: ImageJob) -> None:
        self._work, self._started, self._cpu = work, time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self._work.seconds += time.perf_counter() - self._started
        self._work.cpu_seconds += time.process_time() - self._cpu


def is_oom(error: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error."""
    return isinstance(error, OutOfMemoryError) or is_out_of_memory(error)


def replan_smaller(
    context: UpscaleSession, work: ImageJob, task: ImageTaskPlan, failure: BaseException
) -> None:
    """Limit the job's next plan to fewer bytes, and wait for all images in flight.

    Raises:
        OutOfMemoryError: There is no smaller plan, or no try is left.
    """
    free_exception(failure, task.plan.device)
    again = "smaller plan" in task.plan.recovery
    if work.tries == _TRIES or not again or (len(task.plans) == 1 and context.book is None):
        raise _out_of_memory(failure, work.source)
    work.below = int(task.plan.upper_bytes * _STEP_DOWN)
    what = str(failure).partition("\n")[0] or "memory ran out"
    work.events.append(f"{what}; replanned for {format_bytes(work.below)}")
    context.land_all()


def _out_of_memory(failure: BaseException, source: Path) -> OutOfMemoryError:
    if isinstance(failure, OutOfMemoryError):
        return failure
    return OutOfMemoryError(
        f"{source}: memory ran out outside the network ({failure})",
        hint="close other programs, or pass a smaller --budget so that less is planned",
    )


def _memory(plan: Plan, used: Usage, measuring: Usage | None, beside: LedgerRow) -> MemoryReport:
    checking = measuring.peak_bytes if measuring is not None else None
    here = plan.device == "cpu"  # on the CPU the budget is host memory
    return MemoryReport(
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_bytes + here * beside.value,
        upper_bytes=plan.upper_bytes + here * beside.upper,
        peak_bytes=used.peak_bytes,
        high_water_bytes=used.high_water_bytes,
        measuring_peak_bytes=checking,
        within_budget=max(used.peak_bytes, checking or 0) <= plan.budget_bytes,
        measured_as=used.source,
        ledger=(*plan.ledger, *([beside] if beside.upper else [])),
    )
