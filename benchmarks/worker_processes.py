"""A folder of photographs by one process and by two: wall time, and equal files.

    python benchmarks/worker_processes.py [--photos 24] [--repeats 3] [--fresh]

One process of one thread, one of two threads, and two of one thread each, in alternating runs. Wall
time is of the whole job, including the start of processes and the loading of the model; that of a
job of two photographs, which is mostly these, is reported too. Files are compared where an image is
run by the same number of threads within the same memory.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import HEAP_KEEPS, ResultFile, in_turns, ratio_of
from folder_pipeline import HEIGHT, WIDTH, make_photographs, options_of
from subprocess_run import measure_in_subprocess

MODELS = ("lowtide-x2", "lowtide-x4")
# By name: threads of this process, devices, and the budget, of which two get a half each.
WAYS: dict[str, tuple[int, str, str]] = {
    "one process, one thread": (1, "", "1GiB"),
    "one process, two threads": (2, "", "1GiB"),
    "two processes, one thread each": (2, "cpu,cpu", "2GiB"),
}
# Those in which an image is run by as many threads within as much memory.
ALIKE = "one process, one thread", "two processes, one thread each"


def run_times(photos: int, repeats: int, model: str) -> dict[str, Any]:
    """Wall seconds of each way in turns, and a digest of the files."""
    found: dict[str, Any] = {way: {"wall_s": [], "few_wall_s": []} for way in WAYS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_photographs(folder / "in", photos)
        (folder / "few").mkdir()
        for name in ("00.jpg", "01.jpg"):
            (folder / "few" / name).write_bytes((folder / "in" / name).read_bytes())
        for turn, way in in_turns(WAYS, repeats + 1):
            for key, source in (("wall_s", "in"), ("few_wall_s", "few")):
                wall, digest = _job(folder / source, model, *WAYS[way])
                if turn:  # the first is a rehearsal
                    found[way][key].append(round(wall, 3))
                if source == "in":
                    found[way]["sha256"] = digest
    return found


def _job(folder: Path, model: str, threads: int, devices: str, budget: str) -> tuple[float, str]:
    import lowtide

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        started = time.perf_counter()
        report = lowtide.upscale(
            folder, out, model=model, budget=budget, devices=devices, format="png"
        )
        wall = time.perf_counter() - started
        report.raise_for_failures()
        digest = hashlib.sha256()
        for path in sorted(Path(out).glob("*.png")):
            digest.update(path.read_bytes())
    return wall, digest.hexdigest()


def main() -> None:
    """Measure what is missing."""
    options = options_of(__doc__, photos=24)
    results = ResultFile(
        "worker_processes",
        fresh=options.fresh,
        about=f"{options.photos} photographs of {WIDTH}×{HEIGHT} by one process and by two, by the"
        " clock.",
    )
    for model in MODELS:
        if results.has(model):
            continue
        found = measure_in_subprocess(
            "worker_processes:run_times", options.photos, options.repeats, model, env=HEAP_KEEPS
        ).result
        one = found["one process, one thread"]
        results.add(
            model,
            photos=options.photos,
            width=WIDTH,
            height=HEIGHT,
            same_files=len({found[way]["sha256"] for way in ALIKE}) == 1,
            wall_s={way: statistics.median(each["wall_s"]) for way, each in found.items()},
            two_images_wall_s={
                way: statistics.median(each["few_wall_s"]) for way, each in found.items()
            },
            times_as_fast={
                way: ratio_of(one["wall_s"], each["wall_s"]) for way, each in found.items()
            },
            runs=found,
        )


if __name__ == "__main__":
    main()
