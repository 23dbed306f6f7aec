"""Lowtide against the usual tile loop: one 2-megapixel photograph, the same model file.

    python benchmarks/tile_loop.py [--device cpu] [--pairs 5] [--fresh]

Fresh process per run, in the order A B B A; judged by processor seconds (device time is inside
the clock's seconds on CUDA). Both write a PNG with the same compression.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ResultFile
from photographs import as_array, photograph

WORKER = Path(__file__).parent / "worker.py"
SIZE = (1730, 1156)  # 2.0 megapixels
MODEL = "lowtide-x2"
FIGURES = ("cpu_s", "wall_s", "peak_bytes", "high_water_bytes")


def run(kind: str, source: Path, target: Path, *options: str) -> dict:
    """One fresh process."""
    command = [sys.executable, str(WORKER), kind, str(source), str(target), MODEL, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def middle(runs: list[dict], name: str) -> dict[str, float]:
    """Median and spread of one figure."""
    values = [run[name] for run in runs]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Measure pairs, then add one row for each side and one for the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    name = "tile_loop" if options.device == "cpu" else "tile_loop_gpu"
    results = ResultFile(
        name, about="A 2-megapixel photograph x2: Lowtide and the usual tile loop (256, pad 10).",
        fresh=options.fresh,
    )  # fmt: skip
    if results.has("comparison"):
        return
    with tempfile.TemporaryDirectory() as folder:
        source = photograph(Path(folder) / "photo.png", *SIZE)
        targets = {kind: Path(folder) / f"{kind}.png" for kind in ("lowtide", "tile_loop")}
        device = f"device={options.device}"
        sides: dict[str, list[dict]] = {"lowtide": [], "tile_loop": []}
        run("lowtide", source, targets["lowtide"], device)  # learns the model's costs once
        for pair in range(options.pairs):
            order = ("lowtide", "tile_loop") if pair % 2 == 0 else ("tile_loop", "lowtide")
            for kind in order:
                sides[kind].append(run(kind, source, targets[kind], device))
        difference = abs(
            as_array(targets["lowtide"]).astype(int) - as_array(targets["tile_loop"]).astype(int)
        )
    for kind, runs in sides.items():
        figures = {figure: middle(runs, figure) for figure in FIGURES}
        plan = {"plan": runs[0]["plan"]} if "plan" in runs[0] else {}
        results.add(kind, pairs=options.pairs, **figures, **plan)
    results.add("comparison", **{
        f"{figure}_ratio": {
            "median": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3), "max": round(max(ratios), 3),
        }
        for figure in FIGURES
        if (ratios := [a[figure] / b[figure] for a, b in
                       zip(sides["lowtide"], sides["tile_loop"], strict=True)])
    }, largest_difference_of_255=int(difference.max()))  # fmt: skip


if __name__ == "__main__":
    main()
