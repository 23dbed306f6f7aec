"""A photograph of 512×384 through the full DRCT, file to file: Lowtide against two tile loops.

    python benchmarks/drct_photograph.py [--pairs 3] [--fresh]

The loops run spandrel's own forward pass: that of Real-ESRGAN (256, pad 10), and that of the guide
which users of DRCT follow, written from its description: overlapping tiles in batches, each padded
by mirrored pixels to a further window, added up in two maps of the result's size and divided. Its
conservative configuration has tiles of 256, that for quality of 512. Weights are fixed and random.
It takes an hour and a half, goes on where it was interrupted, and needs a machine that is idle
otherwise.

Times: processor seconds of processes that took turns, the loading of the file included; Lowtide's
plan is known from an earlier run. Peaks: of fresh processes. Lowtide has the command line's heap in
both, and no more room than the least of the others take. These have the heap that is best for
each: freed blocks are all kept for times, and all given back for peaks. All have huge pages.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HEAP_KEEPS, HUGE_PAGES, ResultFile, in_turns, ratio_of
from padded_tiles import padded_tiles
from photographs import as_array, photograph
from streaming_models import made
from subprocess_run import SubprocessUsage, measure_in_subprocess
from torch import Tensor, nn

from lowtide.core.heap import tune_heap
from lowtide.core.metrics import max_error, psnr
from lowtide.jobs.engine.report import reported_db

WIDTH, HEIGHT = 512, 384
SCALE, WINDOW = 4, 16
OURS = "Lowtide"
WAYS = (
    OURS,
    "tile loop, 256, pad 10",
    "guide's conservative, 256",
    "guide's for quality, 512",
)
OVERLAP = 32  # of the guide's tiles
GIVES_BACK: dict[str, str] = {}  # as `measure_fresh` sets it


def run_way(way: str, source: str, target: str, weights: str, settings: dict[str, Any]) -> float:
    """One job; returns its processor seconds."""
    torch.set_num_threads(2)
    started = time.process_time()
    if way == OURS:
        tune_heap()
        import lowtide

        report = lowtide.upscale(source, target, model=weights, force=True, **settings)
        report.raise_for_failures()
    else:
        _run_loop(way, Path(source), Path(target), Path(weights))
    return time.process_time() - started


@torch.inference_mode()
def _run_loop(way: str, source: Path, target: Path, weights: Path) -> None:
    import pyvips

    module, image = _loaded(source, weights)
    if way.startswith("tile loop"):
        result = padded_tiles(_padded(module), image, SCALE, 256, 10)
    else:
        result = guided_tiles(_padded(module, further=True), image, int(way.split()[-1]))
    pyvips.Image.new_from_array(_samples(result)).pngsave(str(target), compression=3)


def _loaded(source: Path, weights: Path) -> tuple[nn.Module, Tensor]:
    """spandrel's model, and the photograph as it takes it."""
    from spandrel import ModelLoader

    module = ModelLoader(device="cpu").load_from_file(weights).eval().model
    image = torch.from_numpy(as_array(source).astype(np.float32) / 255).permute(2, 0, 1)[None]
    return module, image


def _samples(result: Tensor) -> np.ndarray:
    """(height, width, 3) uint8."""
    return (result[0].clamp_(0, 1).permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)


