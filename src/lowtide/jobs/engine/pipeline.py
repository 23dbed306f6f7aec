"""Pipeline of every job: plan an item, run it, commit its file and report.

One item is computed while earlier ones are still being written, as far as the budget allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

from lowtide.core.errors import Cancelled, LowtideError, NotFiniteError
from lowtide.core.heap import restored_heap_mode, set_heap_mode
from lowtide.core.progress import Cancel, Progress, ProgressCallback, raise_if_cancelled
from lowtide.core.units import format_bytes
from lowtide.jobs.engine.item import (
    ComputedItem,
    EarlierItemsMemory,
    JobItem,
    PendingItem,
    PlannedItem,
)
from lowtide.memory.budget import Budget
from lowtide.memory.meter import CudaMemoryMeter, HostMemoryMeter, PeakUsage
from lowtide.memory.oom import OutOfMemoryCatcher, trim_allocators
from lowtide.memory.plan import LedgerRow, Plan
from lowtide.streaming.planner.ledger_rows import beyond_least_margin


class Job(Protocol):
    """Protocol of a kind of job: how one item is planned and computed.

    ``budget`` is what one item may take. Both methods raise `LowtideError` for an item that fails.
    """

    @property
    def budget(self) -> Budget:
        """What an item and the files still being written may take together."""
        ...

    def plan(self, item: JobItem) -> PlannedItem:
        """Plan how to run an item, within ``item.limit_bytes`` if that is set."""
        ...

    def run(
        self, item: JobItem, planned: Any, pipeline: JobPipeline, queue_bytes: int
    ) -> ComputedItem:
        """Compute an item. ``queue_bytes`` of its result may wait to be written."""
        ...

    def in_fp32(self, pipeline: JobPipeline) -> Job:
        """Return the same job in fp32, within what the other weights leave of the budget."""
        ...


class ResultListener(Protocol):
    """Protocol of the callbacks for each item's result."""

    def new_part(self, index: int) -> Path | None:
        """Return a temporary name for the file of item ``index``; None for a random one."""
        ...

    def begin(self, index: int) -> None:
        """Handle a complete file, before it is renamed to its target."""
        ...

    def done(self, index: int, item: Any) -> None:
        """Handle a file that has its final name, with its `ItemReport`."""
        ...

    def failed(self, index: int, error: LowtideError) -> None:
        """Handle a failed item."""
        ...


