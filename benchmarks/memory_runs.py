"""Predicted against measured memory of whole `upscale` runs: what their benchmarks share.

Each row upscales a photograph with one model: reading, converting, the network, putting rows
together and encoding. It is planned in one process, where what the model costs is learned too
(kept in ``$LOWTIDE_CACHE`` if that is set), and that plan is run in a fresh one, with the plan's
upper bound for a budget. Three times each: with a C heap that gives freed blocks of 64 KiB and more
back, as in the grid (``trim``), with one that keeps blocks of up to 16 MiB for later, as the
command line sets it (``cache``), and with glibc's as it comes, in a plain Python process
(``default``).

Measured by ``memory_worker.Pages``: anonymous memory that the run adds to a process that has loaded
all libraries, the weights included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import HUGE_PAGES, ResultFile
from memory_grid import ENVIRONMENT

from lowtide import BudgetError
from lowtide.core.heap import HeapMode
from lowtide.core.units import GIB, MIB
from lowtide.memory.plan_file import PlanFile

# Models of the zoo, each of a family of its own.
NAMES = (
    "lowtide-x2",
    "lowtide-x4",
    "plksr",
    "nafnet",
    "esrgan",
    "swinir",
    "craft",
    "scunet",
    "dat",
    "drct",
    "hat",
)
SLOW = ("swinir", "drct", "hat", "scunet", "dat", "craft")
# So much that no probe is cut short, whose costs would serve this budget alone.
PLENTY = 16 * GIB
_SECONDS = 900
_PREDICTED = ("predicted_bytes", "upper_bytes", "plan", "ledger")


@dataclass(frozen=True)
class RunRow(ABC):
    """One run: a model of the zoo and the C heap's setting; how it is run, subclasses say."""

    entry: str
    heap: HeapMode

    @property
    @abstractmethod
    def name(self) -> str:
        """Unique in the file."""

    @property
    @abstractmethod
    def picture(self) -> tuple[int, int]:
        """(width, height) of the photograph."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Arguments of `lowtide.upscale`, the model and the budget left out."""

    @property
    def scarce(self) -> bool:
        """Whether the budget is little more than the least that any plan needs."""
        return False


def _prepare(row: RunRow, folder: Path) -> tuple[Path, str]:
    """The photograph, and the model's file or name."""
    import torch
    from photographs import photograph
    from safetensors.torch import save_file
    from zoo_models import ENTRIES

    width, height = row.picture
    picture = folder / f"{width}x{height}.png"
    if not picture.exists():
        photograph(picture, width, height)
    if row.entry.startswith("lowtide"):
        return picture, row.entry
    model = folder / f"{row.entry}.safetensors"
    if not model.exists():
        torch.manual_seed(0)
        weights = ENTRIES[row.entry].build().state_dict()
        save_file({name: value.contiguous().clone() for name, value in weights.items()}, model)
    return picture, str(model)


def work(row: RunRow, kind: str, folder: Path) -> dict[str, Any]:
    """In this process: ``plan`` makes the plan and keeps it, ``run`` measures a run by it."""
    from lowtide.core.heap import tune_heap

    if row.heap == "cache":
        tune_heap()
    picture, model = _prepare(row, folder)
    options = {"model": model, "device": "cpu"}
    return (_plan if kind == "plan" else _run)(row, picture, folder, options)


