"""Worker process that runs items assigned by a parent process.

Both exchange JSON lines: orders come on standard input, messages go to standard output, and what
libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core.errors import BudgetError, LowtideError
from lowtide.core.heap import tune_heap
from lowtide.core.progress import Progress

if TYPE_CHECKING:
    from lowtide.jobs.engine.pipeline import JobPipeline
    from lowtide.jobs.engine.report import ItemReport

_PROGRESS_SECONDS = 0.1


class WorkerConnection:
    """JSON-lines connection of a worker to its parent process."""

    def __init__(self) -> None:
        self._in = sys.stdin
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._last_progress = 0.0

    def send(self, kind: str, **more: Any) -> None:
        """Send one message."""
        self._out.write(json.dumps({"kind": kind, **more}) + "\n")
        self._out.flush()

    def receive(self) -> Any:
        """Return the next order; exits this process if the parent process is gone."""
        line = self._in.readline()
        if not line:
            raise SystemExit(1)
        return json.loads(line)

    def ask(self, kind: str, **more: Any) -> Any:
        """Send a message and return the answer.

        Raises:
            LowtideError: The parent process could not do what was requested.
        """
        self.send(kind, **more)
        answer = self.receive()
        if isinstance(answer, dict) and answer.get("kind") == "error":
            raise error_from_message(answer)
        return answer

    def progress(self, event: Progress) -> None:
        """Send progress at intervals, and always at an item's start and end."""
        now = time.monotonic()
        if event.done in (0, event.total) or now - self._last_progress >= _PROGRESS_SECONDS:
            self._last_progress = now
            self.send("progress", progress=vars(event))

    def new_part(self, index: int) -> Path | None:
        """Return a temporary name for the item's file, recorded by the parent process."""
        name = self.ask("part", index=index)
        return None if name is None else Path(name)

    def begin(self, index: int) -> None:
        """Announce that a complete file is about to be renamed, and wait for the answer."""
        self.ask("begin", index=index)

    def done(self, index: int, item: ItemReport) -> None:
        """Announce that a file has its final name."""
        self.send("done", index=index, item=item.model_dump(mode="json"))

    def failed(self, index: int, error: LowtideError) -> None:
        """Announce that an item failed."""
        self.send("failed", index=index, **error_to_message(error))


def error_to_message(error: LowtideError) -> dict[str, Any]:
    """Serialize an error for a message."""
    smallest = error.smallest if isinstance(error, BudgetError) else None
    return {
        "message": error.message,
        "hint": error.hint,
        "code": error.exit_code,
        "smallest": smallest,
    }


def error_from_message(message: dict[str, Any]) -> LowtideError:
    """Deserialize the error in a message."""
    error = LowtideError(message["message"], hint=message["hint"])
    if message["code"] == BudgetError.exit_code:
        error = BudgetError(message["message"], smallest=message["smallest"], hint=message["hint"])
    error.exit_code = message["code"]
    return error


def main() -> None:
    """Process orders until there are none left."""
    connection = WorkerConnection()
    setup = connection.receive()
    if setup["tuned_heap"]:
        tune_heap()  # takes effect only before the libraries load
    try:
        pipeline = _make_pipeline(setup, connection)
    except LowtideError as error:
        connection.send("cannot_start", **error_to_message(error))
        return
    from lowtide.jobs.engine.item import JobItem

    try:
        while (order := connection.ask("next")) is not None:
            source, target = Path(order["source"]), Path(order["target"])
            pipeline.submit(JobItem(source, target, order["index"], replace=order["replace"]))
        pipeline.commit_all()
    finally:
        pipeline.abort()
        pipeline.meter.stop()


def _make_pipeline(setup: dict[str, Any], connection: WorkerConnection) -> JobPipeline:
    from lowtide.core.torch_state import set_thread_count
    from lowtide.jobs.engine.pipeline import JobPipeline
    from lowtide.memory.meter import open_meter

    module, _, name = setup["job"].partition(":")
    job_type = getattr(importlib.import_module(module), name)
    job_type.preload(setup["setup"])
    set_thread_count(setup["threads"])
    meter = open_meter(setup["device"])
    meter.start()
    return JobPipeline(
        job_type.load(setup["setup"]),
        connection,
        meter,
        progress=connection.progress,
        scratch=Path(setup["scratch"]),
        count=setup["count"],
        streams=setup["streams"],
    )


if __name__ == "__main__":
    main()
