"""`lowtide.estimate` on the CPU against plain scripts, polled from outside every 2 ms.

    python benchmarks/estimate_plain.py [--only TEXT] [--fresh]

Each row is a model that is trained with AdamW, or called, by a script without Lowtide
(``plain_steps.py``), on one thread: with glibc's heap as it comes (``default``), and with the
settings that Lowtide's command line makes (``cache``). Measured is anonymous resident memory above
that at the end of the imports; the baseline includes one small model and step.

``fit.py`` fits the growth of the heap to the rows that are ``fitted``. The others, of other sizes
and two other families, judge it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from budget_kept import POLL_SECONDS, anonymous
from common import HEAP_OF_COMMAND_LINE, ResultFile, row_parser
from plain_steps import CASES

import lowtide
from lowtide.core.heap import HeapMode
from lowtide.memory.prediction.estimate import Estimate
from lowtide.memory.prediction.result import HEAP_ROW

SCRIPT = Path(__file__).parent / "plain_steps.py"
HEAPS: dict[HeapMode, dict[str, str | None]] = {"default": {}, "cache": HEAP_OF_COMMAND_LINE}
KINDS = "training", "inference"
JUDGED = ("UNet, 2 of 128", "ViT, 8", "LSTM, 16 of 256", "ResNet, 8 of 224", "GPT, 4 of 256")
# Of the second heap.
SMALL = (
    *("UNet, 1 of 96", "ViT, 3", "convolutions, 1 of 128", "convolutions, 16 of 48"),
    *("perceptron, 1024", "ResNet, 8 of 224", "GPT, 4 of 256"),
)
STEPS = 6


def rows() -> Iterator[tuple[str, str, str, HeapMode]]:
    """The name of each row, then its case, kind and heap."""
    for heap in HEAPS:
        for kind in KINDS:
            for case in CASES if heap == "default" else SMALL:
                yield f"{case}, {kind}, {heap}", case, kind, heap


def estimate(case: str, kind: str, heap: HeapMode) -> Estimate:
    """What Lowtide says without running the step."""
    build, make_inputs = CASES[case]
    step = lowtide.TrainingStep if kind == "training" else lowtide.InferenceStep
    return lowtide.estimate(build(), step(make_inputs()), heap=heap)


def predicted(found: Estimate) -> dict[str, Any]:
    """The figures of an estimate, with what `fit.py` needs."""
    use = found.heap_use
    assert use is not None
    expected, upper = found.trimming_heap_bytes
    return {
        "predicted_bytes": found.predicted_bytes,
        "upper_bytes": found.upper_bytes,
        "trimming_bytes": expected,
        "trimming_upper_bytes": upper,
        "heap_bytes": next(row.value for row in found.ledger if row.name == HEAP_ROW),
        "max_live_bytes": use.max_live,
        "at_peak_bytes": use.at_peak,
        "block_bytes": use.block,
    }


def peaks(case: str, kind: str, heap: HeapMode) -> list[int]:
    """The peak of each step of the script, above the baseline."""
    settings = {"OMP_NUM_THREADS": "1", **HEAPS[heap]}
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), case, kind, str(STEPS)],
        env={**inherited, **{name: value for name, value in settings.items() if value}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise SystemExit(f"{case}: the script did not start")
    baseline = anonymous(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    found = [0]
    reader = threading.Thread(target=lambda: found.extend(0 for _ in child.stdout or ()))
    reader.start()
    while child.poll() is None:
        found[-1] = max(found[-1], anonymous(child.pid) - baseline)
        time.sleep(POLL_SECONDS)
    reader.join()
    if child.returncode:
        raise SystemExit(f"{case}: exit {child.returncode}")
    return found[:STEPS]


def main() -> None:
    """Measure each row that is missing, and tell how far the estimates are off."""
    parser = row_parser(__doc__)
    parser.add_argument("--repredict", action="store_true", help="predictions anew, peaks kept")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = ResultFile(
        "estimate_plain",
        fresh=options.fresh,
        packages=("diffusers", "torchvision"),
        about="Estimates of training steps and calls on the CPU, and peaks of plain scripts.",
    )
    for row, case, kind, heap in rows():
        if options.only not in row or (results.has(row) and not options.repredict):
            continue
        seen = results.row(row)["peaks"] if results.has(row) else peaks(case, kind, heap)
        figures = predicted(estimate(case, kind, heap))
        figures |= {
            "kind": kind,
            "heap": heap,
            "fitted": case not in JUDGED,
            "measured_bytes": max(seen),
            "ratio": round(max(seen) / figures["predicted_bytes"], 3),
            "bound_kept": max(seen) <= figures["upper_bytes"],
            "peaks": seen,
        }
        (results.complete if results.has(row) else results.add)(row, **figures)


if __name__ == "__main__":
    main()
