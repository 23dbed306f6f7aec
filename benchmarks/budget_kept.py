"""Folders and first runs polled from outside: whether anonymous memory stays within the budget.

    python benchmarks/budget_kept.py [--only folder] [--state after] [--fresh]

Each run is `lowtide upscale` on one thread in a process of its own, whose anonymous resident memory
another process reads every 2 ms. The baseline is what it has when it says that it loads the model;
the libraries of band planning are imported before, since no run's plan counts them.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ResultFile, row_parser
from photographs import photograph

POLL_SECONDS = 0.002
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
# Pictures in which the heap fills. Growth compares medians: the highest peak is of the largest one.
EARLY = 19
BANDED = ["--strategy", "streamed", "--streams", "1"]
# By name: budget in MiB, pictures, all of different sizes, and options. 24 MiB do not hold bands.
FOLDERS: dict[str, tuple[int, int, list[str]]] = {
    "folder of 40 in 48 MiB": (48, 40, BANDED),
    "folder of 100 in 24 MiB": (24, 100, []),
    "folder of 200 in 256 MiB": (256, 200, []),
}
FIRST_RUNS = ("lowtide-x2", "lowtide-x4", "lowtide-large-x4")
# Networks of spandrel with random weights, (module, class, options), beside the trained files of
# ``--models``.
RANDOM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Compact x4": (
        "Compact.__arch.SRVGG",
        "SRVGGNetCompact",
        dict(num_feat=64, num_conv=16, upscale=4),
    ),
    "SwinIR x2": (
        "SwinIR",
        "SwinIR",
        dict(upscale=2, window_size=8, img_range=1.0, depths=[6] * 4, num_heads=[6] * 4)
        | dict(embed_dim=60, mlp_ratio=2, upsampler="pixelshuffledirect"),
    ),
    "SPAN x4": ("SPAN", "SPAN", dict(num_in_ch=3, num_out_ch=3, feature_channels=48, upscale=4)),
    "CRAFT x4": ("CRAFT", "CRAFT", dict(upscale=4)),
}
# Far too little: the error names the smallest budget.
TINY = "1MiB"
CHILD = (
    "from lowtide.core.heap import tune_heap\n"
    "tune_heap()\n"
    "from lowtide.streaming.planner.program_cache import preload_capture\n"
    "preload_capture()\n"
    "from lowtide.streaming.probe.trace_memory import preload_tracing\n"
    "preload_tracing()\n"
    "from lowtide.cli.main import main\n"
    "main()"
)


@dataclass
class Watched:
    """What a run of the command line took: peaks above the baseline, one a picture."""

    code: int
    output: str
    cpu_s: float
    peaks: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The highest of all peaks."""
        return max(self.peaks, default=0)


def upscale(words: list[str], cache: Path, command: str = "upscale") -> Watched:
    """Run ``lowtide upscale``, or another ``command``, with ``words``, and poll it to its end."""
    settings = {"OMP_NUM_THREADS": "1", "LOWTIDE_CACHE": str(cache)}
    before = os.times()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, command, *words],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    output: list[str] = []
    readers = [
        threading.Thread(target=_collect, args=(child.stderr, lines.append)),
        threading.Thread(target=_collect, args=(child.stdout, output.append)),
    ]
    for reader in readers:
        reader.start()
    peaks = _poll(child, lines)
    for reader in readers:
        reader.join()
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return Watched(child.returncode, "".join(output or lines), round(cpu, 2), peaks)


def _collect(stream: Any, keep: Callable[[str], object]) -> None:
    for line in stream:
        keep(line)


def _poll(child: subprocess.Popen[str], lines: list[str]) -> list[int]:
    """The peak of each picture, which ends when its last row is done, above the baseline."""
    baseline, seen, peaks = None, 0, [0]
    while child.poll() is None:
        if not (now := anonymous(child.pid)):
            continue
        for line in lines[seen:]:
            seen += 1
            if line.startswith("loading ") and baseline is None:
                baseline = now
            if " 100% " in line:
                peaks.append(0)
        if baseline is not None:
            peaks[-1] = max(peaks[-1], now - baseline)
        time.sleep(POLL_SECONDS)
    last = peaks.pop() if len(peaks) > 1 else 0  # the end of the last picture
    peaks[-1] = max(peaks[-1], last)
    return peaks


