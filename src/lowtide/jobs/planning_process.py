"""A process beside the job's that measures its model and proves its bands, for small budgets.

Measuring leaves compiled kernels and a fragmented heap: 40 MiB where the run itself takes 30. What
that process finds is stored in the cache folder, by which the job's process plans.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import LowtideError
from lowtide.core.heap import heap_is_tuned, tune_heap
from lowtide.core.progress import Cancel, ProgressCallback, check_cancel, report_phase
from lowtide.core.python_child import start_python
from lowtide.core.units import MIB, format_bytes
from lowtide.jobs.worker_process import WorkerConnection
from lowtide.media.discover import FilePair
from lowtide.memory.library_memory import room_for_processes
from lowtide.memory.process_memory import RESIDENT_PEAK

if TYPE_CHECKING:
    from lowtide.jobs.image_job import ImageJob
    from lowtide.jobs.image_settings import ImageSettings
    from lowtide.jobs.item import Item
    from lowtide.memory.budget import Budget

# Budgets below which starting a process is worth what it keeps free. It takes 2 seconds.
_PROCESS_BELOW = 512 * MIB
_POLL_SECONDS = 0.1


class PlanningProcess:
    """Measures and plans for jobs of ``job_type`` in another process, which starts when needed.

    A context manager that ends the process. Methods raise `Cancelled` if ``cancel`` is set.
    """

    def __init__(
        self,
        job_type: type[ImageJob],
        progress: ProgressCallback | None = None,
        cancel: Cancel = None,
    ) -> None:
        self._job, self._progress = f"{job_type.__module__}:{job_type.__name__}", progress
        self._cancel = cancel
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> PlanningProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def helps(budget: Budget) -> bool:
        """Return whether what planning leaves is much of a budget, and another process has room."""
        return (
            budget.device == "cpu"
            and budget.device_bytes < _PROCESS_BELOW
            and room_for_processes() >= budget.device_bytes
        )

    def measure(self, settings: ImageSettings, budget: Budget, pairs: Sequence[FilePair]) -> bool:
        """Measure a model on the CPU for a job on the files ``pairs``.

        Returns:
            Whether its costs may be stored now: not where the budget is so large that nothing is
            done. A model that fails there fails here with its reason.
        """
        if not self.helps(budget):
            return False
        report_phase(self._progress, "probe", settings.model_name)
        answer = self._order(
            "measure",
            settings=settings.to_json(),
            budget=asdict(budget),
            pairs=[(str(one.source), str(one.target), one.name) for one in pairs[:2]],
        )
        return answer is not None

    def plan(self, job: ImageJob, item: Item) -> str | None:
        """Plan an item as ``job`` does, so that all that this takes is stored.

        Returns:
            A note of what the process took, for the report; None where it failed.
        """
        report_phase(self._progress, "capture", job.settings.model_name)
        answer = self._order(
            "plan",
            setup=job.worker_setup("cpu", job.budget),
            item={
                "source": str(item.source),
                "target": str(item.target),
                "index": item.index,
                "limit_bytes": item.limit_bytes,
            },
        )
        if answer is None:
            return None
        return (
            "bands were proved in another process, beside the budget:"
            f" {format_bytes(answer['resident_bytes'])} at its peak, libraries included"
        )

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # an order that it did not read
                    pipe.close() if pipe else None

    def _order(self, kind: str, **order: Any) -> dict[str, Any] | None:
        """Send an order and wait for its end; return the answer, or None if it failed."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: its answers end
            process.stdin.write(json.dumps({"kind": kind, **order}) + "\n")
            process.stdin.flush()
        while True:
            try:
                check_cancel(self._cancel)
                answer = self._answers.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            except BaseException:
                self.close()
                raise
            if not answer:
                self.close()
                return None
            found = json.loads(answer)
            return found if found["kind"] == "done" else None

    def _start(self) -> subprocess.Popen[str]:
        import torch

        process = start_python(
            f"{__name__}:main",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answers = queue.Queue()
        threading.Thread(target=_collect, args=(process, self._answers), daemon=True).start()
        setup = {
            "job": self._job,
            "tuned_heap": heap_is_tuned(),
            "threads": torch.get_num_threads(),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(setup) + "\n")
        return process


def _collect(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    """Put the lines of a process into ``answers``, and "" where they end."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed by `PlanningProcess.close`
        for line in process.stdout:
            answers.put(line)
    answers.put("")


def main() -> None:
    """Process orders until there are none left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    connection = WorkerConnection()
    setup = connection.receive()
    if setup["tuned_heap"]:
        tune_heap()  # takes effect only before the libraries load
    import torch

    torch.set_num_threads(setup["threads"])
    module, _, name = setup["job"].partition(":")
    job_type: type[ImageJob] = getattr(importlib.import_module(module), name)
    planner, resident = _Planner(job_type), RESIDENT_PEAK.reader()
    resident.reset()
    while True:
        order = connection.receive()
        try:
            (planner.measure if order["kind"] == "measure" else planner.plan)(order)
        except LowtideError:  # the job says what is wrong
            connection.send("failed")
        else:
            connection.send("done", resident_bytes=resident.peaks()[0])


class _Planner:
    """What the process does for its orders; ``_job`` is that of the last one."""

    def __init__(self, job_type: type[ImageJob]) -> None:
        self._job_type = job_type
        self._setup: dict[str, Any] = {}
        self._job: ImageJob | None = None

    def measure(self, order: dict[str, Any]) -> None:
        from lowtide.jobs.prepare import prepare
        from lowtide.jobs.whole_image import whole_image
        from lowtide.memory.budget import Budget

        settings = self._job_type.settings_type.from_json(order["settings"])
        budget = Budget(**order["budget"])
        pairs = [FilePair(Path(one), Path(two), name) for one, two, name in order["pairs"]]
        self._job_type.load_libraries(settings)
        prepare(
            settings,
            device="cpu",
            limit_bytes=budget.device_bytes // 2,
            runs_job=False,
            whole=whole_image(self._job_type, settings, budget, pairs, None),
        )

    def plan(self, order: dict[str, Any]) -> None:
        from lowtide.jobs.item import Item

        if self._job is None or order["setup"] != self._setup:
            self._job = None  # free the model before another one is loaded
            self._job_type.preload(order["setup"])
            self._job, self._setup = self._job_type.load(order["setup"]), order["setup"]
        given = order["item"]
        item = Item(Path(given["source"]), Path(given["target"]), given["index"])
        item.limit_bytes = given["limit_bytes"]
        self._job.plan_run(item)
