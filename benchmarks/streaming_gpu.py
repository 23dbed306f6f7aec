"""Models streamed in bands, compared with the same models run whole, on a GPU.

    python benchmarks/streaming_gpu.py [--sides 1024 2048 4096] [--only TEXT] [--fresh]

A row for each model, side, precision and strategy. All cases are planned at once, each in its own
process, and then use the GPU one after another. Wall time between events, in alternating runs;
bytes are the peak of PyTorch's allocated memory, weights included; and for a streamed run what the
allocator reserved, next to the prediction. Errors are relative to a run in fp64 where that fits,
and those of the streamed result also to the whole one. ``fp32`` is without TF32, ``tf32`` with it.
The budget is 60 % of what the whole run takes, where pages stay on the GPU, or 40 %, which moves
them to the host: a profile shows during what share of the copies' time a kernel ran. And which
side fits in a GPU with ``--gpu-memory``, whole and streamed, with the allocator limited to that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ResultFile, ratio_of, spread
from gpu_cases import PRECISIONS, Case, fitting, largest, seconds, with_peak
from gpu_profile import profiled
from gpu_turns import DONE, MEASURED, PLANNED, Turn

from lowtide.core.units import GIB, parse_bytes
from lowtide.streaming.engine.placement import PagePlacement

# At every side; and the others at one.
MODEL = "VAE decode"
OTHERS = {"VAE encode": 1024, "Compact": 1024, "SwinIR": 512}
# These mix types when they are given 16-bit numbers.
FP32_ALONE = ("SwinIR",)
# Of the whole run's peak, by where pages are kept; beyond that, of the GPU's memory.
SHARES = {"auto": 0.6, "host": 0.4}
Found = dict[str, dict[str, Any]]


def measure(case: Case, rounds: int, turn: Turn) -> Iterator[Found]:
    """The rows of both ways, then that of a profile where copies are to be seen."""
    title = title_of(case.name, case.side, case.precision, case.pages)
    facts = {"model": case.name, "side": case.side, "precision": case.precision}
    with turn.alone():
        whole, found, _ = with_peak(case.whole)
        # Kept for comparison only, it would count as what the other way takes.
        whole = None if whole is None else whole.cpu()
        torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    budget = int(SHARES[case.pages] * (total if whole is None else found))
    started = time.perf_counter()
    run, plan, predicted = case.streamed(budget)
    planned = time.perf_counter() - started
    torch.cuda.empty_cache()
    turn.wait_for(PLANNED)
    result, peak, reserved = with_peak(run)
    assert result is not None, "streamed, it is out of memory"
    torch.cuda.empty_cache()
    exact = case.exact()
    torch.cuda.empty_cache()
    runs = {"streamed": run} if whole is None else {"whole": case.whole, "streamed": run}
    taken = seconds(runs, rounds)
    more: dict[str, Any] = {}
    if whole is None:
        yield {f"{title}, whole": {**facts, "way": "whole", "error": "out of memory"}}
    else:
        yield {
            f"{title}, whole": {
                **facts,
                "way": "whole",
                "peak_bytes": found,
                "wall_s": spread(taken["whole"]),
                "error_to_fp64": largest(whole, exact),
            }
        }
        more["ratio"] = ratio_of(taken["streamed"], taken["whole"])
        more["max_abs_error"] = largest(result, whole)
    yield {
        f"{title}, streamed": {
            **facts,
            "way": "streamed",
            "plan": plan,
            "budget_bytes": budget,
            "peak_bytes": peak,
            "told_bytes": predicted,
            "reserved_bytes": reserved,
            "wall_s": spread(taken["streamed"]),
            "error_to_fp64": largest(result, exact),
            **more,
            "planned_s": round(planned, 1),
        }
    }
    if case.pages == "host":
        turn.wait_for(MEASURED)
        yield {f"{title}, profile": {**facts, **profiled(run)}}


def limit(side: int, gpu_bytes: int, turn: Turn) -> Iterator[Found]:
    """Whether a side fits in a GPU of ``gpu_bytes``, whole and streamed."""
    total = torch.cuda.get_device_properties(0).total_memory
    case = Case(MODEL, side, "fp32", "auto")
    run = case.streamed(int(gpu_bytes * 0.9)).run
    turn.wait_for(PLANNED)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_bytes / total))
    fits = {"whole": fitting(case.whole) is not None, "streamed": fitting(run) is not None}
    title = Job(MODEL, side, "limit", gpu_bytes=gpu_bytes).title
    yield {title: {"model": MODEL, "side": side, "card_bytes": gpu_bytes, **fits}}


def work(job: Job, number: int, changed: Any, states: Any, results: Any) -> None:
    """One case in a process of its own; sends its rows, then what went wrong or None."""
    torch.set_num_threads(2)
    turn, error = Turn(number, changed, states, job.patience), None
    try:
        if job.gpu_bytes is not None:
            found = limit(job.side, job.gpu_bytes, turn)
        else:
            case = Case(job.name, job.side, job.precision, job.pages, job.kept)
            found = measure(case, job.rounds, turn)
        for rows in found:
            results.put((job, rows, None))
    except Exception:  # noqa: BLE001 - said by the parent, which then fails
        error = traceback.format_exc()
    finally:
        turn.tell(DONE)
        results.put((job, None, error))


@dataclass(frozen=True)
class Job:
    """A case, or with ``gpu_bytes`` the question what fits."""

    name: str
    side: int
    precision: str
    rounds: int = 1
    gpu_bytes: int | None = None
    pages: PagePlacement = "auto"
    patience: float = 300
    kept: Path | None = None

    @property
    def title(self) -> str:
        """The name of its rows."""
        if self.gpu_bytes is not None:
            return f"{self.name} {self.side}² in {self.gpu_bytes / GIB:.0f} GiB"
        return title_of(self.name, self.side, self.precision, self.pages)


def title_of(name: str, side: int, precision: str, pages: PagePlacement) -> str:
    """The name of a case."""
    return f"{name} {side}², {precision}{', pages on the host' if pages == 'host' else ''}"


def jobs_of(options: argparse.Namespace, results: ResultFile, kept: Path) -> list[Job]:
    """What is asked for and was not measured; ``kept`` is where they leave results for others."""
    more: dict[str, Any] = dict(patience=options.patience, kept=kept)
    gpu_bytes = parse_bytes(options.gpu_memory)
    found = [
        # Large ones take long enough for a few runs to suffice.
        Job(
            name,
            side,
            precision,
            max(1, options.rounds * 1024 // max(side, 1024)),
            pages=pages,
            **more,
        )
        for name, side in [*((MODEL, side) for side in options.sides), *OTHERS.items()]
        for pages in (("auto", "host") if name == MODEL and side <= 2048 else ("auto",))
        for precision in PRECISIONS
        if precision != "bf16" or name not in FP32_ALONE
    ]
    found += [Job(MODEL, side, "limit", gpu_bytes=gpu_bytes, **more) for side in options.sides]
    known = {row["row"].removesuffix(", streamed") for row in results.data["rows"]}
    found = [
        job
        for job in found
        if job.title not in known and any(text in job.title for text in options.only)
    ]
    # What takes longest comes last.
    order = ["fp32", "limit", "tf32", "bf16"]
    return sorted(
        found,
        key=lambda job: (job.side > 2048, job.name != MODEL, job.side, -order.index(job.precision)),
    )


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument(
        "--patience",
        type=float,
        default=300,
        help="seconds that measuring waits for all cases to be planned",
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose name contains one of these"
    )
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    results = ResultFile(
        "streaming_gpu",
        fresh=options.fresh,
        packages=("diffusers",),
        about="Models streamed in bands and run whole on a GPU: time, bytes and errors.",
    )
    with tempfile.TemporaryDirectory() as kept:
        if not measured(jobs_of(options, results, Path(kept)), results):
            raise SystemExit("some cases failed")


def measured(jobs: list[Job], results: ResultFile) -> bool:
    """Run all cases, and add their rows; whether none failed."""
    context = multiprocessing.get_context("spawn")
    changed, found = context.Condition(), context.Queue()
    states = context.Array("i", len(jobs), lock=False)
    for number, job in enumerate(jobs):
        context.Process(target=work, args=(job, number, changed, states, found)).start()
    left, good = len(jobs), True
    while left:
        job, rows, error = found.get()
        for row, facts in (rows or {}).items():
            results.add(row, **facts)
        left -= rows is None
        if error is not None:
            good = False
            print(f"{job}\n{error}", flush=True)
    return good


if __name__ == "__main__":
    main()