def anonymous(process: int) -> int:
    """Anonymous resident bytes of a process; 0 once it has ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE


def sizes(count: int) -> list[tuple[int, int]]:
    """As many (W, H) of 100-260 pixels, all different, in an order without a trend."""
    made = [(100 + 61 * number % 161, 100 + 101 * number % 157) for number in range(count)]
    random.Random(0).shuffle(made)
    return made


def folder_row(budget: int, count: int, options: list[str], folder: Path) -> dict[str, Any]:
    """Run a folder of pictures, each of another size."""
    source = folder / "in"
    source.mkdir()
    for number, size in enumerate(sizes(count)):
        photograph(source / f"{number:03}.png", *size)
    words = [str(source), "-o", str(folder / "out"), "--json", "-m", "lowtide-x2"]
    words += ["--budget", f"{budget}MiB", *options]
    run = upscale(words, folder / "cache")
    items = json.loads(run.output)["images"] if run.output.startswith("{") else []
    return {
        "budget_bytes": budget * MIB,
        "pictures": count,
        "exit_code": run.code,
        "done": sum(item["status"] == "done" for item in items),
        "above_their_bound": sum(_is_above_bound(item) for item in items),
        "over_budget": sum(peak > budget * MIB for peak in run.peaks),
        "peak_bytes": run.peak,
        "growth_from_20th": growth_from_20th(run.peaks),
        "peaks": run.peaks,
        "reported_peaks": [item["memory"]["peak_bytes"] for item in items if item.get("memory")],
        "cpu_s": run.cpu_s,
    }


def growth_from_20th(peaks: list[int]) -> float:
    """The median peak of the last third of the pictures from the 20th on, by that of the first."""
    later = peaks[EARLY:]
    third = len(later) // 3
    return round(statistics.median(later[-third:]) / statistics.median(later[:third]), 3)


def _is_above_bound(item: dict[str, Any]) -> bool:
    memory = item.get("memory")
    return memory is not None and memory["peak_bytes"] > memory["upper_bytes"]


def first_run_rows(model: str, folder: Path) -> dict[str, Any]:
    """Two first runs with an empty cache, at the smallest budget that an error names and 1.4 of
    it."""
    picture = str(photograph(folder / "in.png", 300, 200))
    words = [picture, "-m", model, "--force", "--json", "-o", str(folder / "out.png")]
    refusal = json.loads(upscale([*words, "--budget", TINY], folder / "none").output)["error"]
    smallest = refusal["smallest_bytes"]
    figures: dict[str, Any] = {"smallest_bytes": smallest}
    for share in (1.0, 1.4):
        budget = int(smallest * share)
        run = upscale([*words, "--budget", str(budget)], folder / f"cold-{share}")
        figures[f"at {share}"] = {
            "budget_bytes": budget,
            "exit_code": run.code,
            "peak_bytes": run.peak,
            "kept": run.code == 0 and run.peak <= budget,
            "cpu_s": run.cpu_s,
        }
    return figures


def random_first_run(
    module: str, kind: str, options: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """`first_run_rows` of one of spandrel's networks, with random weights."""
    import torch

    torch.manual_seed(0)
    home = importlib.import_module(f"spandrel.architectures.{module}")
    network = getattr(home, kind)(**options)
    for values in network.parameters():
        if values.dim() > 1:
            torch.nn.init.normal_(values, std=0.02)
    path = folder / "random.pth"
    torch.save(dict(network.state_dict()), path)
    return first_run_rows(str(path), folder)


def main() -> None:
    """Measure each row that is missing."""
    parser = row_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=[], help="further models for first runs")
    options = parser.parse_args()
    results = ResultFile(
        "budget_kept",
        fresh=options.fresh,
        about="Peaks polled from outside every 2 ms: folders of many sizes, and first runs.",
    )
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for row, given in FOLDERS.items():
        measures[row] = lambda folder, g=given: folder_row(*g, folder)
    for model in (*FIRST_RUNS, *options.models):
        measures[f"first run of {Path(model).stem}"] = lambda folder, m=model: first_run_rows(
            m, folder
        )
    for name, given in RANDOM.items():
        measures[f"first run of {name}"] = lambda folder, g=given: random_first_run(*g, folder)
    for row, measure in measures.items():
        if options.only in row and not results.has(row):
            with tempfile.TemporaryDirectory() as folder:
                results.add(row, **measure(Path(folder)))


if __name__ == "__main__":
    main()