class JobPipeline:
    """Runs the items of ``job`` and reports each result to ``listener``.

    Args:
        meter: Running meter of the device.
        scratch: Folder for pages and spooled files.
        count: Number of items.
        streams: Most items in flight, that are computed or being written.
        threads: CPU threads that the devices of an item share; None leaves them unchanged.
    """

    def __init__(
        self,
        job: Job,
        listener: ResultListener,
        meter: HostMemoryMeter | CudaMemoryMeter,
        *,
        progress: ProgressCallback | None = None,
        cancel: Cancel = None,
        scratch: Path | None = None,
        count: int = 1,
        streams: int = 1,
        threads: int | None = None,
    ) -> None:
        self.meter, self.progress, self.cancel = meter, progress, cancel
        self.scratch, self.count, self.threads = scratch, count, threads
        self._job, self._listener = job, listener
        self._streams = streams if count > 1 else 1
        self._in_flight: list[tuple[Job, PendingItem]] = []
        self._block_sizes: tuple[object, ...] = ()
        self._earlier, self._is_crowded = EarlierItemsMemory(meter), False

    def run(self, items: Iterable[JobItem]) -> None:
        """Run all ``items``; raises `Cancelled`, with no unfinished file left.

        The C heap is left in the mode that it was in.
        """
        with restored_heap_mode():
            try:
                for item in items:
                    raise_if_cancelled(self.cancel)
                    self.submit(item)
                self.commit_all()
            except Cancelled:
                self.commit_all()  # keep the items that are computed
                raise
            finally:
                self.abort()

    def submit(self, item: JobItem) -> None:
        """Compute one item; on return it is being written, done or failed."""
        try:
            item.part = self._listener.new_part(item.index)
            job, pending = self._attempt(item, self._job)
        except LowtideError as error:
            self._listener.failed(item.index, error)
            return
        if self._streams > 1:
            self._in_flight.append((job, pending))
        else:
            self._commit(job, pending)

    def commit_all(self) -> None:
        """Wait until all items in flight are written."""
        while self._in_flight:
            self._commit(*self._in_flight.pop(0))

    def abort(self) -> None:
        """Abort all unfinished files; no effect after `commit_all`."""
        while self._in_flight:
            self._in_flight.pop()[1].computed.file.abort()

    def lap(self) -> PeakUsage:
        """Return the peak since the last lap."""
        return self.meter.lap()

    def others_bytes(self, device: str) -> int:
        """Return the bytes expected on ``device`` now that are not of the item being computed."""
        places = {"device", "host"} if device == "cpu" else {"device"}
        return sum(row.value for row in self._other_rows() if row.place in places)

    def report_rows(
        self,
        item: JobItem,
        budget: Budget,
        total: int,
        unit: str = "",
        phase: Literal["run", "check"] = "run",
    ) -> Callable[[int], None] | None:
        """Return a callback for rows that are done, of ``total``, which reports progress.

        ``unit`` names what is counted where its speed is worth showing. The phase ``check`` is that
        of reading the output again.
        """
        progress = self.progress
        if progress is None:
            return None
        started, done = time.perf_counter(), 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            event = Progress(
                phase=phase,
                name=item.source.name,
                done=done,
                total=total,
                image=item.index,
                images=self.count,
                elapsed=time.perf_counter() - started,
                memory_bytes=self.meter.current_bytes,
                peak_bytes=self.meter.peak_bytes,
                budget_bytes=budget.device_bytes,
                unit=unit,
            )
            progress(event)

        advance(0)
        return advance

    def _commit(self, job: Job, pending: PendingItem) -> None:
        index = pending.item.index
        try:
            _, done = self._attempt(pending.item, job, pending, commit=True)
        except LowtideError as error:
            self._listener.failed(index, error)
            return
        self._listener.done(index, done.computed.report)

    def _attempt(
        self, item: JobItem, job: Job, pending: PendingItem | None = None, *, commit: bool = False
    ) -> tuple[Job, PendingItem]:
        """Compute an item unless it is ``pending``, and ``commit`` it: the loop of recovery.

        No file exists at the target before the result is committed. After an out-of-memory error
        the item is planned again for less, at most three times; some encoders run only on commit,
        on the whole image. A run whose values are not finite in half precision as a whole is run
        again in fp32: a single band cannot be, since others depend on it.

        Returns:
            The job that computed it, which may be one in fp32, and the item.
        """
        while True:
            with item.timed():
                if pending is None:
                    item.tries += 1
                    planned, queue_bytes = self._start(item, job)
                else:
                    planned, queue_bytes = pending.planned, 0
                caught = OutOfMemoryCatcher(planned.plan.device)
                try:
                    with caught:
                        if pending is None:
                            pending = self._compute(item, job, planned, queue_bytes)
                        if commit:
                            self._finish(pending)
                        break
                except NotFiniteError:
                    if planned.plan.precision == "fp32":
                        raise
            pending = None
            if caught.failure is not None:
                item.limit_plan(planned, caught.failure)
            self.commit_all()
            if caught.failure is None:
                job, item.limit_bytes = job.in_fp32(self), None
                beyond = f"values exceed the range of {planned.plan.precision}"
                item.events.append(f"{beyond}: run again in fp32")
        if commit:
            over = pending.finish_report()
            if over > 0:
                pending.computed.report.events.append(self._earlier.add_excess(over))
                self._block_sizes = ()  # measure what is held, even for an equal plan
        return job, pending

    def _start(self, item: JobItem, job: Job) -> tuple[PlannedItem, int]:
        """Plan an item and begin it, with room for what earlier items left.

        The plan is that of an undisturbed run wherever it has this room, so that a resumed folder
        makes equal files.

        Returns:
            The plan, and how many bytes of the result may wait to be written.
        """
        if self._is_crowded:
            self._leave_room(item, job)
        planned = job.plan(item)
        queue_bytes = self._make_room(planned, job.budget)
        self._begin(planned.plan)
        total = planned.plan.upper_bytes + self._earlier.upper_bytes
        if total > job.budget.device_bytes and planned.can_shrink and not self._is_crowded:
            self._is_crowded = True
            self._leave_room(item, job)
            room = format_bytes(item.limit_bytes or 0)
            item.events.append(f"earlier items leave {room} of the budget: planned for that")
            planned = job.plan(item)
            queue_bytes = self._make_room(planned, job.budget)
            self._begin(planned.plan)
        return planned, queue_bytes

    def _leave_room(self, item: JobItem, job: Job) -> None:
        """Limit the plan of an item to what earlier ones leave of the budget."""
        room = job.budget.device_bytes - self._earlier.upper_bytes
        item.limit_bytes = min(room, item.limit_bytes or room)

    def _compute(
        self, item: JobItem, job: Job, planned: PlannedItem, queue_bytes: int
    ) -> PendingItem:
        other_rows = self._other_rows()
        computed = job.run(item, planned, self, queue_bytes)
        usual, most = planned.writing_bytes
        writing_row = LedgerRow(
            name="being written",
            place="host",
            origin="prior",
            value=usual + queue_bytes // 2,
            upper=beyond_least_margin(usual, most) + queue_bytes,
        )
        return PendingItem(item, planned, computed, writing_row, other_rows)

    def _finish(self, pending: PendingItem) -> None:
        """Rename a complete file to its target."""
        file = pending.computed.file
        try:
            self._listener.begin(pending.item.index)
            file.commit()
            # What the last run left in the heap is still there, and its bound counts the others.
            last = self._in_flight[-1][1] if self._in_flight else pending
            last.add_usage(self.lap())
        finally:
            file.abort()  # no effect after the commit

    def _begin(self, plan: Plan) -> None:
        """Start an item, and measure what earlier ones left.

        Frees what the last item, or a probe, left in the heap and in the GPU's caching allocator,
        unless this plan's blocks have the same sizes: allocating them again would take longer than
        a light network's operators.
        """
        sizes = plan.image.padded_size, plan.strategy, plan.heap
        if sizes != self._block_sizes:
            trim_allocators(plan.device)
            written = self._writing_row().upper if plan.device == "cpu" else 0
            self._earlier.measure(written)
        self._block_sizes = sizes
        self.lap()
        set_heap_mode("trim" if plan.heap == "trim" else "cache")

    def _writing_row(self) -> LedgerRow:
        """Return the memory of the items that are still being written, as a ledger row."""
        rows = [pending.writing_row for _, pending in self._in_flight]
        return LedgerRow(
            name="other images being written",
            place="host",
            origin="known",
            value=sum(row.value for row in rows),
            upper=sum(row.upper for row in rows),
        )

    def _other_rows(self) -> list[LedgerRow]:
        """Return what the item being computed does not know of, as ledger rows."""
        writing = self._writing_row()
        return [*([writing] if writing.upper else []), *self._earlier.rows()]

    def _make_room(self, planned: PlannedItem, budget: Budget) -> int:
        """Wait for items in flight until ``planned`` fits with the others.

        Returns:
            How many bytes of its result may wait to be written: all of them, or 0 where it has to
            be written at once.
        """
        plan = planned.plan
        # On the CPU host memory is device memory.
        need = plan.bytes_at("host", upper=True)
        if plan.device == "cpu":
            need += self._earlier.upper_bytes
        limit = budget.device_bytes if plan.device == "cpu" else budget.host_bytes
        queue_bytes = planned.result_bytes if self._streams > 1 else 0
        if need + queue_bytes > limit:
            queue_bytes = 0
        while self._in_flight and (
            len(self._in_flight) >= self._streams
            or need + queue_bytes + self._writing_row().upper > limit
        ):
            self._commit(*self._in_flight.pop(0))
        return queue_bytes
