"""What measuring a region costs: the same work under no meter and under each way, in turns.

    python benchmarks/meter_overhead.py [--device cpu] [--rounds 11] [--fresh]

Judged by processor seconds of one thread with the meter's own beginning and end inside (by the
clock, the device done, on CUDA). Every round runs each way once, in an order that changes from
round to round; a ratio is that of two runs of one round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import ResultFile
from torch import nn

from lowtide.memory.measurement import profiler_events
from lowtide.memory.measurement.backends import BACKENDS, BackendName
from lowtide.memory.measurement.region import measure

Work = Callable[[], None]


def convolutions(device: str) -> nn.Sequential:
    """Eight convolutions of 64 channels, each with SiLU."""
    layers = [part for _ in range(8) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.SiLU())]
    return nn.Sequential(*layers).to(device)


def inference(device: str) -> Work:
    """Two images of 160 x 160 through the trunk."""
    model, image = convolutions(device), torch.rand(1, 64, 160, 160, device=device)

    def work() -> None:
        with torch.inference_mode():
            for _ in range(2):
                model(image)

    return work


def training(device: str) -> Work:
    """Two AdamW steps of the trunk on 96 x 96."""
    model, image = convolutions(device), torch.rand(1, 64, 96, 96, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def work() -> None:
        for _ in range(2):
            model(image).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def small_operators(device: str) -> Work:
    """A transformer of 12 layers on 16 tokens, 20 times: operators of a few microseconds."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).to(device).train()
    tokens = torch.rand(1, 16, 64, device=device)

    def work() -> None:
        for _ in range(20):
            model(tokens)

    return work


LOADS = {
    "convolutions, inference": inference,
    "convolutions, training": training,
    "small operators": small_operators,
}


class Run(NamedTuple):
    """Seconds of one run, all of it and what the meter took after the work was done."""

    total: float
    ending: float


def timed(work: Work, way: BackendName | None, device: str) -> Run:
    """One run of ``work`` under a way of measuring, or under none."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    with contextlib.nullcontext() if way is None else measure(device, way):
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        done = clock()
    end = clock()
    return Run(end - start, end - done)


def rounds_of(work: Work, device: str, count: int) -> dict[BackendName | None, list[Run]]:
    """Runs by way, a list with one entry for each round."""
    ways: list[BackendName | None] = [None, *BACKENDS[torch.device(device).type]]
    for way in ways:
        timed(work, way, device)
    runs: dict[BackendName | None, list[Run]] = {way: [] for way in ways}
    for number in range(count):
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            runs[way].append(timed(work, way, device))
    return runs


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4)
    figures = {
        "median": middle,
        "lower_quartile": low,
        "upper_quartile": high,
        "min": min(values),
        "max": max(values),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def count_events(work: Work) -> int:
    """Allocations and releases of one run on the CPU."""
    blocks = profiler_events.start_events()
    work()
    profiler_events.stop_events(blocks)
    return blocks.events


def main() -> None:
    """One row for each kind of work and each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_cpu = options.device == "cpu"
    results = ResultFile(
        "meter_overhead" if on_cpu else "meter_overhead_gpu",
        about="Time of work under each way of measuring its memory, over that under none.",
        fresh=options.fresh,
    )
    for name, make in LOADS.items():
        ways = BACKENDS[torch.device(options.device).type]
        if all(results.has(f"{name}: {way}") for way in ways):
            continue
        work = make(options.device)
        runs = rounds_of(work, options.device, options.rounds)
        count = {"events": count_events(work)} if on_cpu else {}
        for way in ways:
            if results.has(f"{name}: {way}"):
                continue
            pairs = zip(runs[way], runs[None], strict=True)
            results.add(
                f"{name}: {way}",
                ratio=spread([ours.total / bare.total for ours, bare in pairs]),
                seconds=spread([run.total for run in runs[way]]),
                ending_seconds=spread([run.ending for run in runs[way]]),
                unmeasured_seconds=spread([run.total for run in runs[None]]),
                rounds=options.rounds,
                **count,
            )


if __name__ == "__main__":
    main()
