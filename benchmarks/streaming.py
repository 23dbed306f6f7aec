"""Models streamed in bands beside the same models run whole, and beside tiles.

    LOWTIDE_DATA=... python benchmarks/streaming.py [--only TEXT] [--pairs 3] [--inputs 1]
        [--usual-heap] [--fresh]

A row for each model, size and way, written as soon as its peak is known and completed by the
rest. Peaks: a fresh process for each row, whose heap gives freed memory back, so that its
anonymous memory is what lives; pages in memory are in it, pages on disk are told apart. Times:
all ways of one model and size in one process, one after another and then the other way round, by
processor seconds, in a heap that keeps what was freed for all of them. Capture is not in the
times; it is told beside them. Errors: against the whole run, and of both against one in fp64,
for so many inputs, unless they are the same; autoencoders are not compared with it, which would
take hours. All rows of one model and size come from one machine: if some of them are missing and
the others are from elsewhere, all are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import HEAP_KEEPS, ResultFile, in_turns, ratio_of, row_parser
from streaming_models import given, made
from torch import Tensor

from lowtide.memory.measuring.fresh import measure_fresh
from lowtide.streaming.bands.streamed import Streamed

# Name, height, width, and the budgets with pages in memory and on disk, as parts of what the
# whole run takes at its peak. A tenth of a budget is left for what is not rows.
SIZES = (
    ("CRAFT", 384, 512, 0.33, 0.2), ("SwinIR", 384, 512, 0.29, 0.2),
    ("VAE decode", 512, 512, 0.65, 0.27), ("VAE encode", 512, 512, 0.65, 0.27),
    ("VAE decode", 768, 768, 0.65, 0.27), ("VAE decode", 1024, 1024, 0.65, 0.27),
    ("DRCT", 384, 512, 0.19, 0.15), ("HAT", 384, 512, 0.19, 0.15),
    ("VAE encode", 768, 768, 0.65, 0.27), ("VAE encode", 1024, 1024, 0.65, 0.27),
    ("RRDB", 384, 512, 0.5, 0.3), ("SPAN", 384, 512, 0.12, 0.12),
    ("SPAN to 0..1", 384, 512, 0.12, 0.12),
    ("Compact", 384, 512, 0.8, 0.8), ("PLKSR", 384, 512, 0.5, 0.3),
    ("VAE decode bf16", 512, 512, 0.65, 0.27), ("CRAFT bf16", 384, 512, 0.33, 0.2),
)  # fmt: skip
# The tiles of diffusers: at this size or larger, or it does not tile at all.
TILE = 256
MEMORY, DISK = "streamed, pages in memory", "streamed, pages on disk"


def way_of(name: str, way: str, budget: int) -> Callable[[Tensor], Tensor]:
    """The model as one way runs it, streamed in so many bytes."""
    model = made(name)
    if way.startswith("diffusers"):
        model.vae.enable_tiling()
        model.vae.tile_sample_min_size, model.vae.tile_latent_min_size = TILE, TILE // 8
        return model
    if way == "whole":
        return model
    return Streamed(model, budget=budget, pages="memory" if way == MEMORY else "disk")


def ways(name: str) -> tuple[str, ...]:
    """What is compared for a model."""
    own = ("whole", MEMORY, DISK)
    return (*own, f"diffusers tiles of {TILE} px") if name.startswith("VAE") else own


_ready: dict[tuple[Any, ...], Callable[[Tensor], Tensor]] = {}


def run_once(name: str, way: str, height: int, width: int, budget: int) -> None:
    """One run; the model and its plan are made in the first, which is not measured."""
    torch.set_num_threads(2)
    key = (name, way, height, width)
    if key not in _ready:
        _ready[key] = way_of(name, way, budget)
    with torch.no_grad():
        _ready[key](given(name, height, width))


def run_times(
    name: str, height: int, width: int, budgets: dict[str, int], pairs: int
) -> dict[str, dict[str, Any]]:
    """Processor seconds of each way, and how far its result is from the whole run's."""
    torch.set_num_threads(2)
    image, order = given(name, height, width), list(ways(name))
    runs, figures = {}, {way: {"cpu_s": []} for way in order}
    whole: Tensor | None = None
    with torch.no_grad():
        for way in order:
            start = time.process_time()
            runs[way] = way_of(name, way, budgets.get(way, 0))
            if isinstance(runs[way], Streamed):
                figures[way]["plan"] = runs[way].explain(image)
            figures[way]["preparing_cpu_s"] = round(time.process_time() - start, 2)
            result = runs[way](image)
            whole = result if whole is None else whole
            figures[way] |= apart(result, whole)
            del result
        for _, way in in_turns(order, pairs):
            start = time.process_time()
            runs[way](image)
            figures[way]["cpu_s"].append(round(time.process_time() - start, 3))
    return figures


def run_errors(
    name: str, height: int, width: int, budget: int, inputs: int
) -> dict[str, dict[str, list[float]]]:
    """For each input the largest and the mean difference of the whole and of the streamed run from
    the whole one in fp64. The largest of millions is one of luck too: hence several inputs."""
    torch.set_num_threads(2)
    runs = {way: way_of(name, way, budget) for way in ("whole", MEMORY)}
    exact = made(name).double()
    errors: dict[str, dict[str, list[float]]] = {
        way: {"errors_to_fp64": [], "rms_errors_to_fp64": []} for way in runs
    }
    with torch.no_grad():
        for seed in range(1, inputs + 1):
            image = given(name, height, width, seed)
            expected = exact(image.double())
            for way, run in runs.items():
                difference = (run(image).double() - expected).abs()
                errors[way]["errors_to_fp64"].append(difference.max().item())
                mean = difference.square().mean().sqrt().item()
                errors[way]["rms_errors_to_fp64"].append(mean)
                del difference
    return errors


