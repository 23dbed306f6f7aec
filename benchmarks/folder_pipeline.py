"""A folder of photographs, computed and written at the same time, against its parts.

    python benchmarks/folder_pipeline.py [--photos 30] [--repeats 3] [--fresh]

One thread computes. Wall time of the whole job, from the start of its first image, is compared with
the longer of two parts: decoding the photographs and encoding their results, and the network with
its planning and nothing else. All in one process, in alternating runs; processor seconds are
reported too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HEAP_KEEPS, ResultFile, in_turns, ratio_of
from photographs import photograph
from subprocess_run import measure_in_subprocess

from lowtide.core.progress import Progress

MODEL = "lowtide-x2"
WIDTH, HEIGHT = 640, 480
# By name: the suffix, and the encoder's options.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "PNG": ("png", {}),
    "JPEG": ("jpg", {}),
    "lossless WebP": ("webp", {"webp_lossless": True}),
}
BUDGET = "2GiB"


class Taken:
    """A sink that forgets its rows, and a source that has them decoded."""

    def __init__(self, pixels: np.ndarray, info: Any) -> None:
        self.info, self.shape, self.dtype, self._pixels = info, pixels.shape, pixels.dtype, pixels

    def read(self, first: int, last: int) -> np.ndarray:
        """Rows that are there already."""
        return self._pixels[first:last]

    def write(self, first: int, values: np.ndarray) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to release."""

    def commit(self) -> Path:
        """There is no file."""
        return Path()

    def abort(self) -> None:
        """Nothing to remove."""


def run_times(photos: int, repeats: int, name: str) -> dict[str, Any]:
    """Wall and processor seconds of the job and of its parts, in turns."""
    suffix, encoding = FORMATS[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sources = make_photographs(folder / "in", photos)
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "compute": _computing(sources, folder / "out", suffix),
            "decode and encode": _files_only(sources, folder, suffix, encoding),
            "one after another": lambda: _job(folder, suffix, streams=1, **encoding),
            "in flight": lambda: _job(folder, suffix, streams=2, **encoding),
        }
        found: dict[str, Any] = {way: {"wall_s": [], "cpu_s": []} for way in ways}
        for turn, way in in_turns(ways, repeats + 1):
            wall, cpu = ways[way]()
            if turn:  # the first is a rehearsal
                found[way]["wall_s"].append(round(wall, 3))
                found[way]["cpu_s"].append(round(cpu, 3))
    return found


def make_photographs(folder: Path, count: int) -> list[Path]:
    """Different pieces of one large photograph."""
    import pyvips

    folder.mkdir()
    sheet = photograph(folder.parent / "sheet.png", 3 * WIDTH, 3 * HEIGHT)
    image, made = pyvips.Image.new_from_file(str(sheet)).copy_memory(), []
    for index in range(count):
        left, top = 37 * index % (2 * WIDTH), 53 * index % (2 * HEIGHT)
        made.append(folder / f"{index:02}.jpg")
        image.crop(left, top, WIDTH, HEIGHT).write_to_file(f"{made[-1]}[Q=92]")
    return made


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _job(folder: Path, suffix: str, **settings: Any) -> tuple[float, float]:
    import lowtide

    begun: list[tuple[float, float]] = []

    def note(moment: Progress) -> None:
        if moment.phase == "run" and not begun:
            begun.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory(dir=folder) as out:
        report = lowtide.upscale(
            folder / "in",
            out,
            model=MODEL,
            budget=BUDGET,
            format=suffix,
            progress=note,
            device="cpu",
            **settings,
        )
        ended = time.perf_counter(), time.process_time()
        report.raise_for_failures()
    return ended[0] - begun[0][0], ended[1] - begun[0][1]


def _prepared() -> tuple[Any, Any, Any]:
    from lowtide.jobs.images.prepare import load_prepared_model
    from lowtide.jobs.upscale.settings import UpscaleSettings
    from lowtide.memory.budget import Budget

    settings = UpscaleSettings.of(model=MODEL, device="cpu")
    return settings, load_prepared_model(settings, device="cpu"), Budget.parse(BUDGET, device="cpu")


def _computing(sources: list[Path], out: Path, suffix: str) -> Callable[[], tuple[float, float]]:
    from lowtide.jobs.images.planning import plan_image
    from lowtide.jobs.images.target_size import target_size
    from lowtide.media import open_image
    from lowtide.streaming.tiles.runner import execute_plan

    settings, prepared, budget = _prepared()
    decoded = []
    for source in sources:
        with open_image(source) as image:
            decoded.append((source, image.read(0, image.info.height).copy(), image.info))

    def compute() -> None:
        for source, pixels, info in decoded:
            target = out / f"{source.stem}.{suffix}"
            sizes = target_size(source, target, settings, prepared.geometry.scale)
            task = plan_image(source, target, sizes, prepared, settings, budget)
            given = Taken(pixels, info)
            execute_plan(prepared.network, prepared.adapter(info), given, given, task.plan)

    return lambda: _timed(compute)


def _files_only(
    sources: list[Path], folder: Path, suffix: str, encoding: dict[str, Any]
) -> Callable[[], tuple[float, float]]:
    import lowtide
    from lowtide.media import EncodeOptions, open_image, open_sink

    done, options = folder / "done", EncodeOptions(**encoding)
    lowtide.upscale(folder / "in", done, model=MODEL, budget=BUDGET, format="png", device="cpu")
    results = []
    for source in sources:
        with open_image(done / f"{source.stem}.png") as image:
            results.append((image.read(0, image.info.height).copy(), image.info))

    def files() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            for source, (pixels, info) in zip(sources, results, strict=True):
                with open_image(source) as image:
                    image.read(0, image.info.height)
                target = Path(out) / f"{source.stem}.{suffix}"
                with open_sink(target, info, metadata=image.metadata, options=options) as sink:
                    sink.write(0, pixels)
                    sink.commit()

    return lambda: _timed(files)


def options_of(about: str | None, *, photos: int) -> argparse.Namespace:
    """What can be said on the command line of a benchmark of folders."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--photos", type=int, default=photos)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing."""
    options = options_of(__doc__, photos=30)
    results = ResultFile(
        "folder_pipeline",
        fresh=options.fresh,
        about=f"{options.photos} photographs of {WIDTH}×{HEIGHT} through {MODEL}, one thread"
        " computing: wall time of the job against the larger of its parts.",
    )
    for name in FORMATS:
        row = f"JPEG to {name}"
        if results.has(row):
            continue
        found = measure_in_subprocess(
            "folder_pipeline:run_times", options.photos, options.repeats, name, env=HEAP_KEEPS
        ).result
        parts = zip(found["compute"]["wall_s"], found["decode and encode"]["wall_s"], strict=True)
        larger = [max(pair) for pair in parts]
        against = {
            way: ratio_of(found[way]["wall_s"], larger)
            for way in ("one after another", "in flight")
        }
        medians = {way: statistics.median(figures["wall_s"]) for way, figures in found.items()}
        results.add(
            row,
            photos=options.photos,
            width=WIDTH,
            height=HEIGHT,
            format=name,
            wall_s=medians,
            against_larger_part=against,
            runs=found,
        )


if __name__ == "__main__":
    main()
