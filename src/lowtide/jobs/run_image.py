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
_GROWTH_DIVISOR, _NEW_BLOCKS_SHARE = 8, 0.5


def run_image(session: UpscaleSession, job: ImageJob) -> ComputedImage:
    """Compute all rows of one image, which are written meanwhile and after.

    No file exists at the target before the result is committed. After an out-of-memory error the
    image is planned again for less, at most three times. A streamed run whose values are not finite
    in half precision is run again in fp32: a single band cannot be, since others depend on it.
    """
    while True:
        clock = JobTimer(job)
        job.tries += 1
        failure: BaseException | None
        task = plan_image(
            job.source,
            job.target,
            session.prepared,
            session.settings,
            session.budget,
            limit_bytes=job.limit_bytes,
            plan_file=session.plan_file,
            images=session.images,
        )
        try:
            return _compute(session, job, task)
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
            session.commit_all()
            session, job.limit_bytes = session.in_fp32(), None
            beyond = f"values exceed the range of {task.plan.precision}"
            job.events.append(f"{beyond}: run again in fp32")
        else:
            replan_smaller(session, job, task, failure)


def _compute(session: UpscaleSession, job: ImageJob, task: ImageTaskPlan) -> ComputedImage:
    settings, plan = session.settings, task.plan
    queue_bytes = session.make_room(task)
    session.begin(plan)
    set_heap_mode("trim" if plan.heap == "trim" else "cache")
    others_row = session.writing_row()
    reading = open_image(job.source, max_pixels=settings.max_pixels, scratch_dir=session.scratch)
    if reading.zero_alpha:
        task.notes.append("alpha is 0 everywhere and is kept; color is upscaled as if opaque")
    with reading:
        sink = open_sink(
            job.target,
            task.upscaled,
            metadata=reading.metadata,
            strip_metadata=settings.strip_metadata,
            options=settings.encode_options,
            resize_to=task.resize_to,
            zero_alpha=reading.zero_alpha,
            default_format=task.sizes.format,
            part=job.part,
        )
        if queue_bytes:
            sink = AsyncWriter(sink, queue_bytes)
        try:
            held_memory = _HeldMemory(session, plan, queue_bytes)
            with divide_threads(plan.device_count, session.threads):
                network = network_for(session, job, plan, task.notes)
                program = (
                    session.prepared.programs.program(*plan.network_size)
                    if plan.strategy == "streamed"
                    else None
                )
                outcome = execute_plan(
                    network,
                    reading,
                    sink,
                    plan,
                    replicas=session.prepared.replicas,
                    on_rows=_row_counter(session, job, task.upscaled.height),
                    cancel=session.cancel,
                    over_budget=held_memory.over_budget,
                    before_step=held_memory.make_room,
                    program=program,
                    scratch=session.scratch,
                )
            sink.close_rows()
            used = session.lap()
            accuracy, measuring = measure_accuracy(
                session, plan, job.source, session.budget.device_bytes - queue_bytes
            )
        except BaseException:
            sink.abort()
            raise
    report = ImageReport(
        input=str(job.source),
        output=str(job.target),
        status="done",
        width=task.facts.info.width,
        height=task.facts.info.height,
        out_width=task.output.width,
        out_height=task.output.height,
        plan=plan,
        accuracy=accuracy,
        events=_events(outcome),
    )
    return ComputedImage(
        session,
        job,
        task,
        sink,
        report,
        used,
        measuring,
        _writing_row(plan, queue_bytes),
        others_row,
        run_image,
    )


def _writing_row(plan: Plan, queue_bytes: int) -> LedgerRow:
    """Return the memory that an image holds while its last rows are being written."""
    formats = next(row for row in plan.ledger if row.name == "file formats")
    return formats.model_copy(
        update={
            "name": "being written",
            "value": formats.value + queue_bytes // 2,
            "upper": formats.upper + queue_bytes,
        }
    )


class _HeldMemory:
    """Resident memory of a run, with ``queue_bytes`` bytes that are still to be written.

    Tiles fit the free blocks that tiles leave in the heap. Bands differ in size, and over hundreds
    of them the heap would keep several times the live bytes, so it is trimmed above a limit.
    """

    def __init__(self, session: UpscaleSession, plan: Plan, queue_bytes: int) -> None:
        self._meter, self._budget = session.meter, session.budget.device_bytes
        self._device = plan.device
        banded = plan.strategy == "streamed"
        self._expected = queue_bytes + (plan.predicted_bytes if banded else plan.upper_bytes)
        self._limit = self._expected

    def make_room(self, new_bytes: int) -> int:
        """Return the resident bytes plus ``new_bytes``, after trimming the heap if needed.

        The heap is trimmed only above the expected bytes.
        """
        new = int(new_bytes * _NEW_BLOCKS_SHARE)
        held = self._meter.current_bytes + new
        if held > self._limit:
            trim_allocators(self._device)
            held = self._meter.current_bytes + new
            # If that many bytes are live, trimming each time would only take time.
            self._limit = max(self._expected, held + self._expected // _GROWTH_DIVISOR)
        return held

    def over_budget(self) -> bool:
        """Return whether the resident bytes exceed the budget."""
        return self.make_room(0) > self._budget


def _row_counter(
    session: UpscaleSession, job: ImageJob, total: int
) -> Callable[[int], None] | None:
    progress = session.progress
    if progress is None:
        return None
    started, done = time.perf_counter(), 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        event = Progress(
            phase="run",
            name=job.source.name,
            done=done,
            total=total,
            image=job.index,
            images=session.images,
            elapsed=time.perf_counter() - started,
            memory_bytes=session.meter.current_bytes,
            peak_bytes=session.meter.peak_bytes,
            budget_bytes=session.budget.device_bytes,
        )
        progress(event)

    advance(0)
    return advance


def _events(outcome: RunOutcome) -> list[str]:
    redone = [
        f"{outcome.fp32_reruns} batches had values that are not finite and were run again in fp32"
    ]
    return outcome.events + (redone if outcome.fp32_reruns else [])
