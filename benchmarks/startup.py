"""How long `lowtide --help` takes: fresh processes, clock and processor time, no heavy imports.

python benchmarks/startup.py [--fresh]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from common import ResultFile

COMMANDS = (["--help"], ["doctor", "--help"], ["upscale", "--help"])
RUNS = 11
HEAVY = ("torch", "numpy", "pydantic", "pyvips", "spandrel")


def measure(words: list[str]) -> dict[str, float]:
    """Median and spread over fresh processes, after one to warm the disk cache."""
    command = [sys.executable, "-m", "lowtide", *words]
    wall, cpu = [], []
    for run in range(RUNS + 1):
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        if run:
            wall.append(time.perf_counter() - start)
            cpu.append(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
    return {
        "wall_median_s": round(statistics.median(wall), 3),
        "wall_min_s": round(min(wall), 3),
        "wall_max_s": round(max(wall), 3),
        "cpu_median_s": round(statistics.median(cpu), 3),
        "runs": RUNS,
    }


def heavy_imports(words: list[str]) -> list[str]:
    """Which of the heavy libraries the command has imported when it ends."""
    code = (
        "import sys, atexit; from lowtide.cli.main import main\n"
        f"atexit.register(lambda: print(*[m for m in {HEAVY!r} if m in sys.modules], "
        "file=sys.stderr))\n"
        f"main({words!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.split()


def main() -> None:
    """Measure each command once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    fresh = parser.parse_args().fresh
    results = ResultFile("startup", about="Start of the command line.", fresh=fresh)
    for words in COMMANDS:
        row = "lowtide " + " ".join(words)
        if not results.has(row):
            results.add(row, **measure(words), heavy_imports=heavy_imports(words))


if __name__ == "__main__":
    main()
