"""Every ParagonSR2, from nano to xl and from realtime to pro: size, work, memory, time, bands.

    python benchmarks/paragonsr2_variants.py [--part a|b|c|d|e] [--only TEXT] [--pairs 5] [--fresh]

Five parts, fp32 on the CPU, with fixed random weights and as many threads as OMP_NUM_THREADS says:

a. Weights and FLOPs per input pixel at each scale, with attention and without. Of products,
   convolutions and attention, a multiply-add being two; attention counts as its definition, the
   scores and their product with the values, whichever kernel computes it, and its softmax does not.
b. 128×128 pixels with attention in windows and without. Peaks: of fresh processes whose heap gives
   back; times: processor seconds of one process, in turns, with a heap that keeps.
c. 1024×1024 pixels, whole and streamed in a part of the memory of the whole.
d. A photograph of 4 megapixels, of 1 for xl, file to file, under a budget of 1 GiB, with the heap
   that the command line has.
e. Predicted memory on an absent GPU, compared with what was announced for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paragonsr2_runs as runs
import torch
from common import HEAP_KEEPS, HEAP_KEEPS_SMALL, ResultFile, ratio_of, row_parser
from photographs import photograph
from subprocess_run import measure_in_subprocess
from torch import nn

from lowtide.jobs.train.plan import plan_training
from lowtide.memory.prediction.estimate import estimate, trace_step
from lowtide.memory.prediction.operator_costs import multiply_adds
from lowtide.memory.tracing.steps import InferenceStep
from lowtide.models.paragonsr2.config import SCALES, VARIANTS

MEASURED_SCALES = (2, 4)
SIDE = 128
# Name, budget as a part of the whole run's peak, and the most pairs: xl takes many minutes.
STREAMED = (("nano", 0.5, 9), ("s", 0.5, 9), ("xl", 0.6, 1))
STREAMED_SIDE, STREAMED_SCALE = 1024, 2
# Its bands, many small blocks, take hours in a heap that gives back each of them.
SLOWEST = "xl"
JOBS, JOB_BUDGET = (("nano", 2048), ("s", 2048), ("xl", 1024)), "1GiB"
CARD = "rtx3060-12gb"
BATCH, CROP = 16, 64
PREDICTED_SIDES = (128, 512, 1024)
# What the original announcement says of an RTX 3060, in GB, taken as GiB in its favor: what small
# and large variants take for 128×128 pixels and more, and what any takes for a training step. It
# names neither scale nor batch.
SMALL = ("nano", "micro", "tiny", "xs")
CLAIMED_SMALL = {128: (0.2, 0.5), 512: (0.5, 1.0), 1024: (0.5, 1.0)}
CLAIMED_LARGE = {128: (0.5, 2.0), 512: (0.5, 1.0), 1024: (0.5, 2.0)}
CLAIMED_TRAINING = (1.0, 1.5)

# A row that is to be measured if it is missing: its name, and what measures it.
Todo = tuple[str, Callable[[], dict[str, Any]]]


def sizes(results: ResultFile, pairs: int) -> Iterator[Todo]:
    """Part a."""
    for name in runs.NAMES:
        for scale in SCALES:
            yield f"{name} x{scale}, size", lambda name=name, scale=scale: size_of(name, scale)


def size_of(name: str, scale: int) -> dict[str, Any]:
    """Weights, and FLOPs per input pixel, with each attention."""
    figures: dict[str, Any] = {}
    for attention in runs.attentions(name):
        module = on_meta(name, scale, attention)
        trace = trace_step(module, InferenceStep((picture(SIDE),)))
        figures[attention] = {
            "parameters": sum(weight.numel() for weight in module.parameters()),
            "flops_per_pixel": round(2 * multiply_adds(trace) / SIDE**2),
        }
    return {"model": name, "scale": scale, "side": SIDE, **figures}


def on_meta(name: str, scale: int, attention: str) -> nn.Module:
    """A network that holds no weights."""
    with torch.device("meta"):
        return runs.network(name, scale, attention)


def picture(side: int, batch: int = 1) -> torch.Tensor:
    """Pictures that hold no pixels."""
    return torch.empty(batch, 3, side, side, device="meta")


def attention_costs(results: ResultFile, pairs: int) -> Iterator[Todo]:
    """Part b: the peak of each way, then the times of both."""
    for name in runs.NAMES:
        for scale in MEASURED_SCALES:
            title, ways = f"{name} x{scale} {SIDE}×{SIDE}", runs.attentions(name)
            for way in ways:
                yield (
                    f"{title}, {way}",
                    lambda name=name, scale=scale, way=way: peak(name, scale, SIDE, (way, 0)),
                )
            yield (
                f"{title}, times",
                lambda name=name, scale=scale, ways=ways: times(
                    name, scale, SIDE, {way: (way, 0) for way in ways}, pairs
                ),
            )


def peak(name: str, scale: int, side: int, way: runs.Way) -> dict[str, Any]:
    """What a run takes in a fresh process, whose heap gives back all it can in a bearable time."""
    env = HEAP_KEEPS_SMALL if way[1] and name == SLOWEST else None
    usage = measure_in_subprocess(
        "paragonsr2_runs:run_once", name, scale, side, way, warmups=1, env=env
    )
    budget = {"budget_bytes": way[1]} if way[1] else {}
    return {
        "model": name,
        "scale": scale,
        "side": side,
        "attention": way[0],
        **budget,
        "peak_bytes": usage.peak_bytes,
        "high_water_bytes": usage.high_water_bytes,
        **({"allocator": usage.allocator} if env else {}),
    }


def times(
    name: str,
    scale: int,
    side: int,
    ways: dict[str, runs.Way],
    pairs: int,
    compared: bool = False,
) -> dict[str, Any]:
    """Processor seconds of ways that take turns, and the ratios of all to the last of ``ways``,
    or, where results are compared, to the first."""
    found: dict[str, Any] = measure_in_subprocess(
        "paragonsr2_runs:run_times", name, scale, side, ways, pairs, compared, env=HEAP_KEEPS
    ).result
    order = list(ways) if compared else list(ways)[::-1]
    seconds = found["cpu_s"]
    ratios = {way: ratio_of(seconds[way], seconds[order[0]]) for way in order[1:]}
    return {"model": name, "scale": scale, "side": side, **found, "ratio": ratios}


def in_bands(results: ResultFile, pairs: int) -> Iterator[Todo]:
    """Part c: both peaks, then times and difference."""
    side, scale = STREAMED_SIDE, STREAMED_SCALE
    for name, part, most in STREAMED:
        title = f"{name} x{scale} {side}×{side}"
        whole = f"{title}, whole"
        yield whole, lambda name=name: peak(name, scale, side, ("window", 0))

        def budget(whole: str = whole, part: float = part) -> int:
            return int(results.row(whole)["peak_bytes"] * part)

        yield (
            f"{title}, streamed",
            lambda name=name, budget=budget: peak(name, scale, side, ("window", budget())),
        )
        yield (
            f"{title}, times",
            lambda name=name, budget=budget, most=most: times(
                name,
                scale,
                side,
                {"whole": ("window", 0), "streamed": ("window", budget())},
                min(pairs, most),
                compared=True,
            ),
        )


def jobs(results: ResultFile, pairs: int) -> Iterator[Todo]:
    """Part d."""
    for name, side in JOBS:
        row = f"{name} x{STREAMED_SCALE} {side}×{side}, --budget {JOB_BUDGET}"
        yield row, lambda name=name, side=side: job(name, side)


def job(name: str, side: int) -> dict[str, Any]:
    """A photograph upscaled in a fresh process; what the network costs was learned before."""
    with tempfile.TemporaryDirectory() as folder:
        weights = runs.save(name, STREAMED_SCALE, Path(folder) / f"{name}.safetensors")
        source = photograph(Path(folder) / "photo.png", side, side)
        target = Path(folder) / "large.png"
        given = str(weights), str(source), str(target), JOB_BUDGET
        measure_in_subprocess("paragonsr2_runs:plan", *given)
        usage = measure_in_subprocess("paragonsr2_runs:upscale", *given)
    return {
        "model": name,
        "scale": STREAMED_SCALE,
        "side": side,
        **usage.result,
        "process_peak_bytes": usage.peak_bytes,
    }


def predictions(results: ResultFile, pairs: int) -> Iterator[Todo]:
    """Part e."""
    for name in runs.NAMES:
        for scale in MEASURED_SCALES:
            for side in PREDICTED_SIDES:
                yield (
                    f"{name} x{scale} {side}×{side}, {CARD}",
                    lambda name=name, scale=scale, side=side: inference(name, scale, side),
                )
            yield (
                f"{name} x{scale} training {BATCH} of {CROP}×{CROP}, {CARD}",
                lambda name=name, scale=scale: training(name, scale),
            )


def inference(name: str, scale: int, side: int) -> dict[str, Any]:
    """The peak of one image on the GPU."""
    said = estimate(on_meta(name, scale, "window"), InferenceStep((picture(side),)), device=CARD)
    claimed = CLAIMED_SMALL if name in SMALL else CLAIMED_LARGE
    return {
        "model": name,
        "scale": scale,
        "side": side,
        "live_bytes": said.live_bytes,
        **compare_with_claim(name, said.predicted_bytes, said.upper_bytes, claimed[side]),
    }


def training(name: str, scale: int) -> dict[str, Any]:
    """The peak of a training step on the GPU, and the first change that makes it fit."""
    module = on_meta(name, scale, "window")
    plan = plan_training(module, device=CARD, batch=BATCH, size=(CROP, CROP), full=False)
    asked, choice = plan.fit_report.requested, plan.fit_report.choice
    return {
        "model": name,
        "scale": scale,
        "batch": BATCH,
        "crop": CROP,
        "live_bytes": asked.live_bytes,
        "budget_bytes": plan.budget_bytes,
        "fits_by": choice.name if choice else None,
        "fits_by_bytes": choice.upper_bytes if choice else None,
        **compare_with_claim(name, asked.predicted_bytes, asked.upper_bytes, CLAIMED_TRAINING),
    }


def compare_with_claim(
    name: str, predicted: int, upper: int, claimed: tuple[float, float]
) -> dict[str, Any]:
    """Expected bytes, and what was announced; nothing was of the public tiers."""
    figures: dict[str, Any] = {"predicted_bytes": predicted, "upper_bytes": upper}
    if name in VARIANTS:
        least, most = (int(gib * 2**30) for gib in claimed)
        figures |= {"claimed_bytes": [least, most], "within_claim": predicted <= most}
    return figures


PARTS = {"a": sizes, "b": attention_costs, "c": in_bands, "d": jobs, "e": predictions}


def main() -> None:
    """Measure what is missing."""
    parser = row_parser(__doc__, pairs=5)
    parser.add_argument("--part", choices=PARTS, help="only this part")
    options = parser.parse_args()
    results = ResultFile(
        "paragonsr2_variants",
        fresh=options.fresh,
        about="ParagonSR2 in all its sizes: weights, work, memory and processor seconds.",
        environments="any",  # times are compared within a row alone
    )
    for part in [options.part] if options.part else PARTS:
        for row, measure in PARTS[part](results, options.pairs):
            if options.only in row and not results.has(row):
                results.add(row, part=part, **measure())


if __name__ == "__main__":
    main()
