"""Lowtide against the usual tile loop: one 2-megapixel photograph, the same model file.

    python benchmarks/tile_loop.py [--device cpu] [--pairs 5] [--fresh]

Fresh process per run, in the order A B C C B A; judged by processor seconds (device time is
inside the clock's seconds on CUDA). All write a PNG with the same compression. The command line
tunes the C heap of its process; the loop is measured as it comes, and with that tuning too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ResultFile, in_turns, spread
from photographs import as_array, photograph

WORKER = Path(__file__).parent / "worker.py"
SIZE = (1730, 1156)  # 2.0 megapixels
MODEL = "lowtide-x2"
SIDES = {
    "lowtide": ("lowtide", "tuned=yes"),
    "tile_loop": ("tile_loop", "tuned=no"),
    "tile_loop, tuned heap": ("tile_loop", "tuned=yes"),
}
FIGURES = ("cpu_s", "wall_s", "peak_bytes", "high_water_bytes")


def run(kind: str, source: Path, target: Path, *options: str, model: str = MODEL) -> dict:
    """One fresh process."""
    command = [sys.executable, str(WORKER), kind, str(source), str(target), model, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def middle(runs: list[dict], name: str) -> dict[str, float]:
    """Median and spread of one figure."""
    values = [run[name] for run in runs]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(
    device: str, pairs: int, size: tuple[int, int] = SIZE
) -> tuple[dict[str, list[dict]], int]:
    """All runs by side, and the largest difference between the two pictures (of 255)."""
    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        source = photograph(Path(folder) / "photo.png", *size)
        targets = {kind: Path(folder) / f"{kind}.png" for kind in ("lowtide", "tile_loop")}
        run("lowtide", source, targets["lowtide"], f"device={device}")  # learns the costs once
        for _, side in in_turns(SIDES, pairs):
            kind, tuned = SIDES[side]
            runs[side].append(run(kind, source, targets[kind], f"device={device}", tuned))
        pictures = [as_array(target).astype(int) for target in targets.values()]
    return runs, int(abs(pictures[0] - pictures[1]).max())


def ratios(ours: list[dict], theirs: list[dict]) -> dict[str, dict[str, float]]:
    """Median and spread of our figure over theirs, run by run."""
    compared = {}
    for figure in FIGURES:
        if ours[0][figure] is None:
            continue  # a GPU has no high-water mark of its own
        values = [a[figure] / b[figure] for a, b in zip(ours, theirs, strict=True)]
        compared[f"{figure}_ratio"] = spread(values)
    return compared


def main() -> None:
    """Measure all sides, then add one row for each and one for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    name = "tile_loop" if options.device == "cpu" else "tile_loop_gpu"
    results = ResultFile(
        name,
        about="A 2-megapixel photograph x2: Lowtide and the usual tile loop (256, pad 10).",
        fresh=options.fresh,
    )
    if results.has("comparison"):
        return
    runs, difference = measure(options.device, options.pairs)
    for side, done in runs.items():
        figures = {
            figure: middle(done, figure) for figure in FIGURES if done[0][figure] is not None
        }
        plan = {"plan": done[0]["plan"]} if "plan" in done[0] else {}
        results.add(side, pairs=options.pairs, **figures, **plan)
    results.add(
        "comparison",
        **ratios(runs["lowtide"], runs["tile_loop"]),
        largest_difference_of_255=difference,
    )
    results.add("comparison, tuned heap", **ratios(runs["lowtide"], runs["tile_loop, tuned heap"]))


if __name__ == "__main__":
    main()
