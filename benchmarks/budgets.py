"""One photograph in ten budgets from 300 MiB to 4 GiB: the peak, and what memory buys.

    python benchmarks/budgets.py [--model lowtide-x2] [--rounds 5] [--fresh]

Fresh process per run; every round runs all budgets, each other round backwards, so that a slow
spell of the machine meets all of them. Judged by the median of processor seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from common import ResultFile
from photographs import photograph
from tile_loop import run

SIZE = (2448, 1632)  # 4.0 megapixels
MIB = 1 << 20
BUDGETS = tuple(round(300 * (4096 / 300) ** (step / 9)) for step in range(10))


def main() -> None:
    """Measure all budgets, one row each, and a row with the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lowtide-x2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "budgets", fresh=options.fresh,
        about="A 4-megapixel photograph x2 in ten budgets: peak memory and processor seconds.",
    )  # fmt: skip
    if results.has("comparison"):
        return
    runs: dict[int, list[dict]] = {budget: [] for budget in BUDGETS}
    with tempfile.TemporaryDirectory() as folder:
        source = photograph(Path(folder) / "photo.png", *SIZE)
        target = Path(folder) / "result.png"
        for turn in range(options.rounds + 1):
            for budget in BUDGETS if turn % 2 else BUDGETS[::-1]:
                done = run("lowtide", source, target, f"budget={budget}MiB", model=options.model)
                if turn:  # the first round learns the costs
                    runs[budget].append(done)
    report(results, runs)


def report(results: ResultFile, runs: dict[int, list[dict]]) -> None:
    """One row a budget, and how much slower a budget is than the fastest smaller one."""
    seconds: dict[int, float] = {}
    for budget, done in runs.items():
        seconds[budget] = statistics.median(one["cpu_s"] for one in done)
        peak = max(one["peak_bytes"] for one in done)
        results.add(
            f"{budget} MiB", budget_bytes=budget * MIB, peak_bytes=peak,
            predicted_bytes=done[0]["predicted_bytes"], upper_bytes=done[0]["upper_bytes"],
            within_budget=peak <= budget * MIB, cpu_s=round(seconds[budget], 2),
            cpu_s_all=[one["cpu_s"] for one in done], plan=done[0]["plan"],
        )  # fmt: skip
    slower = [
        seconds[budget] / min(seconds[other] for other in BUDGETS if other < budget)
        for budget in BUDGETS[1:]
    ]
    results.add(
        "comparison", rounds=len(next(iter(runs.values()))),
        all_within_budget=all(row["within_budget"] for row in results.data["rows"]),
        slowest_against_a_smaller_budget=round(max(slower), 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
