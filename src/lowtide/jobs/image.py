"""Running one image: open, run the plan, measure, commit, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.heap import trim_heap, use_heap
from lowtide.core.progress import Cancel, Progress, ProgressCallback
from lowtide.core.units import format_bytes
from lowtide.jobs.planning import Task, plan_image
from lowtide.jobs.prepare import Prepared
from lowtide.jobs.report import Accuracy, ErrorFigure, ImageReport, Memory
from lowtide.jobs.settings import UpscaleSettings
from lowtide.media import open_image, open_sink
from lowtide.memory.budget import Budget
from lowtide.memory.estimating.calibration import Residual, ResidualStore
from lowtide.memory.failures import is_out_of_memory, release
from lowtide.memory.meter import CudaMeter, HostMeter, Usage
from lowtide.memory.plan import Plan
from lowtide.memory.replay import PlanBook
from lowtide.streaming.executor import Outcome, run
from lowtide.streaming.pricing.ledger import affordable_pixels
from lowtide.streaming.sampling import MeasuredError, measure_execution, measure_precision

_TRIES = 3
_STEP_DOWN = 0.7


@dataclass
class Context:
    """What all images of a job share."""

    prepared: Prepared
    settings: UpscaleSettings
    budget: Budget
    meter: HostMeter | CudaMeter
    progress: ProgressCallback | None
    cancel: Cancel
    scratch: Path | None
    images: int = 1
    book: PlanBook | None = None


def run_image(
    context: Context, source: Path, target: Path, index: int,
    before_commit: Callable[[], None] | None = None,
) -> ImageReport:  # fmt: skip
    """Upscale one file. Nothing is left at ``target`` unless it is complete.

    A run that memory forbids after all is planned again for less, at most three times.
    ``before_commit`` is called when the file is complete but not yet named.
    """
    started, cpu = time.perf_counter(), time.process_time()
    events: list[str] = []
    below: int | None = None
    trim_heap()  # what the last image left would count against this one
    context.meter.lap()
    attempt = 0
    while True:
        attempt += 1
        task = plan_image(
            source, target, context.prepared, context.settings, context.budget, below=below,
            book=context.book,
        )  # fmt: skip
        try:
            report = _attempt(context, task, source, target, index, before_commit)
        except (OutOfMemoryError, RuntimeError, MemoryError) as error:
            if not isinstance(error, OutOfMemoryError) and not is_out_of_memory(error):
                raise
            failure = error
        else:
            report.events[:0] = events
            report.seconds = time.perf_counter() - started
            report.cpu_seconds = time.process_time() - cpu
            return report
        # Outside the handler: only now can the frames that hold the tensors be let go.
        release(failure, task.plan.device)
        again = "smaller plan" in task.plan.recovery
        if attempt == _TRIES or not again or (len(task.plans) == 1 and context.book is None):
            raise _out_of_memory(failure, source)
        below = int(task.plan.upper_bytes * _STEP_DOWN)
        what = str(failure).partition("\n")[0] or "memory ran out"
        events.append(f"{what}; planned again for {format_bytes(below)}")


def _out_of_memory(failure: BaseException, source: Path) -> OutOfMemoryError:
    if isinstance(failure, OutOfMemoryError):
        return failure
    return OutOfMemoryError(
        f"{source}: memory ran out beside the network ({failure})",
        hint="close other programs, or pass a smaller --budget so that less is planned",
    )


def _attempt(
    context: Context, task: Task, source: Path, target: Path, index: int,
    before_commit: Callable[[], None] | None,
) -> ImageReport:  # fmt: skip
    settings, plan = context.settings, task.plan
    use_heap("gives back" if plan.heap == "gives back" else "keeps")
    reading = open_image(source, max_pixels=settings.max_pixels, scratch_dir=context.scratch)
    with reading, open_sink(
        target, task.made, metadata=reading.metadata, strip_metadata=settings.strip_metadata,
        options=settings.encode, resize_to=task.resize_to,
    ) as sink:  # fmt: skip
        outcome = run(
            context.prepared.network, reading, sink, plan,
            on_rows=_row_counter(context, source, task.made.height, index),
            cancel=context.cancel,
            over_budget=lambda: _over_budget(context, plan),
            programs=context.prepared.programs, scratch=context.scratch,
        )  # fmt: skip
        running = context.meter.lap()
        accuracy, measuring = _measured_accuracy(context, plan, source)
        if before_commit is not None:
            before_commit()
        sink.commit()
        notes = [*task.notes, *sink.notes]
        # Some formats are encoded only now, and all at once.
        used = running.with_more(context.meter.lap())
    if not outcome.events and plan.heap != "gives back":
        # A run that had to shrink says nothing of its plan, and one in the other heap nothing of
        # others.
        kind = "streamed" if plan.strategy == "streamed" else "tiled"
        ResidualStore(plan.device, kind).add(
            Residual(predicted=plan.predicted_bytes, measured=used.peak_bytes)
        )
    return ImageReport(
        input=str(source), output=str(target), status="done",
        width=task.facts.info.width, height=task.facts.info.height,
        out_width=task.written.width, out_height=task.written.height,
        plan=plan, accuracy=accuracy, memory=_memory(plan, used, measuring),
        notes=notes, events=_events(outcome),
    )  # fmt: skip


def _over_budget(context: Context, plan: Plan) -> bool:
    """Whether the run holds more than the budget, after giving back what the heap only keeps."""
    if context.meter.now_bytes <= plan.upper_bytes:
        return False
    trim_heap()
    return context.meter.now_bytes > context.budget.device_bytes


def _row_counter(
    context: Context, source: Path, total: int, index: int
) -> Callable[[int], None] | None:
    progress = context.progress
    if progress is None:
        return None
    started, done = time.perf_counter(), 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        moment = Progress(
            phase="run", name=source.name, done=done, total=total,
            image=index, images=context.images, elapsed=time.perf_counter() - started,
            memory_bytes=context.meter.now_bytes, peak_bytes=context.meter.peak_bytes,
            budget_bytes=context.budget.device_bytes,
        )  # fmt: skip
        progress(moment)

    advance(0)
    return advance


def _measured_accuracy(
    context: Context, plan: Plan, source: Path
) -> tuple[Accuracy, Usage | None]:
    """The accuracy, and the memory it took to measure it; None if nothing had to be."""
    if plan.accuracy == "exact" and plan.precision == "fp32":
        return _accuracy(context, plan, source), None
    # Other sizes are run now than before, which would not fit the gaps in the heap.
    trim_heap(collect=True)
    context.meter.lap()
    accuracy = _accuracy(context, plan, source)
    measuring = context.meter.lap()
    trim_heap(collect=True)
    context.meter.lap()
    return accuracy, measuring


def _accuracy(context: Context, plan: Plan, source: Path) -> Accuracy:
    """State the class, and measure what is not exact on a sample of this image."""
    network, costs = context.prepared.network, context.prepared.costs
    execution = precision = None
    if plan.accuracy == "bounded":
        with _reopen(context, source) as rows:
            allowed = affordable_pixels(costs, plan, context.budget.device_bytes)
            execution = _figure(measure_execution(network, rows, plan, allowed))
    if plan.precision != "fp32":
        with _reopen(context, source) as rows:
            precision = _figure(measure_precision(network, rows, plan))
    if plan.strategy == "streamed":
        proof = context.prepared.programs.certificate(plan.padded_height, plan.padded_width)
        why = (
            "bands of rows with all that they depend on; on a small image they differed from the"
            f" whole by {proof.error:.0e} of its largest value"
        )
    elif plan.tiles == 1:
        why = "the whole image at once"
    elif plan.accuracy == "exact":
        why = (
            f"the model reaches {costs.reach} px, tiles see at least"
            f" {max(costs.reach or 0, (plan.overlap - plan.blend) // 2)}"
        )
    elif costs.reach is None:
        why = f"the model looks farther than {costs.reach_searched} px, tiles cannot"
    else:
        why = f"the model reaches {costs.reach} px, an overlap of {plan.overlap} covers less"
    return Accuracy(
        execution=plan.accuracy, why=why, execution_error=execution,
        precision=plan.precision, precision_error=precision,
    )  # fmt: skip


def _reopen(context: Context, source: Path):
    return open_image(
        source, max_pixels=context.settings.max_pixels, scratch_dir=context.scratch
    )


def _figure(error: MeasuredError) -> ErrorFigure:
    return ErrorFigure(
        psnr_db=None if math.isinf(error.psnr_db) else round(error.psnr_db, 2),
        max_error=error.max_error, tiles_sampled=error.tiles_sampled,
        tiles_total=error.tiles_total, against=error.against,
    )  # fmt: skip


def _memory(plan: Plan, used: Usage, measuring: Usage | None) -> Memory:
    checking = measuring.peak_bytes if measuring is not None else None
    return Memory(
        budget_bytes=plan.budget_bytes, predicted_bytes=plan.predicted_bytes,
        upper_bytes=plan.upper_bytes, peak_bytes=used.peak_bytes,
        high_water_bytes=used.high_water_bytes, measuring_peak_bytes=checking,
        within_budget=max(used.peak_bytes, checking or 0) <= plan.budget_bytes,
        measured_as=used.source, ledger=plan.ledger,
    )  # fmt: skip


def _events(outcome: Outcome) -> list[str]:
    redone = [f"{outcome.redone} batches were not finite and redone in fp32"]
    return outcome.events + (redone if outcome.redone else [])
