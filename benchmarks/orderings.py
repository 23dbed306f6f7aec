"""Orders that memory must keep, by the meter: what is said to take less does.

    python benchmarks/orderings.py [--fresh]

Pairs of rows of the other results that differ in one thing only (checkpointing, precision, the
size of tiles), and batches of growing and of falling size: run for real in a fresh process
whose heap keeps what is freed, as the command line's does, and on a virtual CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from common import ResultFile, result_rows

Rows = list[dict[str, Any]]
# Sizes of the batches, run in this order and backwards.
_RISING = (1, 1, 2, 2, 3, 3, 4, 4)
# Models of the zoo, and the side of their images.
_NETS = {"lowtide-x4": 160, "esrgan": 64, "swinir": 64, "plksr": 128, "nafnet": 160}
_ROUNDS = 3


def pairs(rows: Rows, changed: str, less: Any, more: Any, same: tuple[str, ...]) -> Iterator[float]:
    """Measured bytes with ``less`` as a share of those with ``more``, all else the same."""
    known = {
        (*(str(row.get(key)) for key in same), row[changed]): row["measured_bytes"] for row in rows
    }
    for (*rest, value), count in known.items():
        if value == less and (other := known.get((*rest, more))) is not None:
            yield count / other


def neighbors(rows: Rows) -> Iterator[float]:
    """Each tile's bytes as a share of those of the next larger tile of the same model and heap."""
    series: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in rows:
        series.setdefault((row["entry"], row["heap"]), []).append(
            (row["tile"], row["measured_bytes"])
        )
    for sizes in series.values():
        counts = [count for _, count in sorted(sizes)]
        yield from (small / large for small, large in itertools.pairwise(counts))


def report(results: ResultFile, name: str, shares: list[float]) -> None:
    """One row: in how many pairs the order held, and by how much."""
    if shares and not results.has(name):
        results.add(
            name,
            pairs=len(shares),
            held=sum(share < 1 for share in shares),
            median_share=round(statistics.median(shares), 3),
            largest_share=round(max(shares), 3),
        )


def run_batches(entry: str, side: int, batches: list[int]) -> None:
    """The model of the zoo on batches of images, one after another, in a heap that keeps."""
    import torch
    from zoo_models import ENTRIES

    from lowtide.core.heap import tune_heap

    tune_heap()
    torch.manual_seed(0)
    model = ENTRIES[entry].build().eval()
    with torch.inference_mode():
        for batch in batches:
            model(torch.rand(batch, 3, side, side))


def resident(entry: str, side: int, batches: list[int]) -> float:
    """Peak bytes that `run_batches` adds to a fresh process, the median of a few."""
    from subprocess_run import measure_in_subprocess

    taken = [
        measure_in_subprocess(
            "orderings:run_batches", entry, side, batches, imports=["zoo_models", "spandrel"]
        ).peak_bytes
        for _ in range(_ROUNDS)
    ]
    return statistics.median(taken)


def reserved(entry: str, side: int, batches: list[int]) -> float:
    """Peak bytes that PyTorch's CUDA allocator would reserve."""
    import torch
    from virtual_device import VirtualDevice
    from zoo_models import ENTRIES

    from lowtide.memory.tracing.fake import FakeModelConverter

    faker = FakeModelConverter()
    model, device = faker.model(ENTRIES[entry].build().eval()), VirtualDevice()
    with faker.fake_mode(), torch.inference_mode(), device:
        for batch in batches:
            model(torch.empty(batch, 3, side, side))
    return device.peak_reserved


def orders(results: ResultFile) -> None:
    """Batches that rise against the same batches that fall.

    The allocator takes memory in segments of 20 MiB: where a run takes a few of them only, one
    segment more decides, so larger images are listed separately.
    """
    ways: dict[str, tuple[Callable[[str, int, list[int]], float], int]] = {
        "on a virtual CUDA device": (reserved, 1),
        "on a virtual CUDA device, sides twice as long": (reserved, 2),
        "resident, heap that keeps": (resident, 1),
    }
    for how, (take, times) in ways.items():
        name = f"largest batch first < rising, {how}"
        if not results.has(name):
            report(
                results,
                name,
                [
                    take(entry, times * side, list(_RISING[::-1]))
                    / take(entry, times * side, list(_RISING))
                    for entry, side in _NETS.items()
                ],
            )


def main() -> None:
    """Derive and measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    results = ResultFile(
        "orderings",
        fresh=parser.parse_args().fresh,
        about="Pairs of runs that differ in one thing: whose memory is less, as measured.",
    )
    grid, tiled = (result_rows(name, "measured_bytes") for name in ("memory_grid", "memory_tiled"))
    training = [row for row in grid if row["mode"] == "training"]
    step = "entry", "size", "batch", "precision", "environment"  # never across machines
    for less in ("full", "selective"):
        shares = pairs(training, "checkpointing", less, "none", step)
        report(results, f"{less} checkpointing < none", list(shares))
    run = "entry", "size", "batch", "mode", "checkpointing", "environment"
    for less in ("bf16", "autocast"):
        report(results, f"{less} < fp32", list(pairs(grid, "precision", less, "fp32", run)))
    report(results, "smaller tile < larger", list(neighbors(tiled)))
    orders(results)


if __name__ == "__main__":
    main()
