"""One photograph in ten budgets from 300 MiB to 4 GiB: the peak, and what memory buys.

    python benchmarks/budgets.py [--only lowtide-x2] [--rounds 3] [--fresh]

Fresh process per run; every round runs all budgets, each other round backwards, so that a slow
phase of the machine affects all of them. Judged by the median of processor seconds, for which the
runs of all budgets with the same plan are pooled: they do the same work. The spread of their
medians is the machine's noise, and is reported too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from common import ResultFile
from photographs import photograph
from tile_loop import run

# Whose whole image takes more than most of the budgets, and whose takes less.
PHOTOGRAPHS = {"lowtide-x2": (2448, 1632), "lowtide-x4": (1224, 816)}
MIB = 1 << 20
BUDGETS = tuple(round(300 * (4096 / 300) ** (step / 9)) for step in range(10))


def main() -> None:
    """Measure all budgets, one row each, and a row with the comparison, for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PHOTOGRAPHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "budgets",
        fresh=options.fresh,
        about="A photograph in ten budgets: peak memory and processor seconds.",
    )
    for model in [options.only] if options.only else PHOTOGRAPHS:
        if not results.has(f"{model}, comparison"):
            report(results, model, measure(model, options.rounds))


def measure(model: str, rounds: int) -> dict[int, list[dict]]:
    """What `worker.py` says of each budget in each round."""
    runs: dict[int, list[dict]] = {budget: [] for budget in BUDGETS}
    with tempfile.TemporaryDirectory() as folder:
        source = photograph(Path(folder) / "photo.png", *PHOTOGRAPHS[model])
        target = Path(folder) / "result.png"
        for turn in range(rounds + 1):
            for budget in BUDGETS if turn % 2 else BUDGETS[::-1]:
                done = run("lowtide", source, target, f"budget={budget}MiB", model=model)
                if turn:  # the first round learns the costs
                    runs[budget].append(done)
    return runs


def report(results: ResultFile, model: str, runs: dict[int, list[dict]]) -> None:
    """One row a budget, and how much slower a budget is than the fastest smaller one."""
    width, height = PHOTOGRAPHS[model]
    for budget, done in runs.items():
        peak = max(one["peak_bytes"] for one in done)
        results.add(
            f"{model}, {budget} MiB",
            model=model,
            width=width,
            height=height,
            budget_bytes=budget * MIB,
            peak_bytes=peak,
            predicted_bytes=done[0]["predicted_bytes"],
            upper_bytes=done[0]["upper_bytes"],
            within_budget=peak <= budget * MIB,
            cpu_s=round(statistics.median(one["cpu_s"] for one in done), 2),
            cpu_s_all=[one["cpu_s"] for one in done],
            plan=done[0]["plan"],
        )
    measured = (row for row in results.data["rows"] if row["model"] == model)
    rows = [row for row in measured if "budget_bytes" in row]
    results.add(f"{model}, comparison", model=model, **compare(rows))


def compare(rows: list[dict]) -> dict:
    """Whether all budgets were kept, and the greatest ratio to a smaller budget's seconds."""
    by_plan: dict[str, list[dict]] = {}
    for row in rows:
        by_plan.setdefault(row["plan"], []).append(row)
    pooled = {
        plan: statistics.median(second for row in same for second in row["cpu_s_all"])
        for plan, same in by_plan.items()
    }
    return {
        "rounds": len(rows[0]["cpu_s_all"]),
        "plans": len(by_plan),
        "all_within_budget": all(row["within_budget"] for row in rows),
        "slowest_against_a_smaller_budget": _slowest([pooled[row["plan"]] for row in rows]),
        "each_budget_by_itself": _slowest([row["cpu_s"] for row in rows]),
        "spread_within_a_plan": round(
            max(
                max(row["cpu_s"] for row in same) / min(row["cpu_s"] for row in same)
                for same in by_plan.values()
            ),
            3,
        ),
    }


def _slowest(seconds: list[float]) -> float:
    """The greatest ratio of a budget's seconds to the least of the smaller ones."""
    ratios = (one / min(seconds[:place]) for place, one in enumerate(seconds) if place)
    return round(max(ratios), 3)


if __name__ == "__main__":
    main()
