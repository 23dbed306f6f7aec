"""Window transformers as Lowtide runs their files, against spandrel's forward pass.

    LOWTIDE_DATA=... python benchmarks/fast_windows.py [--only TEXT] [--pairs 5] [--fresh]

Full-depth models with fixed random weights and a trained CRAFT. Errors: the largest difference of
both results at five sizes, padded as the model asks for it. Times: processor seconds of both in one
process, in turns, in a heap that keeps what was freed; bf16 against fp32 of spandrel's, and its
error in decibels of the result's range. Peaks: anonymous memory of a fresh process for each, in a
heap that gives back. Each processor has rows of its own: what low precision gains differs. One
without instructions for bf16 has no such rows but for CRAFT: a run would take hours.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from common import HEAP_KEEPS, ResultFile, in_turns, ratio_of, row_parser
from streaming_models import given, made
from streaming_runs import difference
from subprocess_run import measure_in_subprocess
from torch import Tensor, nn

from lowtide.core.cpuinfo import cpuinfo_field
from lowtide.models.low_precision import to_low_precision
from lowtide.models.optimized.replace import replace_modules
from lowtide.streaming.tiles.tile_step import DTYPES

# Times at these sides; DRCT is what most of the time of a job is spent in.
SIDES = {"DRCT": (128, 256), "HAT": (128,), "SwinIR": (128,), "CRAFT": (128,), "DRCT-L": (128,)}
# Heights and widths of the comparison, and what the classes want them to be multiples of.
SIZES = ((64, 64), (48, 97), (33, 70), (120, 57), (17, 130))
GRAIN = {"DRCT": 16, "DRCT-L": 16, "HAT": 16}
WAYS = ("spandrel", "fast", "fast bf16")
# What a lower precision costs in accuracy is asked of trained weights.
TRAINED_WAYS = (*WAYS, "fast fp16")


def ways(name: str) -> tuple[str, ...]:
    """What is compared for a model."""
    if name == "CRAFT":
        return TRAINED_WAYS
    return WAYS if has_bf16() else WAYS[:2]


@functools.cache
def has_bf16() -> bool:
    """Whether the processor, by its flags, has instructions for bf16 (x86 or Arm)."""
    flags = " ".join(cpuinfo_field("flags") + cpuinfo_field("Features")).split()
    return "avx512_bf16" in flags or "bf16" in flags


def model_of(name: str, way: str) -> nn.Module:
    """The model as it is, or as its file is loaded."""
    model = made(name)
    if way != "spandrel":
        replace_modules(model)
    _, _, precision = way.partition(" ")
    if precision:
        return to_low_precision(model, DTYPES[precision], image_of(name, 64, 64))
    return model


def image_of(name: str, height: int, width: int) -> Tensor:
    """An input that the model takes."""
    grain = GRAIN.get(name, 8)
    image = given(name, *(-(-side // grain) * grain for side in (height, width)))
    if name not in GRAIN:  # these pad for themselves
        image = image[..., :height, :width]
    return image


def run_error(name: str) -> dict[str, Any]:
    """The largest difference at each size."""
    torch.set_num_threads(2)
    plain, fast = (model_of(name, way) for way in WAYS[:2])
    errors = {}
    with torch.inference_mode():
        for height, width in SIZES:
            image = image_of(name, height, width)
            errors[f"{height}×{width}"] = (fast(image) - plain(image)).abs().max().item()
    return {"max_abs_error": max(errors.values()), "by_size": errors}


_ready: dict[str, tuple[nn.Module, Tensor]] = {}


def run_once(name: str, way: str, side: int) -> None:
    """One run; the model is made in the first, which is not measured."""
    torch.set_num_threads(2)
    if way not in _ready:
        _ready[way] = model_of(name, way), image_of(name, side, side)
    model, image = _ready[way]
    with torch.inference_mode():
        model(image)


def run_times(name: str, side: int, pairs: int) -> dict[str, dict[str, Any]]:
    """Processor seconds of each way in turns, and how far its result is from spandrel's."""
    torch.set_num_threads(2)
    whole = None
    runs: dict[str, Callable[[], Tensor]] = {}
    figures: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for way in ways(name):
            model, image = model_of(name, way), image_of(name, side, side)
            runs[way] = lambda model=model, image=image: model(image)
            result = runs[way]()
            whole = result if whole is None else whole
            figures[way] = {"cpu_s": [], "wall_s": [], **difference(result, whole)}
        for _, way in in_turns(ways(name), pairs):
            started, clock = time.process_time(), time.perf_counter()
            runs[way]()
            figures[way]["cpu_s"].append(round(time.process_time() - started, 3))
            figures[way]["wall_s"].append(round(time.perf_counter() - clock, 3))
    return figures


def measure(results: ResultFile, name: str, side: int, pairs: int) -> None:
    """The rows of one model and side."""
    rows = {way: f"{name} {side}², {way}" for way in ways(name)}
    if all(results.has(row) for row in rows.values()):
        return
    timed = measure_in_subprocess(
        "fast_windows:run_times", name, side, pairs, env=HEAP_KEEPS
    ).result
    peaks = {
        way: measure_in_subprocess("fast_windows:run_once", name, way, side, warmups=1).peak_bytes
        for way in ways(name)
    }
    for way, figures in timed.items():
        results.add(
            rows[way],
            model=name,
            side=side,
            way=way,
            peak_bytes=peaks[way],
            share_of_peak=round(peaks[way] / peaks["spandrel"], 3),
            ratio=ratio_of(figures["cpu_s"], timed["spandrel"]["cpu_s"]),
            **figures,
        )


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=5).parse_args()
    results = ResultFile(
        "fast_windows",
        fresh=options.fresh,
        environments="each",  # bf16 is one processor's gain alone
        about="Window transformers as their files are loaded, and as spandrel's classes run.",
    )
    for name, sides in SIDES.items():
        row = f"{name}, differences"
        if options.only in row and not results.has(row):
            found = measure_in_subprocess("fast_windows:run_error", name).result
            results.add(row, model=name, **found)
        for side in sides:
            if options.only in f"{name} {side}²":
                measure(results, name, side, options.pairs)


if __name__ == "__main__":
    main()
