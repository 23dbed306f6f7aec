"""Attention over images: time and workspace of each module and of what it is compared with.

    python benchmarks/attention_modules.py [--rounds 7] [--flex] [--fresh]

One process, fp32, 64 channels, no gradients, a heap that keeps what was freed (for all of them:
else the system's pages, not the modules, are compared). Every round runs all of one size once,
in an order that turns from round to round; a ratio is that of two runs of one round, by processor
seconds. All take two threads; the forms of local windows one thread too. Workspace is
what is alive at once beyond input and result, by the allocator's events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention_baselines import SeedHierarchical, SeedWindows, Unfolded, Whole
from common import ResultFile, spread
from torch import Tensor, nn

from lowtide.attention.spatial import (
    ChannelAttention,
    HierarchicalAttention,
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
)
from lowtide.core.heap import tune_heap
from lowtide.memory.live_peak import live_peak_bytes

CHANNELS = 64
SIZES = (64, 128, 256)
# Seconds for 256² pixels, so only a few of them.
SLOW = {
    "global, SDPA",
    "global, SDPA, 256 queries at a time",
    "seed's hierarchical, in chunks at any size",
}
# What the others are compared with.
BASE = "local window, halo"
# Measured with one thread too: local windows, and the same by unfolding.
BY_ONE_THREAD = ("local window", "halo, unfold", "blended, unfold")


def modules() -> dict[str, nn.Module]:
    """All that is compared, by name."""
    torch.manual_seed(0)
    halo, plain = LocalWindowAttention(CHANNELS), LocalWindowAttention(CHANNELS, position="none")
    blended = LocalWindowAttention(CHANNELS, form="blended")
    bare = LocalWindowAttention(CHANNELS, form="blended", position="none")
    made = {
        BASE: halo,
        "local window, halo, no position": plain,
        "local window, halo, table": LocalWindowAttention(CHANNELS, position="table"),
        "local window, halo, decomposed": LocalWindowAttention(CHANNELS, position="decomposed"),
        "local window, blended": blended,
        "local window, blended, no position": bare,
        "halo, unfold and SDPA, no position": Unfolded(plain),
        "blended, unfold and SDPA, no position": Unfolded(bare),
        "hierarchical": HierarchicalAttention(CHANNELS),
        "linear": LinearAttention(CHANNELS),
        "channel": ChannelAttention(CHANNELS),
        "transposed": TransposedAttention(CHANNELS),
        "seed's hierarchical": SeedHierarchical(CHANNELS),
        "seed's hierarchical, in chunks at any size": SeedHierarchical(
            CHANNELS, most_chunked=1 << 40
        ),
        "seed's windows": SeedWindows(CHANNELS),
        "global, SDPA": Whole(plain, "sdpa"),
        "global, SDPA, 256 queries at a time": Whole(plain, "chunked"),
        "global, materialized": Whole(plain, "materialized"),
    }
    return {name: module.eval() for name, module in made.items()}


FLEX = "time, FlexAttention, {}²"


def takes(name: str, side: int) -> bool:
    """Whether a size is measured: materialized scores of 256² pixels are 34 GB."""
    return not (name == "global, materialized" and side > 128)


def seconds(run: Callable[[], Any], times: int = 1) -> float:
    """Processor seconds of one run, the mean of ``times`` in a row."""
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


def measure_time(results: ResultFile, side: int, rounds: int, threads: int) -> None:
    """One row for each module at one size, and its ratio to the base."""
    torch.set_num_threads(threads)
    image = torch.randn(1, CHANNELS, side, side)
    runs = {
        name: lambda module=module: module(image)
        for name, module in modules().items()
        if takes(name, side) and (threads > 1 or name.startswith(BY_ONE_THREAD))
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    turns = list(runs)
    for turn in range(rounds + 1):  # the first round warms up
        for name in turns:
            if name in SLOW and side > 128 and turn > 2:
                continue
            found = seconds(runs[name], times=(256 // side) ** 2)
            if turn:
                taken[name].append(found)
        turns = [*turns[3:], *turns[:3]]
    for name, all_of in taken.items():
        ratios = [one / base for one, base in zip(all_of, taken[BASE], strict=False)]
        results.add(
            f"time, {name}, {side}², {threads} threads",
            module=name,
            side=side,
            threads=threads,
            rounds=len(all_of),
            cpu_s=round(statistics.median(all_of), 5),
            ratio=spread(ratios),
        )


def workspace_bytes(module: nn.Module, image: Tensor) -> int:
    """Bytes at the peak beyond the input and the result."""
    module(image)
    kept: list[Tensor] = []
    peak = live_peak_bytes(lambda: kept.append(module(image)))
    return peak - kept[0].numel() * kept[0].element_size()


def measure_workspace(results: ResultFile, side: int) -> None:
    """One row for each module at one size."""
    image = torch.randn(1, CHANNELS, side, side)
    for name, module in modules().items():
        row = f"workspace, {name}, {side}²"
        slow = name.startswith("global") and side > 128  # as at 128²: linear in pixels
        if takes(name, side) and not slow and not results.has(row):
            results.add(row, module=name, side=side, workspace_bytes=workspace_bytes(module, image))


def measure_strips(results: ResultFile) -> None:
    """Local windows of images up to 2048², and of the same width and less height."""
    for name in (BASE, "local window, blended"):
        for height, width in (
            (256, 256),
            (256, 512),
            (256, 1024),
            (256, 2048),
            (1024, 1024),
            (2048, 2048),
        ):
            row = f"strips, {name}, {height}×{width}"
            if not results.has(row):
                image = torch.randn(1, CHANNELS, height, width)
                taken = workspace_bytes(modules()[name], image)
                results.add(
                    row,
                    module=name,
                    height=height,
                    width=width,
                    workspace_bytes=taken,
                    bytes_per_column=round(taken / width),
                )


def measure_flex(results: ResultFile, side: int) -> None:
    """FlexAttention over all pixels with the halo's windows as a mask of blocks, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    module = LocalWindowAttention(CHANNELS, position="none").eval()
    windows, image = module.windows, torch.randn(1, CHANNELS, side, side)
    step, margin = windows.stride, windows.halo

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = []
        for q, k in ((query // side, key // side), (query % side, key % side)):
            first = q // step * step - margin
            seen.append((k >= first) & (k < first + windows.size))
        return seen[0] & seen[1]

    mask = create_block_mask(sees, None, None, side * side, side * side, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        query, key, value = (
            t.flatten(1, 2).mT
            for t in (
                t.flatten(1, 2).unflatten(-1, (module.heads, -1)).permute(0, 2, 3, 1)
                for t in module.qkv(image.permute(0, 2, 3, 1)).chunk(3, -1)
            )
        )
        query, key, value = (
            t.unflatten(-1, (module.heads, -1)).transpose(1, 2) for t in (query, key, value)
        )
        return compiled(query.contiguous(), key.contiguous(), value.contiguous(), block_mask=mask)

    run(), module(image)
    pairs = [(seconds(run), seconds(lambda: module(image))) for _ in range(5)]
    ratios = [flex / ours for flex, ours in pairs]
    results.add(
        FLEX.format(side),
        module="FlexAttention, compiled",
        side=side,
        threads=torch.get_num_threads(),
        rounds=5,
        cpu_s=round(statistics.median(flex for flex, _ in pairs), 5),
        ratio=spread(ratios),
    )


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flex", action="store_true", help="needs a C++ compiler")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "attention_modules",
        fresh=options.fresh,
        about="Attention modules over images: processor seconds and workspace.",
    )
    tune_heap()
    with torch.inference_mode():
        for side in SIZES:
            for threads in (1, 2):
                if not results.has(f"time, {BASE}, {side}², {threads} threads"):
                    measure_time(results, side, options.rounds, threads)
            measure_workspace(results, side)
        measure_strips(results)
    with torch.no_grad():
        for side in (64, 128) if options.flex else ():
            if not results.has(FLEX.format(side)):
                measure_flex(results, side)


if __name__ == "__main__":
    main()
