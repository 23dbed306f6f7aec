"""What every benchmark shares: where results go, what they ran on, one row at a time.

A result file holds the environment and a list of rows, each with a unique ``row`` name. It is
rewritten atomically after every row, so an interrupted benchmark keeps what it has and goes on
from there; ``--fresh`` starts over.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lowtide.core.cpuinfo import cpu_name
from lowtide.core.heap import MMAP_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES

RESULTS = Path(__file__).parent / "results"
# A C heap that keeps what was freed, for times of a process that runs the same again and again:
# of any size, since a block above the first threshold is fetched from the system page by page each
# time it is made.
HEAP_KEEPS = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 36))
# PyTorch's large tensors in huge pages, as the command line has them.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
# A heap that gives back blocks of 4 MiB and more, and keeps 32 MiB of smaller ones: peaks within
# those of live blocks, where every small block fetched again would double a run's time.
HEAP_KEEPS_SMALL = {
    **HUGE_PAGES,
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
}
# The heap as the command line has it, and as glibc has it where nobody sets anything.
HEAP_OF_COMMAND_LINE: dict[str, str | None] = {
    **HUGE_PAGES,
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES),
}
HEAP_OF_GLIBC: dict[str, str | None] = {"MALLOC_MMAP_THRESHOLD_": None, "THP_MEM_ALLOC_ENABLE": "0"}
# glibc tuned as is usual for large tensors: blocks below 1 GiB are kept, up to 2 GiB of them.
HEAP_TO_1GIB: dict[str, str | None] = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
}
PACKAGES = ("lowtide", "torch", "numpy", "pyvips", "pyvips-binary", "spandrel", "typer", "pydantic")


def environment(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Hardware and versions, those of further ``packages`` too; names no particular machine."""
    import torch

    memory = None
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)},
    }


def result_rows(name: str, *figures: str) -> list[dict[str, Any]]:
    """The rows of another benchmark's result file that have all of ``figures``."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there; run {name}.py first")
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if set(figures) <= row.keys()]


def row_parser(about: str | None, *, pairs: int = 0) -> argparse.ArgumentParser:
    """The command line of a benchmark that measures the rows that are missing."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    if pairs:
        parser.add_argument("--pairs", type=int, default=pairs, help="runs of each way, in turns")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    return parser


def in_turns(ways: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """The number of a round and a way, A B then B A, so that what drifts does no way a favor."""
    order = list(ways)
    for number in range(rounds):
        for way in order:
            yield number, way
        order.reverse()


def seconds_in_turns(
    ways: Mapping[str, Callable[[], object]], pairs: int
) -> dict[str, list[float]]:
    """Processor seconds of each way in alternating runs, after a warm-up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number, way in in_turns(ways, pairs + 1):
        started = time.process_time()
        ways[way]()
        if number:
            seconds[way].append(round(time.process_time() - started, 4))
    return seconds


def ratio_of(own: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The spread of how many times as long runs took as the others that they took turns with."""
    return spread([one / other for one, other in zip(own, others, strict=True)])


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, as result files have them."""
    figures = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: round(figure, 3) for name, figure in figures.items()}


class ResultFile:
    """One JSON file of ``benchmarks/results``; rows already in it are not run again.

    ``environments`` says where its rows may come from: all from ``"one"``; from ``"any"``, where
    none is compared with another; or the same rows from ``"each"``, where they depend on it. A row
    from elsewhere than the file's own has an ``environment`` of its own, of what differs.
    """

    def __init__(
        self,
        name: str,
        *,
        about: str,
        fresh: bool = False,
        packages: Sequence[str] = (),
        environments: Literal["one", "any", "each"] = "one",
        folder: Path | None = None,
    ) -> None:
        self.path = (folder or RESULTS) / f"{name}.json"
        here = environment(packages)
        self._elsewhere: dict[str, Any] = {}
        self._each = environments == "each"
        self.data: dict[str, Any] = {
            "schema": 1,
            "benchmark": name,
            "about": about,
            "environment": here,
            "rows": [],
        }
        if self.path.exists() and (self._each or not fresh):
            before = json.loads(self.path.read_text())
            self._elsewhere = _differences(before["environment"], here)
            if self._elsewhere and environments == "one":
                raise SystemExit(
                    f"{self.path} was measured in another environment; pass --fresh to redo it"
                )
            self.data.update(environment=before["environment"], rows=before["rows"])
        if self._each and fresh:
            self.data["rows"] = [row for row in self.data["rows"] if not self.measured_here(row)]

    def measured_here(self, entry: dict[str, Any]) -> bool:
        """Whether a row of the file is of the environment that this process runs in."""
        return entry.get("environment", {}) == self._elsewhere

    def has(self, row: str) -> bool:
        """Whether this row was measured before."""
        return any(entry["row"] == row for entry in self._known())

    def _known(self) -> list[dict[str, Any]]:
        """The rows that count as measured."""
        rows = self.data["rows"]
        return [row for row in rows if self.measured_here(row)] if self._each else rows

    def add(self, row: str, **figures: Any) -> None:
        """Append one measured row and save."""
        if self._elsewhere:
            figures.setdefault("environment", self._elsewhere)
        self.data["rows"].append({"row": row, **figures})
        self._save()
        print(row, json.dumps(figures))

    def drop(self, rows: Iterable[str], *, here: bool = True) -> None:
        """Forget those of ``rows`` that were measured in the environment of this process, or else
        those of another one, with which what is compared must not be mixed."""
        named = set(rows)
        self.data["rows"] = [
            entry
            for entry in self.data["rows"]
            if entry["row"] not in named or self.measured_here(entry) != here
        ]

    def row(self, row: str) -> dict[str, Any]:
        """The figures of a row that was measured before."""
        return next(entry for entry in self._known() if entry["row"] == row)

    def add_growth(self, row: str, small: str, large: str) -> None:
        """A row with how many times the memory of one row another takes."""
        smaller, larger = self.row(small), self.row(large)
        self.add(
            row,
            **{
                figure: round(larger[figure] / smaller[figure], 3)
                for figure in ("peak_bytes", "high_water_bytes")
                if smaller[figure]
            },
        )

    def complete(self, row: str, **figures: Any) -> None:
        """Add figures to a row, and save."""
        self.row(row).update(figures)
        self._save()
        print(row, json.dumps(figures))

    def _save(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)


def _differences(before: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Entries of ``here`` that ``before`` has not, or has otherwise, nested ones too."""
    other: dict[str, Any] = {}
    for name, value in here.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            value = _differences(old, value)
            if not value:
                continue
        # Kernels keep a little more or less of the same memory for themselves.
        if value != old and not (name == "memory_bytes" and abs(value - old) < old / 100):
            other[name] = value
    return other
