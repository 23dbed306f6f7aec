"""Video autoencoders decoded in bands, next to the plain decode, tiles, and other recipes.

    python benchmarks/video_vae.py [--only TEXT] [--pairs 2] [--fresh]

Random weights, fp32, one thread. Peaks: a fresh process for each row, above its start and with the
result, of the second call, in a heap that returns freed memory. Times: all ways in one process, one
after another and then in reverse order, in processor seconds, in a heap that keeps blocks below
1 GiB; the first call, which makes the plan, has its own column. Budgets are parts of the plain
peak. A last set of rows decodes clips of 17 and of 97 frames: what is above the result should not
grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common import HEAP_TO_1GIB, ResultFile, row_parser
from subprocess_run import measure_in_subprocess
from video_vae_runs import BANDS_OUTSIDE, FRAMES_OUTSIDE, ON_DISK, PLAIN, SEED, TILES, WHOLE


@dataclass(frozen=True)
class Case:
    """A model of some width, a clip, and the budgets of its ways as parts of the plain peak."""

    model: str
    width: int
    frames: int
    side: int
    shares: dict[str, float]

    @property
    def title(self) -> str:
        """What the names of its rows begin with."""
        return f"{self.model} of width {self.width}, {self.frames} frames of {self.side}²"

    @cached_property
    def rows(self) -> dict[str, str]:
        """By way the name of its row."""
        return {way: f"{self.title}, {way}" for way in self.shares}

    def budgets(self, results: ResultFile) -> dict[str, int]:
        """By way its budget in bytes, once the plain decode was measured; 0 for those without."""
        plain = results.row(self.rows[PLAIN])["peak_bytes"]
        return {way: int(plain * share) for way, share in self.shares.items()}


WAN = {PLAIN: 0, FRAMES_OUTSIDE: 0.85, BANDS_OUTSIDE: 0.65, ON_DISK: 0.5, TILES: 0, SEED: 0}
MAGVIT = {PLAIN: 0, FRAMES_OUTSIDE: 0.6, ON_DISK: 0.3}
CASES = (
    Case("Wan", 32, 17, 256, WAN),
    Case("SeedVR2-shaped", 32, 17, 256, {**MAGVIT, WHOLE: 0}),
    Case("Magvit", 32, 17, 256, MAGVIT),
    Case("CogVideoX", 32, 17, 256, MAGVIT),
)
# The same decoder and picture, and the budget of both lengths.
LENGTHS, SHORT_SIDE, SHORT_BUDGET = (17, 97), 96, 128 << 20


def main() -> None:
    """Measure what is missing."""
    options = row_parser(__doc__, pairs=2).parse_args()
    results = ResultFile(
        "video_vae",
        fresh=options.fresh,
        packages=("diffusers",),
        about="Video autoencoders in bands: memory, processor seconds and error.",
    )
    for case in CASES:
        if options.only in case.title:
            measure_peaks(results, case)
            measure_times(results, case, options.pairs)
    for frames in LENGTHS:
        row = f"Wan of width 32, {frames} frames of {SHORT_SIDE}², {FRAMES_OUTSIDE}, length"
        if options.only in row and not results.has(row):
            figures = peak("Wan", 32, FRAMES_OUTSIDE, frames, SHORT_SIDE, SHORT_BUDGET)
            results.add(row, part="length", **figures)


def peak(model: str, width: int, way: str, frames: int, side: int, budget: int) -> dict[str, Any]:
    """Memory of one decode in a fresh process."""
    given = model, width, way, frames, side, budget
    usage = measure_in_subprocess("video_vae_runs:run_once", *given, warmups=1)
    return {
        "model": model,
        "width": width,
        "way": way,
        "frames": frames,
        "side": side,
        "budget_bytes": budget,
        "peak_bytes": usage.peak_bytes,
        "high_water_bytes": usage.high_water_bytes,
        "peak_heap": usage.allocator,
        **usage.result,
    }


def measure_peaks(results: ResultFile, case: Case) -> None:
    """A row for each way that has none; the plain one comes first, whose parts the budgets are."""
    for way, row in case.rows.items():
        if not results.has(row):
            budget = 0 if way == PLAIN else case.budgets(results)[way]
            figures = peak(case.model, case.width, way, case.frames, case.side, budget)
            results.add(row, part="decode", **figures)


def measure_times(results: ResultFile, case: Case, pairs: int) -> None:
    """Processor seconds and errors of all ways, added to their rows."""
    if all("cpu_s" in results.row(row) for row in case.rows.values()):
        return
    given = case.model, case.width, case.frames, case.side
    budgets = case.budgets(results)
    options: dict[str, Any] = {"env": HEAP_TO_1GIB}
    times = measure_in_subprocess("video_vae_runs:run_times", *given, budgets, pairs, **options)
    for way, figures in times.result.items():
        results.complete(case.rows[way], time_heap="blocks below 1 GiB are kept", **figures)
    own = measure_in_subprocess("video_vae_runs:own_difference", *given, **options)
    results.complete(case.rows[PLAIN], fp64_difference=own.result)


if __name__ == "__main__":
    main()
