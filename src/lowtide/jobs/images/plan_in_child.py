"""A child process that measures and plans for a job whose budget is less than planning takes.

Captures, dry runs and proofs leave compiled kernels and a fragmented heap: 40 MiB where the run
itself takes 10. What the child finds is in the plan store, by which the job's process plans again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lowtide.core.errors import LowtideError
from lowtide.core.heap import heap_is_tuned, tune_heap
from lowtide.core.option import Precision
from lowtide.core.progress import Cancel, Phase, ProgressCallback, raise_if_cancelled, report_phase
from lowtide.core.python_child import start_python
from lowtide.core.units import MIB, format_bytes
from lowtide.jobs.engine.worker_process import WorkerConnection
from lowtide.memory.library_memory import room_for_processes
from lowtide.memory.process_memory import RESIDENT_PEAK

if TYPE_CHECKING:
    from lowtide.jobs.engine.item import JobItem
    from lowtide.jobs.images.planning import PlannedImage
    from lowtide.jobs.images.prepared import PreparedModel
    from lowtide.jobs.images.settings import ImageSettings
    from lowtide.jobs.images.whole_image import PlannableJob, WholeImage
    from lowtide.memory.budget import Budget

# Budgets below which starting a process is worth what it keeps free. It takes 2 seconds.
_BELOW = 512 * MIB
_POLL_SECONDS = 0.1

_Result = TypeVar("_Result")


class ChildPlanner:
    """Plans for a job in a child process, which starts when it is first needed.

    A context manager that ends the child. What fails there fails again in this process, which says
    why. Methods raise `Cancelled` if ``cancel`` is set.
    """

    def __init__(
        self,
        job_type: type[PlannableJob],
        settings: ImageSettings,
        budget: Budget,
        progress: ProgressCallback | None,
        cancel: Cancel,
    ) -> None:
        self._job_type, self._settings, self._budget = job_type, settings, budget
        self._progress, self._cancel = progress, cancel
        self._child: subprocess.Popen[str] | None = None
        self._computes_here = True

    def __enter__(self) -> ChildPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(OSError), self._child:  # an order that it did not read
                pass

    @staticmethod
    def helps(budget: Budget) -> bool:
        """Return whether what planning leaves is much of a budget, and another process has room."""
        return (
            budget.device == "cpu"
            and budget.device_bytes < _BELOW
            and room_for_processes() >= budget.device_bytes
        )

    def measure(
        self, prepare: Callable[[], PreparedModel], precision: Precision, whole: WholeImage | None
    ) -> PreparedModel:
        """Return what ``prepare`` does, which the child measures unless it is stored.

        ``whole`` is the image that it may be enough to measure.
        """
        settings = replace(
            self._settings, precision=precision, devices=(), budget="auto", plan_file=None
        )
        setup = {
            "settings": settings.to_json(),
            "budget": asdict(self._budget),
            "measured": None,
            "images": 1,
            "files": [] if whole is None else [(str(whole.item.source), str(whole.item.target))],
        }
        return self._stored(prepare, "probe", lambda: (setup, None))[0]

    def plan(self, job: PlannableJob, item: JobItem) -> PlannedImage:
        """Return the plan of an item of ``job``, which the child plans unless all is stored."""
        words = str(item.source), str(item.target), item.index, item.limit_bytes
        planned, resident_bytes = self._stored(
            lambda: job.plan_run(item),
            "capture",
            lambda: (job.worker_setup("cpu", job.budget), words),
        )
        if resident_bytes is not None:
            planned.notes.append(
                "bands were proved in another process, beside the budget:"
                f" {format_bytes(resident_bytes)} at its peak, libraries included"
            )
        return planned

    def before_computing(self) -> None:
        """Called before this process measures, captures or proves: lets the child do that first."""
        if not self._computes_here:
            raise _NotStoredError

    def _stored(
        self, compute: Callable[[], _Result], phase: Phase, order: Callable[[], object]
    ) -> tuple[_Result, int | None]:
        """Return what ``compute`` does by what is stored, and the child's peak if that did more."""
        self._computes_here = False
        try:
            return compute(), None
        except _NotStoredError:
            pass
        finally:
            self._computes_here = True
        report_phase(self._progress, phase, self._settings.model_name)
        resident_bytes = self._order(order())
        return compute(), resident_bytes

    def _order(self, order: object) -> int | None:
        """Have the child load a model and plan an item, and return its peak; None if it failed."""
        import torch

        if self._child is None:
            self._child = start_python(
                f"{__name__}:main",
                f"{self._job_type.__module__}:{self._job_type.__name__}",
                json.dumps([heap_is_tuned(), torch.get_num_threads()]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        orders, answers, lines = self._child.stdin, self._child.stdout, list[str]()
        assert orders is not None and answers is not None
        with contextlib.suppress(OSError):  # it is gone: its answers end
            orders.write(json.dumps(order) + "\n")
            orders.flush()
        reader = threading.Thread(target=lambda: lines.append(answers.readline()), daemon=True)
        reader.start()
        try:
            while reader.is_alive():
                raise_if_cancelled(self._cancel)
                reader.join(_POLL_SECONDS)
        except BaseException:
            self._child.kill()  # what is read ends then
            reader.join()
            raise
        return json.loads(lines[0] or "{}").get("resident_bytes")


class _NotStoredError(Exception):
    """A plan needs what is not stored."""


def main() -> None:
    """Load and plan what is ordered, until there are no orders left."""
    connection = WorkerConnection()
    job_name, process = sys.argv[1:]
    is_tuned, threads = json.loads(process)
    if is_tuned:
        tune_heap()  # takes effect only before the libraries load
    import torch

    from lowtide.jobs.engine.item import JobItem

    torch.set_num_threads(threads)
    module, _, name = job_name.partition(":")
    job_type: Any = getattr(importlib.import_module(module), name)
    resident = RESIDENT_PEAK.reader()
    resident.reset()
    loaded, job = None, None
    while True:
        setup, item = connection.receive()
        peak = None
        with contextlib.suppress(LowtideError):  # the job says what is wrong
            if job is None or setup != loaded:
                job = None  # free the model before another one is loaded
                job_type.preload(setup)
                loaded, job = setup, job_type.load(setup)
            if item is not None:
                source, target, index, limit_bytes = item
                job.plan_run(JobItem(Path(source), Path(target), index, limit_bytes=limit_bytes))
            peak = resident.peaks()[0]
        connection.send("done", resident_bytes=peak)
