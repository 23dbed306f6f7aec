"""Predicted memory against measured memory of whole tiled runs, as users have them.

    python benchmarks/memory_tiled.py [--fresh] [--only TEXT] [--limit N]
    python benchmarks/memory_tiled.py --repredict    # plans anew, measurements kept

Each row upscales a photograph of a few tiles with one model and one size of tile: reading,
converting, the network, merging and encoding, and the check of tiles that are not exact. A fresh
process per row, with its plan's upper bound for a budget; what the model costs is learned in
another one before, kept in ``$LOWTIDE_CACHE`` if that is set. Twice each: with a C heap that gives
freed blocks of 64 KiB and more back, as in the grid (``gives back``), and with one that keeps
blocks of up to 32 MiB for the next tile, as the command line sets it (``keeps``).

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from common import ResultFile
from memory_grid import ENVIRONMENT

from lowtide.core.heap import HeapSetting

if TYPE_CHECKING:
    from zoo_models import Costs

ABOUT = "Peak memory of whole tiled runs: predicted by the plan, and measured."
MIB = 1 << 20
# Expected memory of the rows; smaller ones would measure the process more than the tiles.
TARGETS = (160 * MIB, 320 * MIB, 640 * MIB)
_NAMES = (
    "lowtide-x2", "lowtide-x4", "plksr", "nafnet", "esrgan", "swinir", "craft", "scunet", "dat",
    "drct", "hat",
)  # fmt: skip
_SLOW = ("swinir", "drct", "hat", "scunet", "dat", "craft")
# What windows over all of a model's reach leave of a smaller tile would be nothing.
_STEP, _LEAST = 32, 160
_SECONDS = 900
# So much that no probe is cut short, whose costs would serve this budget alone.
_PLENTY = 16 << 30
_PREDICTED = ("predicted_bytes", "upper_bytes", "plan", "ledger")


@dataclass(frozen=True)
class TiledRow:
    """One run: a model of the zoo, the side of its tiles in input pixels, the C heap's setting."""

    entry: str
    tile: int
    heap: HeapSetting

    @property
    def name(self) -> str:
        """Unique in the file."""
        return f"{self.entry} tiles of {self.tile} px, heap {self.heap}"


def rows() -> Iterator[TiledRow]:
    """All rows: per model two or three sizes of tile, each with both heaps."""
    from zoo_models import ENTRIES

    for heap in get_args(HeapSetting):  # what a model costs is learned for each
        for name in _NAMES:
            if name in ENTRIES:  # the trained ones are there where their data are
                for tile in _tiles(name, ENTRIES[name].costs):
                    yield TiledRow(name, tile, heap)


def _tiles(name: str, costs: Costs) -> Iterator[int]:
    tile = _LEAST - _STEP
    for target in TARGETS[:2] if name in _SLOW else TARGETS:
        side = ((target - costs.weights) / costs.inference) ** 0.5
        tile = max(tile + _STEP, round(side / _STEP) * _STEP)
        yield tile


def prepare(row: TiledRow, folder: Path) -> tuple[Path, str]:
    """The photograph, a little larger than a tile each way, and the model's file or name."""
    import torch
    from photographs import photograph
    from safetensors.torch import save_file
    from zoo_models import ENTRIES

    picture = folder / f"{row.tile}.png"
    if not picture.exists():
        photograph(picture, 3 * row.tile // 2, 5 * row.tile // 4)
    if row.entry.startswith("lowtide"):
        return picture, row.entry
    model = folder / f"{row.entry}.safetensors"
    if not model.exists():
        torch.manual_seed(0)
        weights = ENTRIES[row.entry].build().state_dict()
        save_file({name: value.contiguous().clone() for name, value in weights.items()}, model)
    return picture, str(model)


def work(row: TiledRow, budget: int, folder: Path) -> dict[str, Any]:
    """In this process: what a run takes in a budget, or with none what the plan says."""
    from lowtide.core.heap import trim_heap, tune_heap

    if row.heap == "keeps":
        tune_heap()
    import lowtide

    picture, model = prepare(row, folder)
    options: dict[str, Any] = {
        "model": model, "strategy": "tiled", "tile": row.tile, "device": "cpu",
        "budget": f"{-(-(budget or _PLENTY) // MIB)}MiB",
    }  # fmt: skip
    if not budget:
        plan = lowtide.plan(picture, folder / "out.png", **options).images[0].plan
        return _said(plan)
    from memory_worker import Pages

    lowtide.load(model)  # imports what loading it needs
    trim_heap(collect=True)
    with Pages() as pages:
        report = lowtide.upscale(picture, folder / "out.png", force=True, **options)
    image = report.images[0]
    assert image.memory is not None
    return {
        "measured_bytes": pages.measured_bytes, "reported_bytes": image.memory.peak_bytes,
        "cpu_seconds": round(image.cpu_seconds, 2), **_said(image.plan),
    }  # fmt: skip


def _said(plan: Any) -> dict[str, Any]:
    return {
        "predicted_bytes": plan.predicted_bytes, "upper_bytes": plan.upper_bytes,
        "plan": plan.title, "ledger": {line.name: line.value for line in plan.ledger},
    }  # fmt: skip


def in_fresh_process(row: TiledRow, budget: int, folder: Path) -> dict[str, Any]:
    """The figures of `work`, or what went wrong."""
    learned = Path(os.environ.get("LOWTIDE_CACHE", folder))
    cache = learned / row.heap.replace(" ", "-")
    environment = {**os.environ, **ENVIRONMENT, "LOWTIDE_CACHE": str(cache)}
    if row.heap == "keeps":
        del environment["MALLOC_MMAP_THRESHOLD_"]
    words = json.dumps(asdict(row)), str(budget), str(folder)
    command = [sys.executable, __file__, "--work", *words]
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


def measure(results: ResultFile, options: argparse.Namespace, folder: Path) -> None:
    """Run what the result file lacks."""
    from zoo_models import ENTRIES

    todo = [row for row in rows() if options.only in row.name and not results.has(row.name)]
    for row in todo[: options.limit]:
        about = {"family": ENTRIES[row.entry].family, **asdict(row)}
        figures = in_fresh_process(row, 0, folder)  # learns what the model costs
        if "error" not in figures:
            figures = in_fresh_process(row, figures["upper_bytes"], folder)
        results.add(row.name, **about, **figures)


def repredict(results: ResultFile, pattern: str, folder: Path) -> None:
    """Plan rows that were measured here with the package as it is now."""
    here = [entry for entry in results.data["rows"] if results.measured_here(entry)]
    for old in here:
        if pattern not in old["row"] or "measured_bytes" not in old:
            continue
        row = TiledRow(old["entry"], old["tile"], old["heap"])
        kept = {name: value for name, value in old.items() if name not in _PREDICTED}
        results.data["rows"].remove(old)
        results.add(kept.pop("row"), **kept, **in_fresh_process(row, 0, folder))


def main() -> None:
    """Measure what is missing, or plan anew."""
    if sys.argv[1:2] == ["--work"]:
        row, budget, folder = sys.argv[2:]
        print(json.dumps(work(TiledRow(**json.loads(row)), int(budget), Path(folder))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has this")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many new rows")
    parser.add_argument("--repredict", action="store_true", help="keep measurements")
    options = parser.parse_args()
    results = ResultFile("memory_tiled", about=ABOUT, fresh=options.fresh, independent=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.repredict:
            repredict(results, options.only, Path(folder))
        else:
            measure(results, options, Path(folder))


if __name__ == "__main__":
    main()