def _padded(module: nn.Module, *, further: bool = False) -> Any:
    """The model on images of any size, mirrored to whole windows, or to a ``further`` one."""

    def run(tile: Tensor) -> Tensor:
        height, width = tile.shape[2:]
        down, across = (
            (side // WINDOW + 1) * WINDOW - side if further else -side % WINDOW
            for side in (height, width)
        )
        padded = torch.cat([tile, tile.flip(2)], 2)[:, :, : height + down]
        padded = torch.cat([padded, padded.flip(3)], 3)[..., : width + across]
        return module(padded)[..., : height * SCALE, : width * SCALE]

    return run


def guided_tiles(run: Any, image: Tensor, tile: int, batch: int = 1) -> Tensor:
    """Overlapping tiles, the last of a row and column shifted inward, averaged where they meet."""
    height, width = image.shape[2:]
    tops, lefts = (
        [*range(0, max(side - tile, 0), tile - OVERLAP), max(side - tile, 0)]
        for side in (height, width)
    )
    places = [(top, left) for top in tops for left in lefts]
    total = image.new_zeros(1, 3, height * SCALE, width * SCALE)
    count = torch.zeros_like(total)
    for first in range(0, len(places), batch):
        some = places[first : first + batch]
        parts = [image[..., top : top + tile, left : left + tile] for top, left in some]
        for (top, left), made_tile in zip(some, run(torch.cat(parts)), strict=True):
            rows = slice(top * SCALE, top * SCALE + made_tile.shape[1])
            columns = slice(left * SCALE, left * SCALE + made_tile.shape[2])
            total[0, :, rows, columns] += made_tile
            count[..., rows, columns] += 1
    return total / count


class Measuring:
    """Runs of all ways, each a row of the file as soon as it is done: peaks, then turns."""

    def __init__(self, results: ResultFile, folder: Path) -> None:
        self._results, self._folder = results, folder
        self._source = photograph(folder / "photo.png", WIDTH, HEIGHT)
        self._weights = folder / "drct.pth"
        torch.save(made("DRCT").state_dict(), self._weights)
        self._learned = False  # whether Lowtide's plan is known

    def all(self, pairs: int) -> None:
        """What is missing, and then what it comes to."""
        for way in (*WAYS[1:], WAYS[0]):  # Lowtide gets the least of the others
            if not self._results.has(_peak(way)):
                used = self._run(way, GIVES_BACK, warmups=1)
                self._results.add(_peak(way), peak_bytes=used.peak_bytes)
                self._learned |= way == OURS
        for number, turn in itertools.groupby(in_turns(WAYS, pairs), operator.itemgetter(0)):
            ways = [way for _, way in turn]
            if not self._results.has(_turn(number)):
                self._take_turn(number, ways)
        self._sum_up(pairs)

    def _run(self, way: str, heap: dict[str, str], **how: Any) -> SubprocessUsage:
        settings: dict[str, Any] = {}
        if way == OURS:
            settings = {"budget": min(map(self._peak_of, WAYS[1:])), "device": "cpu"}
        given = way, str(self._source), str(self._target(way)), str(self._weights), settings
        return measure_in_subprocess(
            "drct_photograph:run_way", *given, env=HUGE_PAGES | heap, **how
        )

    def _take_turn(self, number: int, ways: Sequence[str]) -> None:
        """All ways one after the other, so that none is compared with one of another day."""
        seconds = {}
        for way in ways:
            warmups = int(way == OURS and not self._learned)
            used = self._run(way, HEAP_KEEPS, warmups=warmups)
            self._learned |= way == OURS
            seconds[way] = round(used.result, 3)
        self._results.add(_turn(number), cpu_s=seconds)

    def _sum_up(self, pairs: int) -> None:
        """A row for each way: peaks and seconds relative to Lowtide's, and how results differ."""
        turns = [self._results.row(_turn(number))["cpu_s"] for number in range(pairs)]
        seconds = {way: [turn[way] for turn in turns] for way in WAYS}
        whole = _whole(self._source, self._weights)
        for way in WAYS:
            if self._results.has(way):
                continue
            if not self._target(way).exists():  # of a run that was interrupted
                self._run(way, HEAP_KEEPS)
            result = as_array(self._target(way))
            self._results.add(
                way,
                width=WIDTH,
                height=HEIGHT,
                peak_bytes=self._peak_of(way),
                cpu_s=seconds[way],
                ratio=ratio_of(seconds[way], seconds[OURS]),
                share_of_peak=round(self._peak_of(way) / self._peak_of(OURS), 3),
                largest_difference_of_255=int(max_error(result, whole)),
                psnr_db=reported_db(psnr(result, whole, peak=255)),
            )

    def _peak_of(self, way: str) -> int:
        return self._results.row(_peak(way))["peak_bytes"]

    def _target(self, way: str) -> Path:
        return self._folder / f"{way}.png"


def _peak(way: str) -> str:
    return f"{way}: peak"


def _turn(number: int) -> str:
    return f"turn {number + 1}"


@torch.inference_mode()
def _whole(source: Path, weights: Path) -> np.ndarray:
    """What spandrel's model makes of the whole photograph, whose sides are whole windows."""
    module, image = _loaded(source, weights)
    return _samples(module(image))


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "drct_photograph",
        fresh=options.fresh,
        about=f"A photograph of {WIDTH}×{HEIGHT} through DRCT ×4, file to file.",
    )
    if all(results.has(way) for way in WAYS):
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as place:
        Measuring(results, Path(place)).all(options.pairs)


if __name__ == "__main__":
    main()
