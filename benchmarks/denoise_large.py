"""Photographs of 2 and 24 megapixels denoised in 1 GiB, and the result next to the whole run's.

    python benchmarks/denoise_large.py [--budget 1GiB] [--fresh]

Gaussian noise of a sigma of 25, unclipped, float32 TIFF to TIFF with the level given: the size of
results is then that of rounding. A fresh process for each row; what the model costs was learned
before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyvips
from common import ResultFile
from photographs import as_array, photograph
from tile_loop import run

from lowtide.core.philox import philox_generator

MODEL, SIGMA = "lowtide-denoise", 25
SMALL, LARGE = (1730, 1156), (6000, 4000)
# Size, budget if it is not the option's, and other words. In 1 GiB two megapixels run as a whole,
# so that bands are compared in less.
ROWS: dict[str, tuple[tuple[int, int], str, tuple[str, ...]]] = {
    "2 megapixels": (SMALL, "", ()),
    "2 megapixels, streamed": (SMALL, "384MiB", ("strategy=streamed",)),
    "24 megapixels": (LARGE, "", ()),
}


def noisy(folder: Path, width: int, height: int) -> Path:
    """A noisy photograph, float32 TIFF."""
    clean = as_array(photograph(folder / f"clean_{width}.tif", width, height))
    noise = philox_generator(0, 2, SIGMA, 0).standard_normal(clean.shape, np.float32)
    noise *= np.float32(SIGMA / 255)
    noise += clean * np.float32(1 / 255)
    path = folder / f"noisy_{width}.tif"
    pyvips.Image.new_from_array(noise).write_to_file(str(path))
    return path


def measure(folder: Path, size: tuple[int, int], *words: str) -> dict[str, Any]:
    """The figures of one run, and the largest difference from the whole image's of 2 megapixels."""
    sigma = f"sigma={SIGMA}"
    run("denoise", noisy(folder, 300, 200), folder / "tiny.tif", sigma, model=MODEL)
    source, target, whole = noisy(folder, *size), folder / "result.tif", folder / "whole.tif"
    figures = run("denoise", source, target, sigma, *words, model=MODEL)
    if size == SMALL:
        run("denoise", source, whole, sigma, "strategy=whole", model=MODEL)
        figures["difference"] = float(np.abs(as_array(target) - as_array(whole)).max())
    return figures


def main() -> None:
    """One row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "denoise_large",
        fresh=options.fresh,
        about=f"{MODEL} on float32 TIFF files under --budget {options.budget}.",
    )
    with tempfile.TemporaryDirectory() as place:
        for name, (size, less, words) in ROWS.items():
            budget = less or options.budget
            if not results.has(name):
                figures = measure(Path(place), size, f"budget={budget}", *words)
                results.add(name, width=size[0], height=size[1], budget=budget, **figures)


if __name__ == "__main__":
    main()