def apart(result: Tensor, whole: Tensor) -> dict[str, float | None]:
    """The largest difference, and the mean one in decibels of the whole's range."""
    difference = (result.double() - whole.double()).abs()
    mean = difference.square().mean().sqrt().item()
    span = (whole.max() - whole.min()).item()
    return {
        "max_abs_error": difference.max().item(), "range": span,
        "psnr_db": round(20 * math.log10(span / mean), 1) if mean else None,
    }  # fmt: skip


def main() -> None:
    """Measure what is missing."""
    parser = row_parser(__doc__, pairs=3)
    parser.add_argument(
        "--usual-heap", action="store_true",
        help="add the times with glibc's own settings, by as many pairs, to rows that are there",
    )  # fmt: skip
    parser.add_argument("--inputs", type=int, default=1, help="that are compared with fp64")
    options = parser.parse_args()
    results = ResultFile(
        "streaming", fresh=options.fresh, packages=("diffusers",),
        about="Models streamed in bands, run whole, and in tiles: processor seconds and memory.",
        independent=True,
    )  # fmt: skip
    for name, height, width, *parts in SIZES:
        if options.only not in f"{name} {height}×{width}":
            continue
        if options.usual_heap:
            measure_usual(results, name, height, width, parts, options.pairs)
        else:
            rows = names_of(name, height, width)
            if not is_complete(results, rows, options.inputs):
                results.drop_elsewhere(rows.values())
            measure(results, name, height, width, parts, options.pairs)
            measure_errors(results, name, height, width, parts, options.inputs)


def is_complete(results: ResultFile, rows: dict[str, str], inputs: int) -> bool:
    """Whether all rows of a model and size, by way, have all that is asked for."""
    found = [results.row(row) for row in rows.values() if results.has(row)]
    if len(found) < len(rows) or any("cpu_s" not in row for row in found):
        return False
    return has_errors(results, rows, inputs)


def has_errors(results: ResultFile, rows: dict[str, str], inputs: int) -> bool:
    """Whether both ways were compared with fp64 for as many inputs, if that says anything."""
    if rows["whole"].startswith("VAE") or not results.row(rows[MEMORY])["max_abs_error"]:
        return True
    return len(results.row(rows["whole"]).get("errors_to_fp64", ())) >= inputs


def measure(
    results: ResultFile, name: str, height: int, width: int, parts: list[float], pairs: int
) -> None:
    """The rows of one model and size that are missing or not complete."""
    rows, budgets = names_of(name, height, width), dict[str, int]()
    for way, row in rows.items():
        if way in (MEMORY, DISK):
            budgets |= budgets_of(results.row(rows["whole"]), parts)
        if not results.has(row):
            budget = budgets.get(way, 0)
            usage = measure_fresh("streaming:run_once", name, way, height, width, budget, warmups=1)
            results.add(
                row, model=name, height=height, width=width, way=way, peak_bytes=usage.peak_bytes,
                **({"budget_bytes": budget} if budget else {}),
            )  # fmt: skip
    if any("cpu_s" not in results.row(row) for row in rows.values()):
        timed = measure_fresh(
            "streaming:run_times", name, height, width, budgets, pairs, env=HEAP_KEEPS
        ).result
        for way, figures in timed.items():
            share = results.row(rows[way])["peak_bytes"] / results.row(rows["whole"])["peak_bytes"]
            results.complete(
                rows[way], share_of_peak=round(share, 3),
                ratio=ratio_of(figures["cpu_s"], timed["whole"]["cpu_s"]), **figures,
            )  # fmt: skip


def measure_errors(
    results: ResultFile, name: str, height: int, width: int, parts: list[float], inputs: int
) -> None:
    """How far both are from fp64, for as many inputs as are asked for, where that says anything."""
    rows = names_of(name, height, width)
    if not has_errors(results, rows, inputs):
        budget = budgets_of(results.row(rows["whole"]), parts)[MEMORY]
        errors = measure_fresh("streaming:run_errors", name, height, width, budget, inputs).result
        for way, figures in errors.items():
            results.complete(rows[way], **figures)


def measure_usual(
    results: ResultFile, name: str, height: int, width: int, parts: list[float], pairs: int
) -> None:
    """What the same runs take with a heap that gives back and fetches memory as glibc does, if
    they were measured on this machine."""
    rows = names_of(name, height, width)
    here = (results.has(row) and results.measured_here(results.row(row)) for row in rows.values())
    if not all(here):
        return
    if all("usual_heap_cpu_s" in results.row(row) for row in rows.values()):
        return
    budgets = budgets_of(results.row(rows["whole"]), parts)
    timed = measure_fresh("streaming:run_times", name, height, width, budgets, pairs).result
    for way, figures in timed.items():
        results.complete(
            rows[way], usual_heap_cpu_s=figures["cpu_s"],
            usual_heap_ratio=ratio_of(figures["cpu_s"], timed["whole"]["cpu_s"]),
        )  # fmt: skip


def names_of(name: str, height: int, width: int) -> dict[str, str]:
    """By way the name of its row."""
    return {way: f"{name} {height}×{width}, {way}" for way in ways(name)}


def budgets_of(whole: dict[str, Any], parts: list[float]) -> dict[str, int]:
    """Of the ways in bands, by what the whole run took."""
    return {
        way: int(whole["peak_bytes"] * part)
        for way, part in zip((MEMORY, DISK), parts, strict=True)
    }


if __name__ == "__main__":
    main()
