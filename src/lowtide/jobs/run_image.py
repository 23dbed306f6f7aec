"""Run one image: open, execute the plan, measure, write, report."""

from __future__ import annotations

import time
from collections.abc import Callable

from lowtide.core.errors import NotFiniteError, OutOfMemoryError
from lowtide.core.heap import set_heap_mode
from lowtide.core.progress import Progress
from lowtide.jobs.accuracy import measure_accuracy
from lowtide.jobs.finish import ComputedImage, ImageJob, JobTimer, is_oom, replan_smaller
from lowtide.jobs.network_compile import network_for
from lowtide.jobs.planning import ImageTaskPlan, plan_image
from lowtide.jobs.report import ImageReport
from lowtide.jobs.session import UpscaleSession
from lowtide.jobs.workers import divide_threads
from lowtide.media import AsyncWriter, open_image, open_sink
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.oom import trim_allocators
from lowtide.memory.plan import Plan
from lowtide.streaming.tiles.runner import RunOutcome, execute_plan

# Resident memory may grow by 1/_MORE of the expected bytes before the heap is trimmed again; _NEW
# is the share of coming bytes that does not fit the heap's free blocks.
_MORE, _NEW = 8, 0.5


def run_image(context: UpscaleSession, work: ImageJob) -> ComputedImage:
    """Compute all rows of one image, which are written meanwhile and after.

    No file exists at the target before the result is committed. After an out-of-memory error the
    image is planned again for less, at most three times. A streamed run whose values are not finite
    in half precision is run again in fp32: a single band cannot be, since others depend on it.
    """
    while True:
        clock = JobTimer(work)
        work.tries += 1
        failure: BaseException | None
        task = plan_image(
            work.source,
            work.target,
            context.prepared,
            context.settings,
            context.budget,
            below=work.below,
            book=context.book,
            images=context.images,
        )
        try:
            return _compute(context, work, task)
        except NotFiniteError:
            if task.plan.precision == "fp32":
                raise
            failure = None
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = error
        finally:
            clock.stop()
        # Outside the handler: only here can the frames that hold the tensors be freed.
        if failure is None:
            context.land_all()
            context, work.below = context.in_fp32(), None
            beyond = f"values exceed the range of {task.plan.precision}"
            work.events.append(f"{beyond}: run again in fp32")
        else:
            replan_smaller(context, work, task, failure)


def _compute(context: UpscaleSession, work: ImageJob, task: ImageTaskPlan) -> ComputedImage:
    settings, plan = context.settings, task.plan
    waiting = context.make_room(task)
    context.begin(plan)
    set_heap_mode("gives back" if plan.heap == "gives back" else "keeps")
    beside = context.writing()
    reading = open_image(work.source, max_pixels=settings.max_pixels, scratch_dir=context.scratch)
    if reading.clear:
        task.notes.append("alpha is 0 everywhere and is kept; color is upscaled as if opaque")
    with reading:
        sink = open_sink(
            work.target,
            task.made,
            metadata=reading.metadata,
            strip_metadata=settings.strip_metadata,
            options=settings.encode,
            resize_to=task.resize_to,
            clear=reading.clear,
            otherwise=task.sizes.format,
            part=work.part,
        )
        if waiting:
            sink = AsyncWriter(sink, waiting)
        try:
            holding = _HeldMemory(context, plan, waiting)
            with divide_threads(plan.lanes, context.threads):
                network = network_for(context, work, plan, task.notes)
                outcome = execute_plan(
                    network,
                    reading,
                    sink,
                    plan,
                    others=context.prepared.others,
                    on_rows=_row_counter(context, work, task.made.height),
                    cancel=context.cancel,
                    over_budget=holding.over_budget,
                    make_room=holding.make_room,
                    programs=context.prepared.programs,
                    scratch=context.scratch,
                )
            sink.close_rows()
            used = context.lap()
            accuracy, measuring = measure_accuracy(
                context, plan, work.source, context.budget.device_bytes - waiting
            )
        except BaseException:
            sink.abort()
            raise
    report = ImageReport(
        input=str(work.source),
        output=str(work.target),
        status="done",
        width=task.facts.info.width,
        height=task.facts.info.height,
        out_width=task.written.width,
        out_height=task.written.height,
        plan=plan,
        accuracy=accuracy,
        events=_events(outcome),
    )
    return ComputedImage(
        context,
        work,
        task,
        sink,
        report,
        used,
        measuring,
        _writing(plan, waiting),
        beside,
        run_image,
    )


def _writing(plan: Plan, waiting: int) -> LedgerRow:
    """Return the memory that an image holds while its last rows are being written."""
    formats = next(row for row in plan.ledger if row.name == "file formats")
    return formats.model_copy(
        update={
            "name": "being written",
            "value": formats.value + waiting // 2,
            "upper": formats.upper + waiting,
        }
    )


class _HeldMemory:
    """Resident memory of a run, with ``waiting`` bytes that are still to be written.

    Tiles fit the free blocks that tiles leave in the heap. Bands differ in size, and over hundreds
    of them the heap would keep several times the live bytes, so it is trimmed above a limit.
    """

    def __init__(self, context: UpscaleSession, plan: Plan, waiting: int) -> None:
        self._meter, self._budget = context.meter, context.budget.device_bytes
        self._device = plan.device
        banded = plan.strategy == "streamed"
        self._expected = waiting + (plan.predicted_bytes if banded else plan.upper_bytes)
        self._limit = self._expected

    def make_room(self, coming: int) -> int:
        """Return the resident bytes plus ``coming``, after trimming the heap if needed.

        The heap is trimmed only above the expected bytes.
        """
        new = int(coming * _NEW)
        held = self._meter.now_bytes + new
        if held > self._limit:
            trim_allocators(self._device)
            held = self._meter.now_bytes + new
            # If that many bytes are live, trimming each time would only take time.
            self._limit = max(self._expected, held + self._expected // _MORE)
        return held

    def over_budget(self) -> bool:
        """Return whether the resident bytes exceed the budget."""
        return self.make_room(0) > self._budget


def _row_counter(
    context: UpscaleSession, work: ImageJob, total: int
) -> Callable[[int], None] | None:
    progress = context.progress
    if progress is None:
        return None
    started, done = time.perf_counter(), 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        moment = Progress(
            phase="run",
            name=work.source.name,
            done=done,
            total=total,
            image=work.index,
            images=context.images,
            elapsed=time.perf_counter() - started,
            memory_bytes=context.meter.now_bytes,
            peak_bytes=context.meter.peak_bytes,
            budget_bytes=context.budget.device_bytes,
        )
        progress(moment)

    advance(0)
    return advance


def _events(outcome: RunOutcome) -> list[str]:
    redone = [f"{outcome.redone} batches had values that are not finite and were run again in fp32"]
    return outcome.events + (redone if outcome.redone else [])
