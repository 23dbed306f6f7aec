"""Memory of training: what is said before the first step, and what the steps take.

    python benchmarks/training_memory.py [--part prediction|checkpointing|validation]
        [--only TEXT] [--pairs 5] [--fresh]

fp32 on the CPU, ×2, with as many threads as OMP_NUM_THREADS says.

prediction: what `lowtide train sr` says of a step, and the peak of three steps of its trainer in
    a fresh process whose heap gives back, after steps of tiny patches.
checkpointing: what a step holds beyond weights, averages and the optimizer's state, by the
    allocator's events; and its processor seconds, in turns, with a heap that keeps.
validation: a picture of 2 megapixels within a budget that validating it whole exceeds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import training_runs as runs
from common import HEAP_KEEPS, ResultFile, ratio_of, row_parser
from photographs import photograph
from subprocess_run import measure_in_subprocess

from lowtide import UsageError
from lowtide.core.units import MIB
from lowtide.jobs.train.memory import plan_step

PREDICTED = tuple(title for title in runs.CONFIGURATIONS if title != "m")
# nano, micro, tiny and xs are one block each, of which nothing can be left out.
CHECKPOINTED = ("nano", "s", "m")
WAYS = ("none", "selective", "full")
VALIDATED, WIDTH, HEIGHT = ("nano", "s"), 1632, 1226
# Of the whole validation's peak.
SHARE = 0.5
# More than there is, so that no batch is split and every plan is reported.
ENOUGH = 1 << 50


def predict(results: ResultFile, only: str, pairs: int) -> None:
    """One row for each configuration."""
    for title in PREDICTED:
        row = f"prediction, {title}"
        if only not in row or results.has(row):
            continue
        config = runs.config_of(title)
        plan = plan_step(config, runs.task_of(config), ENOUGH, "cpu")
        usage = measure_in_subprocess("training_runs:run_steps", title, warmups=1)
        results.add(
            row,
            part="prediction",
            batch=plan.batch,
            patch=config.datasets.train.lq_size,
            predicted_bytes=plan.predicted_bytes,
            upper_bytes=plan.upper_bytes,
            peak_bytes=usage.peak_bytes,
            high_water_bytes=usage.high_water_bytes,
            error_percent=error_percent(plan.predicted_bytes, usage.peak_bytes),
            within_bound=usage.peak_bytes <= plan.upper_bytes,
        )


def error_percent(predicted: int, measured: int) -> float:
    """How much too high a prediction is; negative where it is too low."""
    return round(100 * (predicted / measured - 1), 2)


def checkpoint(results: ResultFile, only: str, pairs: int) -> None:
    """One row for each network: every way against none."""
    for title in CHECKPOINTED:
        row = f"checkpointing, {title}"
        if only not in row or results.has(row):
            continue
        config = runs.config_of(title, "full")
        try:
            plan_step(config, runs.task_of(config), ENOUGH, "cpu")
        except UsageError as error:
            results.add(row, part="checkpointing", refused=error.message)
            continue
        found = measure_in_subprocess(
            "training_runs:compare_checkpointing", title, WAYS, pairs, env=HEAP_KEEPS
        ).result
        results.add(row, part="checkpointing", threads=torch.get_num_threads(), **compare(found))


def compare(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each way's figures, with what it saves and costs against the first."""
    base = next(iter(found.values()))
    return {
        way: {
            **figures,
            "ratio": ratio_of(figures["cpu_s"], base["cpu_s"]),
            "saved_percent": saved_percent(figures["activations_bytes"], base["activations_bytes"]),
        }
        for way, figures in found.items()
    }


def saved_percent(left: int, before: int) -> float:
    """How much of what was held before is not held any more."""
    return round(100 * (1 - left / before), 2)


def validate(results: ResultFile, only: str, pairs: int) -> None:
    """For each network the whole picture, then the same within a part of its memory."""
    for name in VALIDATED:
        whole, within = (f"validation, {name}, {how}" for how in ("whole", "within a budget"))
        if only not in whole + within:
            continue
        with two_megapixels() as (photos, folder):
            if not results.has(whole):
                usage = measure_in_subprocess(
                    "training_runs:validate_whole", name, photos, folder, warmups=1
                )
                results.add(
                    whole,
                    part="validation",
                    width=WIDTH,
                    height=HEIGHT,
                    peak_bytes=usage.peak_bytes,
                    psnr_db=usage.result["psnr"],
                )
            if not results.has(within):
                results.add(within, **validated(results.row(whole), name, photos, folder))


def validated(whole: dict[str, Any], name: str, photos: str, folder: str) -> dict[str, Any]:
    """What the trainer's validation takes and finds, with figures of it to compare."""
    budget = int(whole["peak_bytes"] * SHARE) // MIB
    usage = measure_in_subprocess(
        "training_runs:validate", name, photos, folder, f"{budget}MiB", warmups=1
    )
    score = usage.result["psnr"]
    return {
        "part": "validation",
        "width": WIDTH,
        "height": HEIGHT,
        "budget_bytes": budget * MIB,
        "peak_bytes": usage.peak_bytes,
        "within_budget": usage.peak_bytes <= budget * MIB,
        "share_of_peak": round(usage.peak_bytes / whole["peak_bytes"], 3),
        "psnr_db": score,
        "psnr_difference_db": score - whole["psnr_db"],
    }


@contextmanager
def two_megapixels() -> Iterator[tuple[str, str]]:
    """A folder with one photograph, and one to work in."""
    with tempfile.TemporaryDirectory() as place:
        photos, folder = (Path(place) / name for name in ("photos", "work"))
        for path in (photos, folder):
            path.mkdir()
        photograph(photos / "photo.png", WIDTH, HEIGHT)
        yield str(photos), str(folder)


PARTS = {"prediction": predict, "checkpointing": checkpoint, "validation": validate}


def main() -> None:
    """Measure what is missing."""
    parser = row_parser(__doc__, pairs=5)
    parser.add_argument("--part", choices=PARTS, help="only this part")
    options = parser.parse_args()
    # Plans are for the heap of the processes that are measured, which gives back.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    results = ResultFile(
        "training_memory",
        fresh=options.fresh,
        packages=("accelerate",),
        about="Memory of training steps, predicted and measured, and what lessens it.",
    )
    for part in [options.part] if options.part else PARTS:
        PARTS[part](results, options.only, options.pairs)


if __name__ == "__main__":
    main()
