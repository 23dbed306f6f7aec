"""Networks compiled by PyTorch, against the same ones uncompiled, for one tile shape.

    python benchmarks/compiled.py [--only TEXT] [--pairs 7] [--fresh]

For each model a process that has nothing of PyTorch's cache compiles it, and another one finds
there what the first has left. Times: processor seconds of both networks in turns, in a third, whose
heap keeps what was freed, as the command line's does. Peaks: anonymous memory above that of the
loaded libraries, of a process that runs it as it is and of the two that compile.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from common import HEAP_KEEPS, ResultFile, in_turns, ratio_of, row_parser
from streaming_models import made
from subprocess_run import measure_in_subprocess
from torch import nn

from lowtide.streaming.specialize import import_compiler_libraries, specialize_network
from lowtide.streaming.tiles.network import RunnableNetwork

MODELS = ("lowtide-x2", "lowtide-x4", "SPAN", "Compact")
SIDE = 256
IMPORTS = ("torch._dynamo.backends.inductor", "torch._inductor.compile_fx")


def network_of(name: str) -> RunnableNetwork:
    """A bundled model, or one with random weights."""
    import lowtide

    module: nn.Module = lowtide.load(name).module if name.startswith("lowtide") else made(name)
    return RunnableNetwork(module, 1, 3, 3)


def run_plain(name: str) -> None:
    """One tile as it is."""
    torch.set_num_threads(2)
    with torch.inference_mode():
        network_of(name).forward(torch.rand(1, 3, SIDE, SIDE))


def run_compiled(name: str, pairs: int) -> dict[str, Any]:
    """What compiling takes, and both ways by turns."""
    torch.set_num_threads(2)
    import_compiler_libraries()
    plain, shape = network_of(name), (1, 3, SIDE, SIDE)
    started = time.perf_counter()
    fast = specialize_network(plain, shape, as_graph=False)
    warmup = time.perf_counter() - started
    images, seconds = torch.rand(shape), {"plain": [], "compiled": []}
    ways = {"plain": plain.forward, "compiled": fast.forward}
    with torch.inference_mode():
        error = (fast.forward(images) - plain.forward(images)).abs().max().item()
        for _, way in in_turns(ways, pairs):
            started = time.process_time()
            ways[way](images)
            seconds[way].append(round(time.process_time() - started, 4))
    return {"warmup_s": round(warmup, 1), "max_abs_error": error, "cpu_s": seconds}


def measure(results: ResultFile, name: str, pairs: int) -> None:
    """One model's row."""
    plain = measure_in_subprocess("compiled:run_plain", name)
    with tempfile.TemporaryDirectory() as cache:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache}
        first = measure_in_subprocess("compiled:run_compiled", name, 0, env=env, imports=IMPORTS)
        again = measure_in_subprocess("compiled:run_compiled", name, 0, env=env, imports=IMPORTS)
        timed = measure_in_subprocess(
            "compiled:run_compiled", name, pairs, env=env | HEAP_KEEPS, imports=IMPORTS
        ).result
    cpu_s = timed["cpu_s"]
    results.add(
        name,
        side=SIDE,
        warmup_s=first.result["warmup_s"],
        warmup_cached_s=again.result["warmup_s"],
        cpu_s=cpu_s,
        ratio=ratio_of(cpu_s["compiled"], cpu_s["plain"]),
        max_abs_error=timed["max_abs_error"],
        peak_bytes={
            "plain": plain.peak_bytes,
            "compiled": first.peak_bytes,
            "from cache": again.peak_bytes,
        },
    )


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=7).parse_args()
    results = ResultFile(
        "compiled",
        fresh=options.fresh,
        about=f"Networks compiled by PyTorch for tiles of {SIDE}×{SIDE}, beside the same as they"
        " are.",
    )
    for name in MODELS:
        if options.only in name and not results.has(name):
            measure(results, name, options.pairs)


if __name__ == "__main__":
    main()
