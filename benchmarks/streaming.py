"""Models streamed in bands beside the same models run whole, and beside tiles.

    LOWTIDE_DATA=... python benchmarks/streaming.py [--only TEXT] [--pairs 3] [--fresh]

A row for each model, size and way. Peaks: a fresh process for each row, whose heap gives freed
memory back, so that its anonymous memory is what lives; pages in memory are in it, pages on disk
are told apart. Times: all ways of one model and size in one process, one after another and then
the other way round, by processor seconds, in a heap that keeps what was freed for all of them.
Capture is not in the times; it is told beside them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import ResultFile, spread
from streaming_models import Part, given, made
from torch import Tensor

from lowtide.core.units import MIB
from lowtide.memory.measuring.fresh import measure_fresh
from lowtide.streaming.bands.streamed import Streamed

# Name, height, width, and the budgets with pages in memory and on disk, in MiB.
SIZES = (
    ("VAE decode", 512, 512, 600, 260), ("VAE encode", 512, 512, 600, 260),
    ("VAE decode", 768, 768, 1150, 420), ("VAE decode", 1024, 1024, 2000, 700),
    ("VAE encode", 1024, 1024, 2000, 700),
    ("CRAFT", 384, 512, 285, 130), ("SwinIR", 384, 512, 800, 400), ("HAT", 384, 512, 1700, 800),
    ("DRCT", 384, 512, 1500, 900), ("RRDB", 384, 512, 700, 700), ("SPAN", 384, 512, 100, 100),
    ("Compact", 384, 512, 120, 120), ("PLKSR", 384, 512, 200, 200),
)  # fmt: skip
# The tiles of diffusers: at this size or larger, or it does not tile at all.
TILE = 256


def way_of(name: str, way: str, memory: int, disk: int) -> Callable[[Tensor], Tensor]:
    """The model as one way runs it."""
    if way.startswith("diffusers"):
        tiled = Part(name.split()[1], TILE).eval().requires_grad_(False)
        tiled.vae.load_state_dict(made(name).vae.state_dict())
        return tiled
    model = made(name)
    if way == "whole":
        return model
    pages = "memory" if way.endswith("memory") else "disk"
    return Streamed(model, budget=(memory if pages == "memory" else disk) * MIB, pages=pages)


def ways(name: str) -> tuple[str, ...]:
    """What is compared for a model."""
    own = ("whole", "streamed, pages in memory", "streamed, pages on disk")
    return (*own, f"diffusers tiles of {TILE} px") if name.startswith("VAE") else own


_ready: dict[tuple[Any, ...], Callable[[Tensor], Tensor]] = {}


def run_once(name: str, way: str, height: int, width: int, memory: int, disk: int) -> None:
    """One run; the model and its plan are made in the first, which is not measured."""
    torch.set_num_threads(2)
    key = (name, way, height, width)
    if key not in _ready:
        _ready[key] = way_of(name, way, memory, disk)
    with torch.no_grad():
        _ready[key](given(name, height, width))


def run_times(
    name: str, height: int, width: int, memory: int, disk: int, pairs: int
) -> dict[str, dict[str, Any]]:
    """Processor seconds of each way, and how far its result is from the whole run's."""
    torch.set_num_threads(2)
    image, order = given(name, height, width), list(ways(name))
    runs, figures = {}, {way: {"cpu_s": []} for way in order}
    whole: Tensor | None = None
    with torch.no_grad():
        for way in order:
            start = time.process_time()
            runs[way] = way_of(name, way, memory, disk)
            if isinstance(runs[way], Streamed):
                figures[way]["plan"] = runs[way].explain(image)
            figures[way]["preparing_cpu_s"] = round(time.process_time() - start, 2)
            result = runs[way](image)
            whole = result if whole is None else whole
            figures[way] |= apart(result, whole)
            del result
        for _ in range(pairs):
            for way in order:
                start = time.process_time()
                runs[way](image)
                figures[way]["cpu_s"].append(round(time.process_time() - start, 3))
            order.reverse()
    return figures


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "streaming", fresh=options.fresh, packages=("diffusers",),
        about="Models streamed in bands, run whole, and in tiles: processor seconds and memory.",
    )  # fmt: skip
    for name, *sizes in SIZES:
        title = f"{name} {sizes[0]}×{sizes[1]}"
        if options.only not in title or results.has(f"{title}, whole"):
            continue
        peaks = {
            way: measure_fresh("streaming:run_once", name, way, *sizes, warmups=1).peak_bytes
            for way in ways(name)
        }  # fmt: skip
        timed = measure_fresh("streaming:run_times", name, *sizes, options.pairs, env={
            "MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296",
        }).result  # fmt: skip
        for way, figures in timed.items():
            ratios = [a / b for a, b in zip(
                figures["cpu_s"], timed["whole"]["cpu_s"], strict=True
            )]  # fmt: skip
            results.add(
                f"{title}, {way}", model=name, height=sizes[0], width=sizes[1], way=way,
                peak_bytes=peaks[way], share_of_peak=round(peaks[way] / peaks["whole"], 3),
                ratio=spread(ratios), **figures,
            )  # fmt: skip


if __name__ == "__main__":
    main()
