"""Items of a job: one file each, from its plan to its report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lowtide.core.errors import OutOfMemoryError
from lowtide.core.units import format_bytes
from lowtide.jobs.engine.report import ItemReport, MemoryReport
from lowtide.memory.meter import CudaMemoryMeter, HostMemoryMeter, PeakUsage
from lowtide.memory.plan import LedgerRow, Plan
from lowtide.memory.prediction.calibration import PredictionResidual, PredictionResidualStore

_TRIES = 3
_STEP_DOWN = 0.7


@dataclass
class JobItem:
    """One file of a job, a clip, a volume or a series too, and its state across tries.

    ``part`` is the temporary name of its result, or None for a random one, and ``replace`` is
    whether a file at ``target`` may be replaced. ``limit_bytes`` is the limit in bytes for the next
    plan after an out-of-memory error.
    """

    source: Path
    target: Path
    index: int = 1
    part: Path | None = None
    replace: bool = False
    tries: int = 0
    limit_bytes: int | None = None
    events: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Add the wall and CPU seconds of a block to the item's."""
        started, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started
            self.cpu_seconds += time.process_time() - cpu

    def limit_plan(self, planned: PlannedItem, failure: BaseException) -> None:
        """Limit the next plan to fewer bytes than that of ``planned``, which failed.

        Raises:
            OutOfMemoryError: There is no smaller plan, or no try is left.
        """
        if self.tries == _TRIES or not planned.can_shrink:
            if isinstance(failure, OutOfMemoryError):
                raise failure
            raise OutOfMemoryError(
                f"{self.source}: memory ran out outside the network ({failure})",
                hint="close other programs, or pass a smaller --budget so that less is planned",
            )
        self.limit_bytes = int(planned.plan.upper_bytes * _STEP_DOWN)
        what = str(failure).partition("\n")[0] or "memory ran out"
        self.events.append(f"{what}; replanned for {format_bytes(self.limit_bytes)}")


class PlannedItem(Protocol):
    """Protocol of an item with all that is decided about it before it runs."""

    @property
    def plan(self) -> Plan:
        """How it is run."""
        ...

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller plan can be made after an out-of-memory error."""
        ...

    @property
    def result_bytes(self) -> int:
        """Bytes of the result in memory, which may wait to be written."""
        ...

    @property
    def writing_bytes(self) -> tuple[int, int]:
        """The usual and the largest bytes of writing the result's file, without what waits."""
        ...


class ResultFile(Protocol):
    """Protocol of a result whose content is complete, under its temporary name."""

    def commit(self) -> object:
        """Finish the file and give it its final name."""
        ...

    def abort(self) -> object:
        """Remove it; no effect after `commit`."""
        ...


@dataclass
class ComputedItem:
    """Result of a job's computation: a file to commit, and its report.

    ``usage`` is the memory that the run took, and ``measurement_usage`` that of measuring its
    error, if that was measured. ``comparable`` is whether the run is a measure of others' memory.
    """

    file: ResultFile
    report: ItemReport
    usage: PeakUsage
    measurement_usage: PeakUsage | None
    comparable: bool


@dataclass
class PendingItem:
    """Item that is computed and may still be being written.

    ``writing_row`` is the memory that it holds until then. ``other_rows`` are what was not of this
    item while it was computed: other items that were being written, and what earlier ones left.
    """

    item: JobItem
    planned: PlannedItem
    computed: ComputedItem
    writing_row: LedgerRow
    other_rows: list[LedgerRow]

    def add_usage(self, usage: PeakUsage) -> None:
        """Add a peak of the time in which nothing but this item was waited for."""
        self.computed.usage = self.computed.usage.merged(usage)

    def finish_report(self) -> int:
        """Complete the report of a committed item, and keep how far off its prediction was.

        Returns:
            Bytes by which it went over its upper bound; negative for one within it.
        """
        item, computed, plan = self.item, self.computed, self.planned.plan
        report, usage = computed.report, computed.usage
        memory = _memory_report(plan, usage, computed.measurement_usage, self.other_rows)
        report.memory = memory
        # A replanned run is no measure of its plan, and a special mode is no measure of other
        # plans.
        if not report.events and computed.comparable:
            kind = "streamed" if plan.strategy.name == "streamed" else "tiled"
            PredictionResidualStore(plan.device, kind).add(
                PredictionResidual(predicted=memory.predicted_bytes, measured=usage.peak_bytes)
            )
        report.events[:0] = item.events
        report.seconds, report.cpu_seconds = item.seconds, item.cpu_seconds
        return usage.peak_bytes - memory.upper_bytes


def _memory_report(
    plan: Plan, usage: PeakUsage, measurement_usage: PeakUsage | None, other_rows: list[LedgerRow]
) -> MemoryReport:
    checking = measurement_usage.peak_bytes if measurement_usage is not None else None
    # On the CPU the budget is host memory.
    counted = [row for row in other_rows if plan.device == "cpu" or row.place == "device"]
    return MemoryReport(
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_bytes + sum(row.value for row in counted),
        upper_bytes=plan.upper_bytes + sum(row.upper for row in counted),
        peak_bytes=usage.peak_bytes,
        high_water_bytes=usage.high_water_bytes,
        measurement_peak_bytes=checking,
        within_budget=max(usage.peak_bytes, checking or 0) <= plan.budget_bytes,
        source=usage.source,
        ledger=(*plan.ledger, *other_rows),
    )


class EarlierItemsMemory:
    """Memory that the items of a job have to be planned with, in addition to their own.

    The process keeps some memory from item to item: compiled kernels, captured programs, and pages
    of the heap with a small block in them. A run above its own bound shows that the bounds of this
    job are too low, by that much.
    """

    def __init__(self, meter: HostMemoryMeter | CudaMemoryMeter) -> None:
        self._meter = meter
        self._at_first: int | None = None
        self._held_bytes = self._over_bytes = 0

    @property
    def upper_bytes(self) -> int:
        """Bytes that the bound of the next item has to leave free."""
        return self._held_bytes + self._over_bytes

    def measure(self, others_bytes: int) -> None:
        """Measure what is held before a run beyond what was before the first one.

        ``others_bytes`` are those of items in flight. To be called after the heap was trimmed.
        """
        held = self._meter.current_bytes - others_bytes
        if self._at_first is None:
            self._at_first = held
        self._held_bytes = max(0, held - self._at_first)

    def add_excess(self, over_bytes: int) -> str:
        """Widen the bounds of later items by ``over_bytes``; return an event that says so."""
        self._over_bytes += over_bytes
        return f"over at most by {format_bytes(over_bytes)}: later items are planned with that"

    def rows(self) -> list[LedgerRow]:
        """Return what there is as rows of the next item's ledger."""
        held, over = self._held_bytes, self._over_bytes
        rows = [
            ("held before the run", held, held),
            ("excess of earlier runs", 0, over),
        ]
        return [
            LedgerRow(name=name, place="device", value=value, upper=upper, origin="measured")
            for name, value, upper in rows
            if upper
        ]
