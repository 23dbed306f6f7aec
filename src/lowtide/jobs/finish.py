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
    ``part`` is its temporary name until then, or None for a random one. ``limit_bytes`` is the
    limit in bytes for the next plan after an out-of-memory error.
    """

    source: Path
    target: Path
    index: int
    before_commit: Callable[[], None] | None = None
    part: Path | None = None
    tries: int = 0
    limit_bytes: int | None = None
    events: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass
class ComputedImage:
    """Image whose rows are all computed; `commit` waits until they are written.

    ``writing_row`` is the memory that it holds until then, and ``others_row`` the memory of other
    images that were being written while it was computed. ``undisturbed`` is true while no other
    image has begun since; ``rerun`` computes the image once more.
    """

    session: UpscaleSession
    job: ImageJob
    task: ImageTaskPlan
    sink: ImageSink | AsyncWriter
    report: ImageReport
    usage: Usage
    measurement_usage: Usage | None
    writing_row: LedgerRow
    others_row: LedgerRow
    rerun: Callable[[UpscaleSession, ImageJob], ComputedImage]
    undisturbed: bool = True

    def commit(self) -> ImageReport:
        """Rename the complete file to its target and finish the report.

        After an out-of-memory error the image runs again with a smaller plan.
        """
        clock = JobTimer(self.job)
        failure: BaseException | None = None
        try:
            if self.job.before_commit is not None:
                self.job.before_commit()
            self.sink.commit()
            # Some encoders run only on commit, on the whole image.
            self.usage = self.usage.merged(self.session.lap())
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = error
        finally:
            self.sink.abort()  # no effect after the commit
            clock.stop()
        if failure is None:
            return self._finish_report()
        replan_smaller(self.session, self.job, self.task, failure)
        return self.rerun(self.session, self.job).commit()

    def _finish_report(self) -> ImageReport:
        job, report, plan = self.job, self.report, self.task.plan
        report.notes = [*self.task.notes, *self.sink.notes]
        report.memory = _memory_report(plan, self.usage, self.measurement_usage, self.others_row)
        comparable = plan.heap != "trim" and plan.device_count == 1
        comparable = comparable and not plan.compiled and not plan.cuda_graph
        comparable = comparable and self.session.prepared.network.free_memory is None
        if self.undisturbed and not report.events and comparable:
            # A replanned run is no measure of its plan, and a special mode is no measure of other
            # plans.
            kind = "streamed" if plan.strategy == "streamed" else "tiled"
            predicted = plan.predicted_bytes + self.others_row.value
            ResidualStore(plan.device, kind).add(
                Residual(predicted=predicted, measured=self.usage.peak_bytes)
            )
        report.events[:0] = job.events
        report.seconds, report.cpu_seconds = job.seconds, job.cpu_seconds
        return report


class JobTimer:
    """Timer that adds wall and CPU seconds to an `ImageJob` on `stop`."""

    def __init__(self, job: ImageJob) -> None:
        self._job, self._started, self._cpu = job, time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self._job.seconds += time.perf_counter() - self._started
        self._job.cpu_seconds += time.process_time() - self._cpu


def is_oom(error: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error."""
    return isinstance(error, OutOfMemoryError) or is_out_of_memory(error)


def replan_smaller(
    session: UpscaleSession, job: ImageJob, task: ImageTaskPlan, failure: BaseException
) -> None:
    """Limit the job's next plan to fewer bytes, and wait for all images in flight.

    Raises:
        OutOfMemoryError: There is no smaller plan, or no try is left.
    """
    free_exception(failure, task.plan.device)
    can_replan = "smaller plan" in task.plan.recovery
    if (
        job.tries == _TRIES
        or not can_replan
        or (len(task.plans) == 1 and session.plan_file is None)
    ):
        raise _as_out_of_memory_error(failure, job.source)
    job.limit_bytes = int(task.plan.upper_bytes * _STEP_DOWN)
    what = str(failure).partition("\n")[0] or "memory ran out"
    job.events.append(f"{what}; replanned for {format_bytes(job.limit_bytes)}")
    session.commit_all()


def _as_out_of_memory_error(failure: BaseException, source: Path) -> OutOfMemoryError:
    if isinstance(failure, OutOfMemoryError):
        return failure
    return OutOfMemoryError(
        f"{source}: memory ran out outside the network ({failure})",
        hint="close other programs, or pass a smaller --budget so that less is planned",
    )


def _memory_report(
    plan: Plan, usage: Usage, measurement_usage: Usage | None, others_row: LedgerRow
) -> MemoryReport:
    checking = measurement_usage.peak_bytes if measurement_usage is not None else None
    here = plan.device == "cpu"  # on the CPU the budget is host memory
    return MemoryReport(
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_bytes + here * others_row.value,
        upper_bytes=plan.upper_bytes + here * others_row.upper,
        peak_bytes=usage.peak_bytes,
        high_water_bytes=usage.high_water_bytes,
        measurement_peak_bytes=checking,
        within_budget=max(usage.peak_bytes, checking or 0) <= plan.budget_bytes,
        source=usage.source,
        ledger=(*plan.ledger, *([others_row] if others_row.upper else [])),
    )
