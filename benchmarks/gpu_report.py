"""All rows that wait for a GPU, oldest first, within some minutes on one GPU.

    python benchmarks/gpu_report.py [--minutes 8] [--only TEXT] [--retry] [--fresh]

Each row runs in a process of its own and is saved before the next one starts. One that fails is a
row that says why; one that cannot run here is named with the reason and left out. When the time is
over the row in progress is dropped, and the same command goes on with it. ``--retry`` measures the
rows that failed again, after all others.

Without a GPU the exit code is 2. ``--device cpu --tiny`` tries the rows on a processor, with
pictures of a few pixels; what it finds is kept only where ``--folder`` says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ResultFile
from gpu_rows import ROWS, Place, Row

# Less time than this measures no row: the process itself takes some of it to start.
_LEAST_SECONDS = 20
# A row that takes longer has failed.
_MOST_SECONDS = 180
_PACKAGES = ("torchvision", "triton", "diffusers", "onnxruntime")
Figures = dict[str, Any]


class TimeOverError(Exception):
    """The report's time was over before a row was measured."""


def measure_in_process(row: Row, place: Place, end: float) -> Figures:
    """A row's figures from a process of its own, or what went wrong there."""
    left = end - time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--device", place.device, "--row", row.name]
        command += ["--found", str(found), *(["--tiny"] if place.tiny else [])]
        started = time.monotonic()
        # A session of its own, so that those whom it starts end with it.
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                process.wait(min(left, _MOST_SECONDS))
            except subprocess.TimeoutExpired:
                if left <= _MOST_SECONDS:
                    raise TimeOverError from None
                return {"error": f"took more than {_MOST_SECONDS} s"}
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        taken = round(time.monotonic() - started, 1)
        if not found.exists():
            return {"error": f"its process ended with {process.returncode}", "row_s": taken}
        return {**json.loads(found.read_text()), "row_s": taken}


def measure_here(row: Row, place: Place, found: Path) -> None:
    """Measure a row in this process; its figures, or its failure, go to a file."""
    try:
        figures = row.measure(place)
    except Exception as error:  # noqa: BLE001 - a failure is a row
        traceback.print_exc()
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        lines = [*traceback.format_exc().splitlines(), *(said or "").splitlines()[-20:]]
        figures = {"error": f"{type(error).__name__}: {error}"[:400], "trace": lines[-40:]}
    found.write_text(json.dumps(figures))


def wanted_rows(results: ResultFile, place: Place, only: list[str], retry: bool) -> list[Row]:
    """Those that were not measured here, oldest first, then those to be retried."""
    missing, failed = [], []
    for row in ROWS:
        if not any(text in row.name for text in only):
            continue
        if why := row.needs(place):
            print(f"{row.name}: left out: {why}")
        elif not results.has(row.name):
            missing.append(row)
        elif retry and "error" in results.row(row.name):
            failed.append(row)
    return missing + failed


def report(results: ResultFile, place: Place, options: argparse.Namespace) -> int:
    """Measure rows until there are none, or no time; 1 if one of them failed."""
    end = time.monotonic() + 60 * options.minutes
    rows = wanted_rows(results, place, options.only, options.retry)
    failed = 0
    while rows and end - time.monotonic() > _LEAST_SECONDS:
        try:
            figures = measure_in_process(rows[0], place, end)
        except TimeOverError:
            break
        results.drop([rows[0].name])
        results.add(rows.pop(0).name, **figures)
        failed += "error" in figures
    if rows:
        print(f"the time is over: {len(rows)} rows are left, the same command goes on")
    return int(failed > 0)


def main() -> int:
    """Report, or measure one row for a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="try the rows with tiny pictures")
    parser.add_argument("--only", nargs="+", default=[""], help="rows named so, or in part")
    parser.add_argument("--retry", action="store_true", help="rows that failed are run again")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows of this machine")
    parser.add_argument("--folder", type=Path, help="where the result file is")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("a report is of a GPU; --device cpu --tiny tries its rows")
    if options.device != "cpu" and not torch.cuda.is_available():
        print("there is no GPU here; --device cpu --tiny tries the rows", file=sys.stderr)
        return 2
    place = Place(options.device, options.tiny)
    if options.row:
        measure_here(next(row for row in ROWS if row.name == options.row), place, options.found)
        return 0
    with tempfile.TemporaryDirectory() as aside:
        results = ResultFile(
            "gpu_report",
            about="What had waited for a GPU: each row was measured in a process of its own.",
            fresh=options.fresh,
            packages=[name for name in _PACKAGES if importlib.util.find_spec(name)],
            environments="each",
            folder=options.folder or (Path(aside) if options.tiny else RESULTS),
        )
        return report(results, place, options)


if __name__ == "__main__":
    sys.exit(main())
