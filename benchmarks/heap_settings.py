"""The C heap's settings: the same networks under each, processor seconds and peaks.

    python benchmarks/heap_settings.py [--only TEXT] [--pairs 4] [--fresh]

glibc as it is, the command line's heap with and without huge pages, and the heap that gives
every large block back. Each run is a fresh process of three images, the ways in turns. Peaks are of
the whole run beyond the imports, weights included; times of the last two images, for which a heap
keeps what the first one left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from common import HEAP_OF_GLIBC, HUGE_PAGES, ResultFile, in_turns, ratio_of, row_parser
from fast_windows import model_of
from streaming_models import MODELS, given
from subprocess_run import measure_in_subprocess
from torch import nn
from zoo_models import ENTRIES

from lowtide.core.heap import set_heap_mode, tune_heap

# Models, and the side of an image of which a run takes some seconds.
SIDES = {
    "lowtide-x2": 512,
    "Compact": 512,
    "SPAN": 512,
    "nafnet": 512,
    "PLKSR": 256,
    "RRDB": 192,
    "CRAFT": 192,
    "SwinIR": 128,
    "DRCT": 128,
    "HAT": 96,
}
OWN, PLAIN, KEEPS, GIVES_BACK = "glibc's own", "cache, small pages", "cache", "trim"
# What their processes start with: glibc's own heap moves its threshold as a program runs, and
# PyTorch asks for huge pages only if that is set before the imports above make a tensor.
ENVIRONMENTS: dict[str, Mapping[str, str | None]] = {
    OWN: HEAP_OF_GLIBC,
    PLAIN: {"THP_MEM_ALLOC_ENABLE": "0"},
    KEEPS: HUGE_PAGES,
    GIVES_BACK: HUGE_PAGES,
}
_IMAGES = 3


def _model(name: str) -> nn.Module:
    if name in MODELS:
        return model_of(name, "fast")
    torch.manual_seed(0)
    return ENTRIES[name].build().eval()


@torch.inference_mode()
def run(name: str, side: int, way: str) -> list[float]:
    """The processor seconds of each image."""
    if way != OWN:
        tune_heap()
    if way == GIVES_BACK:
        set_heap_mode("trim")
    model, image = _model(name), given("Compact", side, side)
    seconds = []
    for _ in range(_IMAGES):
        started = time.process_time()
        model(image)
        seconds.append(round(time.process_time() - started, 3))
    return seconds


def measure(name: str, side: int, pairs: int) -> dict[str, Any]:
    """The figures of each way."""
    seconds: dict[str, list[float]] = {way: [] for way in ENVIRONMENTS}
    peaks: dict[str, list[int]] = {way: [] for way in ENVIRONMENTS}
    for _, way in in_turns(ENVIRONMENTS, pairs):
        used = measure_in_subprocess("heap_settings:run", name, side, way, env=ENVIRONMENTS[way])
        seconds[way].append(statistics.mean(used.result[1:]))
        peaks[way].append(used.peak_bytes)
    return {
        way: {
            "cpu_s": [round(one, 3) for one in seconds[way]],
            "peak_bytes": max(peaks[way]),
            "ratio": ratio_of(seconds[way], seconds[OWN]),
        }
        for way in ENVIRONMENTS
    }


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=4).parse_args()
    results = ResultFile(
        "heap_settings",
        fresh=options.fresh,
        about="Networks under each setting of the C heap.",
    )
    for name, side in SIDES.items():
        row = f"{name} {side}²"
        if options.only in row and not results.has(row):
            ways = measure(name, side, options.pairs)
            results.add(row, model=name, side=side, ways=ways)


if __name__ == "__main__":
    main()
