"""Running one image: open, run the plan, measure, write, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.core.errors import NotFiniteError, OutOfMemoryError
from lowtide.core.heap import trim_heap, use_heap
from lowtide.core.progress import Progress
from lowtide.core.units import format_bytes
from lowtide.jobs.accuracy import measured_accuracy
from lowtide.jobs.context import Context
from lowtide.jobs.planning import Task, plan_image
from lowtide.jobs.report import ImageReport, Memory
from lowtide.media import ImageSink, WriteBehind, open_image, open_sink
from lowtide.memory.estimating.calibration import Residual, ResidualStore
from lowtide.memory.failures import is_out_of_memory, release
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.meter import Usage
from lowtide.memory.plan import Plan
from lowtide.streaming.executor import Outcome, run

_TRIES = 3
_STEP_DOWN = 0.7


@dataclass
class Work:
    """One image of a job, and what happened to it so far.

    ``before_commit`` is called when the file is complete but not yet named.
    """

    source: Path
    target: Path
    index: int
    before_commit: Callable[[], None] | None = None
    tries: int = 0
    below: int | None = None
    events: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass
class Computed:
    """An image whose rows are all made; `land` waits until they are written.

    ``writing`` is what it takes until then. ``alone`` is whether no other image was begun since.
    """

    context: Context
    work: Work
    task: Task
    sink: ImageSink | WriteBehind
    report: ImageReport
    used: Usage
    measuring: Usage | None
    writing: LedgerRow
    beside: LedgerRow
    alone: bool = True

    def land(self) -> ImageReport:
        """Give the file its name and finish the report.

        Where memory runs out, the image is run again by a smaller plan.
        """
        clock = _Clock(self.work)
        failure: BaseException | None = None
        try:
            if self.work.before_commit is not None:
                self.work.before_commit()
            self.sink.commit()
            # Some formats are encoded only now, and all at once.
            self.used = self.used.with_more(self.context.lap())
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not _is_lack(error):
                raise
            failure = error
        finally:
            self.sink.abort()  # which is nothing once the file has its name
            clock.stop()
        if failure is None:
            return self._reported()
        _step_down(self.work, self.task, failure)
        return compute_image(self.context, self.work).land()

    def _reported(self) -> ImageReport:
        work, report, plan = self.work, self.report, self.task.plan
        report.notes = [*self.task.notes, *self.sink.notes]
        report.memory = _memory(plan, self.used, self.measuring, self.beside)
        if self.alone and not report.events and plan.heap != "gives back":
            # A run that had to shrink says nothing of its plan, and one in the other heap nothing
            # of others.
            kind = "streamed" if plan.strategy == "streamed" else "tiled"
            predicted = plan.predicted_bytes + self.beside.value
            ResidualStore(plan.device, kind).add(
                Residual(predicted=predicted, measured=self.used.peak_bytes)
            )
        report.events[:0] = work.events
        report.seconds, report.cpu_seconds = work.seconds, work.cpu_seconds
        return report


class _Clock:
    """Adds the time until `stop` to that of an image."""

    def __init__(self, work: Work) -> None:
        self._work, self._started, self._cpu = work, time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self._work.seconds += time.perf_counter() - self._started
        self._work.cpu_seconds += time.process_time() - self._cpu


def compute_image(context: Context, work: Work) -> Computed:
    """Make all rows of one image, which are written meanwhile, and after.

    Nothing is at the target before the result lands. A run that memory forbids after all is
    planned again for less, at most three times, and one in bands whose values are not finite
    in half precision for fp32: a band alone cannot be, since others depend on it.
    """
    while True:
        clock = _Clock(work)
        work.tries += 1
        failure: BaseException | None
        task = plan_image(
            work.source, work.target, context.prepared, context.settings, context.budget,
            below=work.below, book=context.book,
        )  # fmt: skip
        try:
            return _compute(context, work, task)
        except NotFiniteError:
            if task.plan.precision == "fp32":
                raise
            failure = None
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not _is_lack(error):
                raise
            failure = error
        finally:
            clock.stop()
        # Outside the handler: only now can the frames that hold the tensors be let go.
        if failure is None:
            context, work.below = context.in_fp32(), None
            beyond = f"values beyond the range of {task.plan.precision}"
            work.events.append(f"{beyond}: run again in fp32")
        else:
            _step_down(work, task, failure, book=context.book is not None)
        context.land_all()


def _is_lack(error: BaseException) -> bool:
    return isinstance(error, OutOfMemoryError) or is_out_of_memory(error)


def _step_down(work: Work, task: Task, failure: BaseException, *, book: bool = False) -> None:
    """Ask for a smaller plan the next time; raises `OutOfMemoryError` where there is none."""
    release(failure, task.plan.device)
    again = "smaller plan" in task.plan.recovery
    if work.tries == _TRIES or not again or (len(task.plans) == 1 and not book):
        raise _out_of_memory(failure, work.source)
    work.below = int(task.plan.upper_bytes * _STEP_DOWN)
    what = str(failure).partition("\n")[0] or "memory ran out"
    work.events.append(f"{what}; planned again for {format_bytes(work.below)}")


def _out_of_memory(failure: BaseException, source: Path) -> OutOfMemoryError:
    if isinstance(failure, OutOfMemoryError):
        return failure
    return OutOfMemoryError(
        f"{source}: memory ran out beside the network ({failure})",
        hint="close other programs, or pass a smaller --budget so that less is planned",
    )


def _compute(context: Context, work: Work, task: Task) -> Computed:
    settings, plan = context.settings, task.plan
    waiting = context.make_room(task)
    context.begin(plan)
    use_heap("gives back" if plan.heap == "gives back" else "keeps")
    beside = context.writing()
    reading = open_image(
        work.source, max_pixels=settings.max_pixels, scratch_dir=context.scratch
    )
    with reading:
        sink = open_sink(
            work.target, task.made, metadata=reading.metadata,
            strip_metadata=settings.strip_metadata, options=settings.encode,
            resize_to=task.resize_to,
        )  # fmt: skip
        if waiting:
            sink = WriteBehind(sink, waiting)
        try:
            outcome = run(
                context.prepared.network, reading, sink, plan,
                on_rows=_row_counter(context, work, task.made.height),
                cancel=context.cancel,
                over_budget=lambda: _over_budget(context, plan.upper_bytes + waiting),
                programs=context.prepared.programs, scratch=context.scratch,
            )  # fmt: skip
            sink.close_rows()
            used = context.lap()
            accuracy, measuring = measured_accuracy(
                context, plan, work.source, context.budget.device_bytes - waiting
            )
        except BaseException:
            sink.abort()
            raise
    report = ImageReport(
        input=str(work.source), output=str(work.target), status="done",
        width=task.facts.info.width, height=task.facts.info.height,
        out_width=task.written.width, out_height=task.written.height,
        plan=plan, accuracy=accuracy, events=_events(outcome),
    )  # fmt: skip
    return Computed(
        context, work, task, sink, report, used, measuring, _writing(plan, waiting), beside
    )


def _writing(plan: Plan, waiting: int) -> LedgerRow:
    """What an image takes when its rows are made and not all of them written."""
    formats = next(row for row in plan.ledger if row.name == "file formats")
    return formats.model_copy(update={
        "name": "being written", "value": formats.value + waiting // 2,
        "upper": formats.upper + waiting,
    })  # fmt: skip


def _over_budget(context: Context, expected: int) -> bool:
    """Whether the run holds more than the budget, after giving back what the heap only keeps."""
    if context.meter.now_bytes <= expected:
        return False
    trim_heap()
    return context.meter.now_bytes > context.budget.device_bytes


def _row_counter(context: Context, work: Work, total: int) -> Callable[[int], None] | None:
    progress = context.progress
    if progress is None:
        return None
    started, done = time.perf_counter(), 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        moment = Progress(
            phase="run", name=work.source.name, done=done, total=total,
            image=work.index, images=context.images, elapsed=time.perf_counter() - started,
            memory_bytes=context.meter.now_bytes, peak_bytes=context.meter.peak_bytes,
            budget_bytes=context.budget.device_bytes,
        )  # fmt: skip
        progress(moment)

    advance(0)
    return advance


def _memory(plan: Plan, used: Usage, measuring: Usage | None, beside: LedgerRow) -> Memory:
    checking = measuring.peak_bytes if measuring is not None else None
    here = plan.device == "cpu"  # where host memory is what is judged
    return Memory(
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_bytes + here * beside.value,
        upper_bytes=plan.upper_bytes + here * beside.upper, peak_bytes=used.peak_bytes,
        high_water_bytes=used.high_water_bytes, measuring_peak_bytes=checking,
        within_budget=max(used.peak_bytes, checking or 0) <= plan.budget_bytes,
        measured_as=used.source, ledger=(*plan.ledger, *([beside] if beside.upper else [])),
    )  # fmt: skip


def _events(outcome: Outcome) -> list[str]:
    redone = [f"{outcome.redone} batches were not finite and redone in fp32"]
    return outcome.events + (redone if outcome.redone else [])
