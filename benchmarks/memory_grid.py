"""Predicted memory against measured memory on the CPU, over the whole zoo.

    python benchmarks/memory_grid.py [--fresh] [--only TEXT] [--limit N] [--jobs 1]
    python benchmarks/memory_grid.py --repredict   # predictions, measurements kept

A fresh process per row (forked from one that only imported), in an order that is random but
always the same, so that any beginning of the grid stands for the whole. Rows that fail or take too
long are rows too. What is measured, and why it can be trusted: ``memory_worker.py``.

What the rows amount to is summed up by ``memory_summary.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import ResultFile
from zoo import Row, checked_rows, rows

SERVER = Path(__file__).parent / "memory_server.py"
ABOUT = "Peak memory of inference and of training steps: predicted without running, and measured."
PACKAGES = ("diffusers",)
# Idle threads that sleep instead of spinning make a shared machine bearable.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "passive",
}


class Server:
    """A process that runs rows in fresh processes of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def run(self, row: Row, *kinds: str) -> dict[str, Any]:
        """All figures of one row; where something failed, what."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(row), kinds]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        with self._process:  # which waits, and closes its pipes
            self._process.terminate()


def run_all(results: ResultFile, options: argparse.Namespace) -> None:
    """Measure what the result file lacks."""
    todo = [row for row in in_order() if options.only in row.name and not results.has(row.name)]
    checked = checked_rows()
    servers: queue.SimpleQueue[Server] = queue.SimpleQueue()
    for _ in range(options.jobs):
        servers.put(Server())

    def run(row: Row) -> dict[str, Any]:
        server = servers.get()
        try:
            figures = server.run(row, "measure", *(["live"] if row.name in checked else []))
            return {"family": row.family, **asdict(row), **figures}
        finally:
            servers.put(server)

    pool = ThreadPoolExecutor(options.jobs)
    try:
        futures = [pool.submit(run, row) for row in todo[: options.limit]]
        for row, future in zip(todo, futures, strict=False):
            results.add(row.name, **future.result())
    finally:  # an interrupt ends the row that runs, not the whole grid later
        pool.shutdown(cancel_futures=True)
        for _ in range(options.jobs):
            servers.get().close()


def in_order() -> list[Row]:
    """The grid, shuffled the same way every time."""
    grid = rows()
    random.Random(0).shuffle(grid)
    return grid


def repredict(results: ResultFile, pattern: str, again: bool) -> None:
    """Predict rows with the package as it is; those predicted before if ``again``.

    Of rows that were measured on another machine only the kernels and objects are counted again:
    their scratch is that machine's.
    """
    entries = {
        entry["row"]: entry
        for entry in results.data["rows"]
        if pattern in entry["row"]
        and "measured_bytes" in entry
        and (again if "predicted_bytes" in entry else results.measured_here(entry))
    }
    server = Server()
    try:
        for row in rows():
            if row.name not in entries:
                continue
            old, figures = entries[row.name], server.run(row, "predict")
            if "error" in figures:
                figures["failed"] = "predict"
            elif not results.measured_here(old):
                figures = _recounted(old, figures)
            kept = {name: old[name] for name in old if name not in _PREDICTED}
            results.data["rows"].remove(old)
            results.add(kept.pop("row"), **kept, **figures)
    finally:
        server.close()


def _recounted(old: dict, figures: dict) -> dict:
    """A row's prediction with kernels and objects as they are counted now."""
    before, now = (each["ledger"].get("runtime", 0) for each in (old, figures))
    return {
        **{name: old[name] for name in _PREDICTED if name in old},
        "predicted_bytes": old["predicted_bytes"] + now - before,
        "ledger": {**old["ledger"], "runtime": now},
        "objects": figures["objects"],
    }


_PREDICTED = (
    "predicted_bytes",
    "upper_bytes",
    "live_bytes",
    "method",
    "phase",
    "operator",
    "predict_seconds",
    "ledger",
    "notes",
    "objects",
    "error",
    "failed",
)


def main() -> None:
    """Measure what is missing, or predict what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many new rows")
    parser.add_argument("--jobs", type=int, default=1, help="rows run side by side")
    parser.add_argument("--repredict", action="store_true", help="keep measurements")
    parser.add_argument("--again", action="store_true", help="predict all rows anew")
    options = parser.parse_args()
    results = ResultFile(
        "memory_grid", about=ABOUT, fresh=options.fresh, packages=PACKAGES, environments="any"
    )
    if options.repredict:
        repredict(results, options.only, options.again)
    else:
        run_all(results, options)


if __name__ == "__main__":
    main()
