"""What the measured rows amount to: errors of predictions, and bounds that were exceeded.

    python benchmarks/memory_summary.py

What is judged for a row was fitted to the other families alone: the few bytes allowed for each
compiled kernel and each object, and the upper bound. Rows in tiles (``memory_tiled.py``) and in
bands (``memory_streamed.py``) count beside those of the grid.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import RESULTS, ResultFile, result_rows
from fit import HEAPS, fit, fit_runs, measured, predicted_with

from lowtide.memory.prediction.calibration import RunKind
from lowtide.streaming.planner.ledger_rows import LEAST_MARGIN

ABOUT = "Predicted against measured peak memory, each family of models judged by the others."
# Whole runs by how they were run, which the files of their rows are named by.
RUNS: dict[str, RunKind] = {"in tiles": "tiled", "in bands": "streamed"}
_WORST = 10


def held_out(entries: list[dict]) -> tuple[list[dict], dict[str, int]]:
    """The rows as predicted, and upper bounds by row name, with costs of kernels and objects and
    a calibration that have not seen the row's family.

    Extrapolated predictions bring a bound of their own, which no calibration changes.
    """
    judged, uppers = [], {}
    for family in sorted({entry["family"] for entry in entries}):
        others = [entry for entry in entries if entry["family"] != family]
        if not others:
            raise SystemExit("judged across families: measure at least two families first")
        costs, bound = fit(others)
        for entry in entries:
            if entry["family"] != family:
                continue
            upper = entry["upper_bytes"]
            if entry["method"] == "traced":
                entry = {**entry, "predicted_bytes": predicted_with(entry, costs)}
                upper = bound.upper(entry["predicted_bytes"])
            judged.append(entry)
            uppers[entry["row"]] = upper
    return judged, uppers


def groups(entries: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """The grid's rows of each family, mode, precision and checkpointing, and of other machines."""
    yield "at once", entries
    for name in ("family", "mode", "precision", "checkpointing"):
        parts: dict[str, list[dict]] = defaultdict(list)
        for entry in entries:
            if name != "checkpointing" or entry["mode"] == "training":
                parts[entry[name]].append(entry)
        for value in sorted(parts):
            yield f"{name}: {value}", parts[value]
    if elsewhere := [entry for entry in entries if "environment" in entry]:
        yield "on another machine than the rest", elsewhere


def errors(entries: list[dict], figure: str = "predicted_bytes") -> dict[str, Any]:
    """How far a prediction is from the measurement, in percent of the measurement."""
    shares = [abs(entry[figure] / entry["measured_bytes"] - 1) * 100 for entry in entries]
    low = sum(entry[figure] < entry["measured_bytes"] for entry in entries)
    return {
        "rows": len(entries),
        "median_error_percent": round(statistics.median(shares), 2),
        "p95_error_percent": round(float(np.percentile(shares, 95)), 2),
        "largest_error_percent": round(max(shares), 2),
        "too_low_percent": round(100 * low / len(entries), 1),
    }


def bounds(entries: list[dict], uppers: dict[str, int]) -> dict[str, Any]:
    """How often measurements exceeded their upper bound, and how wide the bounds are."""
    over = [entry["row"] for entry in entries if entry["measured_bytes"] > uppers[entry["row"]]]
    widths = [uppers[entry["row"]] / entry["measured_bytes"] for entry in entries]
    return {
        "over_the_bound": len(over),
        "over_the_bound_percent": round(100 * len(over) / len(entries), 2),
        "median_bound_to_measured": round(statistics.median(widths), 3),
    }


def runs_held_out(entries: list[dict], kind: RunKind) -> dict[str, int]:
    """Upper bounds of tiled or streamed rows by name, from the other families' rows of the same
    kind with the same heap."""
    uppers = {}
    for family, heap in {(entry["family"], entry["heap"]) for entry in entries}:
        others = [entry for entry in entries if entry["family"] != family]
        bound = fit_runs(others, heap, kind)
        for entry in entries:
            if (entry["family"], entry["heap"]) == (family, heap):
                predicted, kept = entry["predicted_bytes"], entry["ledger"].get("allocator", 0)
                upper = bound.upper(predicted, kept)
                uppers[entry["row"]] = max(upper, predicted + LEAST_MARGIN)
    return uppers


def summarize(
    entries: list[dict], runs: dict[str, list[dict]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(row name, figures) of the summary; ``runs`` are those of other kinds."""
    whole, uppers = held_out(entries)
    every = [*whole]
    for title, rows in runs.items():
        uppers |= runs_held_out(rows, RUNS[title])
        every += rows
    yield "all", {**errors(every), **bounds(every, uppers)}
    for kind, rows in runs.items():
        for heap in HEAPS:
            part = [entry for entry in rows if entry["heap"] == heap]
            yield f"{kind}, heap {heap}", {**errors(part), **bounds(part, uppers)}
    for name, part in groups(whole):
        yield name, {**errors(part), **bounds(part, uppers)}
    allocated = [
        {**e, "predicted_bytes": e["c10_peak_bytes"]} for e in whole if "c10_peak_bytes" in e
    ]
    yield "PyTorch's own count of a real run", errors(allocated)
    checked = [entry for entry in whole if "live_measured_bytes" in entry]
    equal = [e for e in checked if e["live_measured_bytes"] == e["live_bytes"]]
    yield (
        "bytes of tensors",
        {
            "rows": len(checked),
            "equal_to_the_byte": len(equal),
            "others": [e["row"] for e in checked if e not in equal],
        },
    )
    seconds = [entry["predict_seconds"] for entry in whole]
    yield (
        "predicting",
        {
            "median_seconds": round(statistics.median(seconds), 2),
            "largest_seconds": max(seconds),
            "extrapolated_rows": sum(entry["method"] != "traced" for entry in whole),
        },
    )
    yield (
        "worst",
        {
            "rows": {
                entry["row"]: round(entry["predicted_bytes"] / entry["measured_bytes"], 3)
                for entry in sorted(every, key=_error)[-_WORST:]
            }
        },
    )


def _error(entry: dict) -> float:
    return abs(entry["predicted_bytes"] / entry["measured_bytes"] - 1)


def failures(*names: str) -> dict[str, Any]:
    """Rows of result files that have an error in place of figures."""
    rows = [row for name in names for row in result_rows(name)]
    failed = {row["row"]: row["error"] for row in rows if "error" in row}
    return {"rows": len(failed), "of": len(rows), "errors": failed}


def main() -> None:
    """Write the summary."""
    summary = ResultFile("memory_grid_summary", about=ABOUT, fresh=True, packages=("diffusers",))
    # Where the grid was measured, not where it is summed up.
    grid = json.loads((RESULTS / "memory_grid.json").read_text(encoding="utf-8"))
    summary.data["environment"] = grid["environment"]
    runs = {title: measured(f"memory_{kind}") for title, kind in RUNS.items()}
    for name, figures in summarize(measured("memory_grid"), runs):
        summary.add(name, **figures)
    summary.add("failed", **failures("memory_grid", *(f"memory_{kind}" for kind in RUNS.values())))


if __name__ == "__main__":
    main()
