"""Run a job's items in worker processes, on several devices or on one CPU.

Each worker is a process that requests the next item when it has computed one. How items are run is
decided before they are assigned: all workers have the same measurements and the same budget, that
of the smallest, so that equal devices make equal files whichever gets an item.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lowtide.core.errors import LowtideError, OutOfMemoryError
from lowtide.core.heap import heap_is_tuned
from lowtide.core.progress import Cancel, Progress, ProgressCallback, raise_if_cancelled
from lowtide.core.python_child import start_python
from lowtide.jobs.engine.results import ResultRecorder
from lowtide.jobs.engine.worker_process import error_from_message, error_to_message

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_TAIL = 600
# An item whose worker died goes to another worker once more.
_TRIES = 2
_MAIN = "lowtide.jobs.engine.worker_process:main"


@dataclass
class _Worker:
    device: str
    process: subprocess.Popen[str]
    errors: IO[str]
    listener: threading.Thread | None = None
    assigned: set[int] = field(default_factory=set)
    drained: bool = False

    def send(self, order: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError:
            return  # the worker is gone: the end of its messages follows

    def close(self) -> str:
        """Wait for the process to end, or kill it, and return why it ended early."""
        try:
            status = self.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if self.listener is not None:
            self.listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # unsent messages
                pipe.close() if pipe else None
        self.errors.seek(0)
        words = self.errors.read()[-_TAIL:].strip().splitlines()
        self.errors.close()
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return f"{how}{': ' + words[-1] if words else ''}"


class WorkerPool:
    """Run the items of ``results`` that are due in worker processes on ``devices``.

    Args:
        job_type: A `lowtide.jobs.engine.pipeline.Job` that a worker imports: its ``preload(setup)``
            imports libraries, and its ``load(setup)`` returns the job.
        setups: What these are given, as plain data, by device.
    """

    def __init__(
        self,
        job_type: type,
        setups: dict[str, Any],
        devices: list[str],
        results: ResultRecorder,
        *,
        streams: int,
        threads: int,
        scratch: Path,
        progress: ProgressCallback | None,
    ) -> None:
        self._results, self._progress = results, progress
        self._pending = deque(range(1, len(results.pairs) + 1))
        self._tries: dict[int, int] = {}
        self._messages: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self._common = {
            "job": f"{job_type.__module__}:{job_type.__name__}",
            "tuned_heap": heap_is_tuned(),
            "threads": threads,
            "scratch": str(scratch),
            "count": len(results.pairs),
            "streams": streams,
        }
        self._setups = setups
        self._devices = devices
        self._running: list[_Worker] = []
        self._last_failure, self._idle_deaths = "", 0

    def run(self, cancel: Cancel) -> None:
        """Run until all items are done or have failed; raises `Cancelled`."""
        try:
            for device in self._devices:
                self._start(device)
            while self._running:
                raise_if_cancelled(cancel)
                try:
                    worker, message = self._messages.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if message is None:
                    self._on_exit(worker)
                else:
                    self._handle(worker, message)
            while self._pending:  # no worker is left to run them
                self._results.failed(self._pending.popleft(), self._death_error())
        finally:
            for worker in self._running:
                worker.process.kill()
                worker.close()

    def _start(self, device: str) -> None:
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        process = start_python(
            _MAIN,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )
        worker = _Worker(device, process, errors)
        self._running.append(worker)
        worker.send({**self._common, "device": device, "setup": self._setups[device]})
        worker.listener = threading.Thread(
            target=self._read_messages, args=(worker,), name="lowtide-worker", daemon=True
        )
        worker.listener.start()

    def _read_messages(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._messages.put((worker, json.loads(line)))
        self._messages.put((worker, None))

    def _handle(self, worker: _Worker, message: dict[str, Any]) -> None:
        results, index = self._results, message.get("index", 0)
        match message["kind"]:
            case "next":
                worker.send(self._next_order(worker))
            case "part":
                worker.send(_reply(lambda: results.new_part(index)))
            case "begin":
                worker.send(_reply(lambda: results.begin(index)))
            case "done":
                worker.assigned.discard(index)
                results.done(index, results.item_type.model_validate(message["item"]))
            case "failed":
                worker.assigned.discard(index)
                results.failed(index, error_from_message(message))
            case "cannot_start":
                raise error_from_message(message)
            case "progress" if self._progress is not None:
                self._progress(Progress(**message["progress"]))

    def _next_order(self, worker: _Worker) -> dict[str, Any] | None:
        while self._pending:
            index = self._pending.popleft()
            again = index in self._tries  # the worker may have died just after it named the file
            if again or self._results.is_due(index):
                self._tries[index] = self._tries.get(index, 0) + 1
                worker.assigned.add(index)
                pair = self._results.pairs[index - 1]
                order = {"index": index, "source": str(pair.source), "target": str(pair.target)}
                return order | {"replace": again or self._results.force}
        worker.drained = True
        return None

    def _on_exit(self, worker: _Worker) -> None:
        """Remove a finished worker; if it died, its items go back to the queue."""
        self._running.remove(worker)
        self._last_failure = f"the process on {worker.device} ended early ({worker.close()})"
        lost = sorted(worker.assigned)
        again = [index for index in lost if self._tries[index] < _TRIES]
        for index in sorted({*lost} - {*again}):
            self._results.failed(index, self._death_error())
        self._pending.extendleft(reversed(again))
        self._idle_deaths += not lost and not worker.drained
        nobody = all(other.drained for other in self._running)
        # Each item may cause two deaths at most; restarting idle workers that die needs a limit
        # too.
        if self._pending and nobody and self._idle_deaths < _TRIES:
            self._start(worker.device)

    def _death_error(self) -> LowtideError:
        return OutOfMemoryError(
            self._last_failure,
            hint="memory may have run out: fewer --devices, or a smaller --budget",
        )


def _reply(call: Callable[[], Path | None]) -> Any:
    """Return the answer to a worker's request: the result of ``call``, or its error."""
    try:
        result = call()
    except LowtideError as error:
        return {"kind": "error", **error_to_message(error)}
    return None if result is None else str(result)
