"""Fitting what the grid measured: bytes of a kernel and of a storage, and the upper bound.

    python benchmarks/fit.py     # writes src/lowtide/memory/data/calibration.json

The same functions judge the grid with each family left out of the fit.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from common import result_rows

from lowtide.core.heap import HeapMode
from lowtide.core.units import MIB
from lowtide.memory.prediction.calibration import (
    BoundCalibration,
    PredictionResidual,
    RunKind,
    calibrate_bound,
)
from lowtide.memory.prediction.result import HeapGrowth, RuntimeObjectCosts, RuntimeObjectCounts

SHIPPED = Path(__file__).parents[1] / "src" / "lowtide" / "memory" / "data" / "calibration.json"
HEAPS = get_args(HeapMode)
_NAMES = tuple(RuntimeObjectCounts.model_fields)


def fit_runtime(entries: Sequence[dict]) -> RuntimeObjectCosts:
    """Non-negative bytes for each kind of object that explain best what predictions lacked.

    Least squares of errors relative to the measured peak, over all choices of kinds that are
    not negative; the best of those.
    """
    measured = np.array([entry["measured_bytes"] for entry in entries], float)
    lacking = np.array([entry["measured_bytes"] - without_runtime(entry) for entry in entries])
    counts = np.array([[entry["objects"][name] for name in _NAMES] for entry in entries], float)
    best, least = np.zeros(len(_NAMES)), np.inf
    for size in range(len(_NAMES) + 1):
        for kept in itertools.combinations(range(len(_NAMES)), size):
            found = np.zeros(len(_NAMES))
            if kept:
                columns = counts[:, kept] / measured[:, None]
                found[list(kept)] = np.linalg.lstsq(columns, lacking / measured, rcond=None)[0]
            error = float(np.sum(((lacking - counts @ found) / measured) ** 2))
            if (found >= 0).all() and error < least:
                best, least = found, error
    per_kind = {f"{name.rstrip('s')}_bytes": round(value) for name, value in zip(_NAMES, best)}  # noqa: B905
    return RuntimeObjectCosts(**per_kind)


def without_runtime(entry: dict) -> int:
    """A row's prediction less what it allowed for kernels and objects."""
    return entry["predicted_bytes"] - entry["ledger"].get("runtime", 0)


def predicted_with(entry: dict, costs: RuntimeObjectCosts) -> int:
    """A row's prediction with other costs of kernels and objects."""
    return without_runtime(entry) + costs.total_bytes(RuntimeObjectCounts(**entry["objects"]))


def fit(entries: Sequence[dict]) -> tuple[RuntimeObjectCosts, BoundCalibration]:
    """Costs, and the bound of predictions made with them."""
    traced = [entry for entry in entries if entry["method"] == "traced"]
    costs = fit_runtime(traced)
    residuals = [
        PredictionResidual(predicted=predicted_with(entry, costs), measured=entry["measured_bytes"])
        for entry in traced
    ]
    return costs, calibrate_bound(residuals)


def fit_runs(entries: Sequence[dict], heap: HeapMode, kind: RunKind) -> BoundCalibration:
    """The bound of runs of one kind in one mode of the C heap.

    Of a run in tiles, what the heap keeps is off further than the rest, which is that of a heap
    that gives back.
    """
    own = [entry for entry in entries if entry["heap"] == heap]
    if heap != "trim" and kind == "tiled":
        rest = fit_runs(entries, "trim", kind)
        return rest.model_copy(update={"kept_share": kept_share(own, rest)})
    residuals = [
        PredictionResidual(predicted=entry["predicted_bytes"], measured=entry["measured_bytes"])
        for entry in own
    ]
    return calibrate_bound(residuals).model_copy(update={"families": True})


def kept_share(entries: Sequence[dict], rest: BoundCalibration) -> float:
    """The share of what heaps were predicted to keep that bounds what they did, beyond ``rest``."""
    residuals = []
    for entry in entries:
        kept = entry["ledger"]["allocator"]
        others = rest.upper(entry["predicted_bytes"] - kept)
        residuals.append(
            PredictionResidual(predicted=max(kept, MIB), measured=entry["measured_bytes"] - others)
        )
    return calibrate_bound(residuals, parts=(0,)).share


def fit_heap_growth(entries: Sequence[dict]) -> HeapGrowth:
    """How many times the most bytes alive in it a heap held at the peaks of plain scripts.

    The bound has twice as many gaps as the run with the most, since others are of families that no
    run covers.
    """
    held = [row["measured_bytes"] - row["trimming_bytes"] + row["at_peak_bytes"] for row in entries]
    growth = statistics.median(
        count / row["max_live_bytes"] for count, row in zip(held, entries, strict=True)
    )
    gaps = max(
        (count - growth * row["max_live_bytes"]) / row["block_bytes"]
        for count, row in zip(held, entries, strict=True)
    )
    return HeapGrowth(growth=round(growth, 3), upper_gaps=round(2 * gaps, 2), count=len(held))


def heap_growths() -> dict[str, dict[str, dict[str, float]]]:
    """`fit_heap_growth` of each heap, in training and inference."""
    rows = [row for row in measured("estimate_plain") if row["fitted"]]
    parts: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        parts[row["heap"]][row["kind"]].append(row)
    return {
        heap: {kind: fit_heap_growth(part).model_dump() for kind, part in kinds.items()}
        for heap, kinds in parts.items()
    }


def measured(name: str) -> list[dict]:
    """The rows of a result file that were both measured and predicted."""
    return result_rows(name, "measured_bytes", "predicted_bytes")


def main() -> None:
    """Fit all rows and write what ships."""
    whole = measured("memory_grid")
    costs, bound = fit(whole)
    shipped = json.loads(SHIPPED.read_text())
    shipped["cpu"], shipped["runtime"] = bound.model_dump(), costs.model_dump()
    for kind in get_args(RunKind):
        rows = measured(f"memory_{kind}")
        shipped[kind] = {heap: fit_runs(rows, heap, kind).model_dump() for heap in HEAPS}
        print(f"{len(rows)} {kind} rows: {shipped[kind]}")
    shipped["heap_growth"] = heap_growths()
    print(shipped["heap_growth"])
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in shipped.items()]
    SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(whole)} rows: {costs}, {bound}")


if __name__ == "__main__":
    main()
