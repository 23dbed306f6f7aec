"""A kind of job as one module: moving averages of series in CSV files."""

import csv
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from annotated_types import Ge
from pydantic import Field

from lowtide import InputError
from lowtide.core.atomic_file import new_part_name, put_in_place
from lowtide.core.option import Option
from lowtide.jobs.engine.item import ComputedItem
from lowtide.jobs.engine.journal import open_journal
from lowtide.jobs.engine.pipeline import JobPipeline
from lowtide.jobs.engine.report import ItemReport, JobReport, SkippedInput
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.jobs.engine.settings import RunSettings
from lowtide.jobs.engine.workers import WorkerPool
from lowtide.media.discover import MediaKind, discover_files
from lowtide.memory.budget import Budget
from lowtide.memory.meter import open_meter
from lowtide.memory.plan import LedgerRow, Plan
from support.small_plans import a_plan

SERIES = MediaKind("series", (".csv",), lambda suffix: {".csv": "csv"}.get(suffix.lower()))


@dataclass(frozen=True, kw_only=True)
class AverageSettings(RunSettings):
    """Settings of a job that averages.

    Attributes:
        window: Steps of an average,
            the first of which is left out.
    """

    window: Annotated[int, Ge(1), Option("Model", metavar="N")] = 3


class SeriesReport(ItemReport):
    """Result of one series."""

    noun = "series"

    steps: int = 0


class AverageReport(JobReport):
    """Report of a job that averages."""

    item_type = SeriesReport
    noun = "series"

    series: list[SeriesReport] = Field(default_factory=list)


@dataclass
class PlannedSeries:
    """A series with its plan."""

    plan: Plan
    values: np.ndarray
    can_shrink: bool = False

    @property
    def result_bytes(self) -> int:
        return self.values.nbytes

    @property
    def writing_bytes(self) -> tuple[int, int]:
        return 0, 0


@dataclass
class SeriesFile:
    """Averages under a temporary name."""

    path: Path
    part: Path
    replace: bool

    def write(self, values: np.ndarray) -> None:
        np.savetxt(self.part, values, fmt="%.6g")

    def commit(self) -> None:
        put_in_place(self.part, self.path, replace=self.replace)

    def abort(self) -> None:
        self.part.unlink(missing_ok=True)


@dataclass
class AverageJob:
    """Averages series within a budget."""

    settings: AverageSettings
    budget: Budget

    def plan(self, item) -> PlannedSeries:
        try:
            with item.source.open(newline="") as file:
                values = np.array([float(row[0]) for row in csv.reader(file)])
        except (ValueError, IndexError) as error:
            raise InputError(f"{item.source}: not a column of numbers ({error})") from error
        need = LedgerRow(
            name="series", place="host", value=values.nbytes, upper=values.nbytes, origin="known"
        )
        changes = {"budget_bytes": self.budget.device_bytes, "ledger": [need]}
        return PlannedSeries(a_plan(**changes), values)

    def run(self, item, planned, pipeline, queue_bytes) -> ComputedItem:
        advance = pipeline.report_rows(item, self.budget, len(planned.values))
        kernel = np.full(self.settings.window, 1 / self.settings.window)
        file = SeriesFile(item.target, item.part or new_part_name(item.target), item.replace)
        item.target.parent.mkdir(parents=True, exist_ok=True)
        file.write(np.convolve(planned.values, kernel, "valid"))
        if advance is not None:
            advance(len(planned.values))
        report = SeriesReport(
            input=str(item.source),
            output=str(item.target),
            status="done",
            plan=planned.plan,
            steps=len(planned.values),
        )
        return ComputedItem(file, report, pipeline.lap(), None, comparable=False)

    def in_fp32(self, pipeline):
        return self

    @classmethod
    def preload(cls, setup: dict[str, Any]) -> None:
        """Import what a worker needs: nothing more than this module."""

    @classmethod
    def load(cls, setup: dict[str, Any]) -> Self:
        """Make the job of a worker."""
        settings = AverageSettings.from_json(setup["settings"])
        return cls(replace(settings, devices=()), Budget(**setup["budget"]))


def average(
    inputs, output, *, workers=0, force=False, sidecar=False, progress=None, cancel=None, **settings
) -> AverageReport:
    """Average the series of files or folders, in this process or in ``workers``."""
    chosen = AverageSettings.of(**settings)
    found = discover_files(list(inputs), output, kind=SERIES)
    folder = None if found.single_file else Path(output)
    budget, scratch = chosen.parse_budget("cpu", Path(output)), folder or Path(output).parent
    report = AverageReport(skipped_inputs=SkippedInput.of(found))
    meter = open_meter("cpu")
    meter.start()
    try:
        with open_journal(folder) as journal:
            key = f"average {chosen.window}"
            results = ResultRecorder(
                found.pairs, report, journal, key, force=force, sidecar=sidecar
            )
            run = {"streams": 1, "scratch": scratch, "progress": progress}
            if workers:
                setup = {"settings": chosen.to_json(), "budget": asdict(budget)}
                devices = ["cpu"] * workers
                WorkerPool(AverageJob, {"cpu": setup}, devices, results, threads=1, **run).run(
                    cancel
                )
            else:
                job, count = AverageJob(chosen, budget), len(found.pairs)
                JobPipeline(job, results, meter, cancel=cancel, count=count, **run).run(
                    results.due_items()
                )
    finally:
        meter.stop()
    return report
