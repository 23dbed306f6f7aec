"""What usual recipes do to the decode of a video autoencoder, on a CPU.

    python benchmarks/video_vae_recipes.py [--only TEXT] [--pairs 3] [--fresh]

A `VideoVAE` of the shape of SeedVR2's with random weights decodes 17 frames of 128 × 128 in fp32 on
one thread. Peaks are those of a second call in a fresh process, above its start and with the
result, in a heap that returns freed memory; times are processor seconds of all recipes in one
process, one after another and in reverse order, in a heap that keeps blocks below 1 GiB. Errors are
next to the decode in slices of one latent, whose own difference from the whole clip is a row. The
last row is of the four phases of a restoration, whose network is small and random.
"""

from __future__ import annotations

from common import HEAP_TO_1GIB, ResultFile, row_parser
from subprocess_run import measure_in_subprocess
from video_vae_recipes_runs import RECIPES, SLICED

PHASES = "four phases"


def main() -> None:
    """Measure each row that is not there yet."""
    options = row_parser(__doc__, pairs=3).parse_args()
    results = ResultFile(
        "video_vae_recipes",
        about="Recipes for the decode of a video autoencoder: memory, processor seconds, error.",
        fresh=options.fresh,
    )
    for name in RECIPES:
        if options.only in name and not results.has(name):
            plain = results.row(SLICED)["peak_bytes"] if results.has(SLICED) else 0
            usage = measure_in_subprocess("video_vae_recipes_runs:run_once", name, plain, warmups=1)
            results.add(name, part="recipe", peak_bytes=usage.peak_bytes, **usage.result)
    recipes = [name for name in RECIPES if results.has(name)]
    if len(recipes) == len(RECIPES) and any("cpu_s" not in results.row(one) for one in recipes):
        plain = results.row(SLICED)["peak_bytes"]
        given = plain, options.pairs
        times = measure_in_subprocess("video_vae_recipes_runs:run_times", *given, env=HEAP_TO_1GIB)
        for name, figures in times.result.items():
            results.complete(name, **figures)
    if options.only in PHASES and not results.has(PHASES):
        phases = measure_in_subprocess(
            "video_vae_recipes_runs:run_phases", options.pairs, env=HEAP_TO_1GIB
        )
        results.add(PHASES, part="phases", **phases.result)


if __name__ == "__main__":
    main()