def _plan(row: RunRow, picture: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    import lowtide

    _load(row, options)

    def planned(budget: int) -> Any:
        target, given = folder / "out.png", {**row.options, **options}
        return lowtide.plan(picture, target, budget=budget, force=True, **given).images[0]

    image = planned(PLENTY)
    if row.scarce:
        try:
            image = planned(MIB)
        except BudgetError as error:
            image = planned(int(1.1 * (error.smallest or 0)))
    if image.plan is None:
        raise SystemExit(image.error)
    (folder / "plan.json").write_text(image.plan.model_dump_json())
    return _said(image.plan)


def _run(row: RunRow, picture: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from memory_worker import Pages

    import lowtide

    book = folder / "plan.json"
    budget = PlanFile.read(book).plans[0][1].upper_bytes
    _load(row, options)
    with Pages() as pages:
        report = lowtide.upscale(
            picture, folder / "out.png", force=True, plan_file=book, budget=budget, **options
        )
    image = report.images[0]
    assert image.memory is not None
    return {
        "measured_bytes": pages.measured_bytes,
        "reported_bytes": image.memory.peak_bytes,
        "cpu_seconds": round(image.cpu_seconds, 2),
    }


def _load(row: RunRow, options: dict[str, Any]) -> None:
    """Import what loading and running this model needs, which is no part of what is compared."""
    import lowtide
    from lowtide.core.heap import trim_heap
    from lowtide.streaming.planner.program_cache import import_capture_libraries

    lowtide.load(options["model"])
    if row.options["strategy"] == "streamed":
        import_capture_libraries()
    trim_heap(collect=True)


def _said(plan: Any) -> dict[str, Any]:
    return {
        "predicted_bytes": plan.predicted_bytes,
        "upper_bytes": plan.upper_bytes,
        "plan": plan.title,
        "ledger": {line.name: line.value for line in plan.ledger},
    }


def _in_fresh_process(row: RunRow, kind: str, folder: Path) -> dict[str, Any]:
    """The figures of `work`, or what went wrong."""
    learned = Path(os.environ.get("LOWTIDE_CACHE", folder))
    cache = learned / row.heap.replace(" ", "-")
    environment = {**os.environ, **ENVIRONMENT, "LOWTIDE_CACHE": str(cache)}
    environment |= HUGE_PAGES if row.heap != "default" else {}
    if row.heap != "trim":
        del environment["MALLOC_MMAP_THRESHOLD_"]
    command = [sys.executable, sys.argv[0], "--work", json.dumps(asdict(row)), kind, str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {_SECONDS} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return {"error": said[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _measure(
    results: ResultFile, rows: Iterable[RunRow], options: argparse.Namespace, folder: Path
) -> None:
    """Run what the result file lacks."""
    from zoo_models import ENTRIES

    todo = [row for row in rows if options.only in row.name and not results.has(row.name)]
    for row in todo[: options.limit]:
        about = {"family": ENTRIES[row.entry].family, **asdict(row)}
        figures = _in_fresh_process(row, "plan", folder)
        if "error" not in figures:
            figures |= _in_fresh_process(row, "run", folder)
        results.add(row.name, **about, **figures)


def _repredict(
    results: ResultFile, rows: Iterable[RunRow], options: argparse.Namespace, folder: Path
) -> None:
    """Plan rows that were measured here with the package as it is now."""
    known = {row.name: row for row in rows}
    here = [entry for entry in results.data["rows"] if results.measured_here(entry)]
    for old in here:
        if options.only not in old["row"] or "measured_bytes" not in old:
            continue
        kept = {name: value for name, value in old.items() if name not in _PREDICTED}
        figures = _in_fresh_process(known[old["row"]], "plan", folder)
        results.data["rows"].remove(old)
        results.add(kept.pop("row"), **kept, **figures)


def main(name: str, about: str, kind: type[RunRow], rows: Iterable[RunRow], *, doc: str) -> None:
    """The command line of a benchmark: measure what is missing, or plan anew."""
    if sys.argv[1:2] == ["--work"]:
        row, step, folder = sys.argv[2:]
        print(json.dumps(work(kind(**json.loads(row)), step, Path(folder))))
        return
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many new rows")
    parser.add_argument("--repredict", action="store_true", help="keep measurements")
    options = parser.parse_args()
    results = ResultFile(name, about=about, fresh=options.fresh, environments="any")
    with tempfile.TemporaryDirectory() as folder:
        (_repredict if options.repredict else _measure)(results, rows, options, Path(folder))
