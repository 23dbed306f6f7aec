"""Running one image: open, run the plan, measure, write, report."""

from __future__ import annotations

import time
from collections.abc import Callable

from lowtide.core.errors import NotFiniteError, OutOfMemoryError
from lowtide.core.heap import trim_heap, use_heap
from lowtide.core.progress import Progress
from lowtide.jobs.accuracy import measured_accuracy
from lowtide.jobs.compiling import network_for
from lowtide.jobs.computed import Clock, Computed, Work, is_lack, step_down
from lowtide.jobs.context import Context
from lowtide.jobs.planning import Task, plan_image
from lowtide.jobs.report import ImageReport
from lowtide.jobs.workers import threads_each
from lowtide.media import WriteBehind, open_image, open_sink
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.plan import Plan
from lowtide.streaming.executor import Outcome, run


def compute_image(context: Context, work: Work) -> Computed:
    """Make all rows of one image, which are written meanwhile, and after.

    Nothing is at the target before the result lands. A run that memory forbids after all is
    planned again for less, at most three times, and one in bands whose values are not finite
    in half precision for fp32: a band alone cannot be, since others depend on it.
    """
    while True:
        clock = Clock(work)
        work.tries += 1
        failure: BaseException | None
        task = plan_image(
            work.source, work.target, context.prepared, context.settings, context.budget,
            below=work.below, book=context.book, images=context.images,
        )  # fmt: skip
        try:
            return _compute(context, work, task)
        except NotFiniteError:
            if task.plan.precision == "fp32":
                raise
            failure = None
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_lack(error):
                raise
            failure = error
        finally:
            clock.stop()
        # Outside the handler: only now can the frames that hold the tensors be let go.
        if failure is None:
            context.land_all()
            context, work.below = context.in_fp32(), None
            beyond = f"values beyond the range of {task.plan.precision}"
            work.events.append(f"{beyond}: run again in fp32")
        else:
            step_down(context, work, task, failure)


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
            with threads_each(plan.lanes, context.threads):
                network = network_for(context, work, plan, task.notes)
                outcome = run(
                    network, reading, sink, plan,
                    others=context.prepared.others,
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
        context, work, task, sink, report, used, measuring, _writing(plan, waiting), beside,
        compute_image,
    )  # fmt: skip


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


def _events(outcome: Outcome) -> list[str]:
    redone = [f"{outcome.redone} batches were not finite and redone in fp32"]
    return outcome.events + (redone if outcome.redone else [])
