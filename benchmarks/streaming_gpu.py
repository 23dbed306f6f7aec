"""Models streamed in bands beside the same models run whole, on a GPU.

    python benchmarks/streaming_gpu.py [--sides 1024 2048 4096] [--card 12GiB] [--fresh]

A row for each model, side, precision and way. Clock time between events, in turns; bytes are the
most that PyTorch's allocator handed out, weights included. Errors are against a run in fp64 where
that fits, and the streamed result's also against the whole one. ``fp32`` is without TF32, ``tf32``
with it. Pages are kept on the host, the hardest place. Beside them: which share of the time of
copies a kernel ran, from a profile; and the largest side that a card of ``--card`` takes, whole and
streamed, with the allocator held to that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import ResultFile, in_turns, ratio_of, spread
from streaming_models import given, made
from torch import Tensor

from lowtide.core.units import GIB, parse_bytes
from lowtide.memory.failures import is_out_of_memory
from lowtide.streaming.bands.streamed import Streamed

# The first at every side, the others at the smallest.
MODELS = ("VAE decode", "VAE encode", "SwinIR", "Compact")
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# Of what the whole run takes; beyond that, of the card.
SHARE = 0.4
Interval = tuple[float, float]


@contextmanager
def tensor_cores(wanted: bool) -> Iterator[None]:
    """TF32 in products and convolutions, or not."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = wanted
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


class Case:
    """One model and one input on the card."""

    def __init__(self, name: str, side: int, precision: str) -> None:
        self.name, self.side, self.precision = name, side, precision
        self.dtype = PRECISIONS[precision]
        self.model = made(name).to("cuda", self.dtype)
        self.image = given(name, side, side).to("cuda", self.dtype)

    def whole(self) -> Tensor:
        """The model's own result."""
        with torch.inference_mode(), tensor_cores(self.precision == "tf32"):
            return self.model(self.image)

    def streamed(self, budget: int) -> Callable[[], Tensor]:
        """A run by bands within a budget; planned already."""
        module = Streamed(self.model, budget=budget, pages="host")
        with tensor_cores(self.precision == "tf32"):
            module.prepare(self.image)

        def run() -> Tensor:
            with torch.inference_mode(), tensor_cores(self.precision == "tf32"):
                return module(self.image)

        return run

    def exact(self) -> Tensor | None:
        """The result in fp64, or None where that does not fit."""
        model, image = made(self.name).to("cuda", torch.float64), self.image.double()
        with torch.inference_mode():
            return fitting(lambda: model(image))


def fitting(run: Callable[[], Tensor]) -> Tensor | None:
    """What ``run`` returns, or None if memory runs out."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return None


def peak_of(run: Callable[[], Any]) -> int:
    """The most that the allocator handed out during a run."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Clock time of each, in turns, each round the other way round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _, name in in_turns(runs, rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[name]()
        end.record()
        end.synchronize()
        taken[name].append(start.elapsed_time(end) / 1000)
    return taken


def overlapped(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float | None:
    """Which share of the time of ``copies`` some kernel ran; None without copies."""
    busy: list[list[float]] = []
    for first, last in sorted(kernels):
        if busy and first <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], last)
        else:
            busy.append([first, last])
    total = sum(last - first for first, last in copies)
    both = sum(
        max(0.0, min(last, end) - max(first, start))
        for first, last in copies for start, end in busy
    )  # fmt: skip
    return both / total if total else None


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """Copies between card and host during a run, and how much of them was hidden."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            between = "Memcpy" in event.name and ("HtoD" in event.name or "DtoH" in event.name)
            (copies if between else kernels).append(span)
    return {
        "copies_s": round(sum(last - first for first, last in copies) / 1e6, 4),
        "kernels_s": round(sum(last - first for first, last in kernels) / 1e6, 4),
        "copies_overlapped": overlapped(copies, kernels),
    }


def measure(results: ResultFile, case: Case, rounds: int) -> None:
    """The rows of both ways."""
    title = f"{case.name} {case.side}², {case.precision}"
    if results.has(f"{title}, streamed"):
        return
    whole = fitting(case.whole)
    found = None if whole is None else peak_of(case.whole)
    total = torch.cuda.get_device_properties(0).total_memory
    budget = int(SHARE * (found or total))
    run = case.streamed(budget)
    result, exact = run(), case.exact()
    runs = {"streamed": run} if whole is None else {"whole": case.whole, "streamed": run}
    taken = seconds(runs, rounds)
    facts = {"model": case.name, "side": case.side, "precision": case.precision}
    if whole is None:
        results.add(f"{title}, whole", **facts, way="whole", error="out of memory")
    else:
        results.add(
            f"{title}, whole", **facts, way="whole", peak_bytes=found,
            wall_s=spread(taken["whole"]), error_to_fp64=largest(whole, exact),
        )  # fmt: skip
    more: dict[str, Any] = {}
    if whole is not None:
        more = {
            "ratio": ratio_of(taken["streamed"], taken["whole"]),
            "max_abs_error": largest(result, whole),
        }
    results.add(
        f"{title}, streamed", **facts, way="streamed", budget_bytes=budget,
        peak_bytes=peak_of(run), wall_s=spread(taken["streamed"]),
        error_to_fp64=largest(result, exact), **more, **profiled(run),
    )  # fmt: skip


def largest(result: Tensor, other: Tensor | None) -> float | None:
    """The largest difference."""
    return None if other is None else (result.double() - other.double()).abs().max().item()


def limits(results: ResultFile, sides: Sequence[int], card: int) -> None:
    """Which sides fit in a card of so many bytes, whole and streamed."""
    name = MODELS[0]
    total = torch.cuda.get_device_properties(0).total_memory
    for side in sides:
        row = f"{name} {side}² in {card / GIB:.0f} GiB"
        if results.has(row):
            continue
        case = Case(name, side, "fp32")
        run = case.streamed(int(card * 0.9))
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, card / total))
        try:
            fits = {
                "whole": fitting(case.whole) is not None, "streamed": fitting(run) is not None
            }  # fmt: skip
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        results.add(row, model=name, side=side, card_bytes=card, **fits)


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--card", default="12GiB")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    results = ResultFile(
        "streaming_gpu", fresh=options.fresh, packages=("diffusers",),
        about="Models streamed in bands and run whole on a GPU: time, bytes and errors.",
    )  # fmt: skip
    for side in options.sides:
        for name in MODELS if side == min(options.sides) else MODELS[:1]:
            for precision in PRECISIONS:
                measure(results, Case(name, side, precision), options.rounds)
                torch.cuda.empty_cache()
    limits(results, options.sides, parse_bytes(options.card))


if __name__ == "__main__":
    main()
