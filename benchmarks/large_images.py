"""24 and 96 megapixels, twice as large in 1 GiB: memory must not grow with the image.

python benchmarks/large_images.py [--device cpu] [--budget 1GiB] [--fresh]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import ResultFile
from photographs import photograph
from tile_loop import MODEL, run

SIZES = {"24 megapixels": (6000, 4000), "96 megapixels": (12000, 8000)}


def measure(width: int, height: int, device: str, budget: str) -> dict:
    """One size, after a small image for which the model's costs are measured."""
    with tempfile.TemporaryDirectory() as folder:
        small = photograph(Path(folder) / "small.jpg", 600, 400)
        run("lowtide", small, Path(folder) / "small.png", f"device={device}")
        source = photograph(Path(folder) / "photo.jpg", width, height)
        target = Path(folder) / "photo.png"
        figures = run("lowtide", source, target, f"budget={budget}", f"device={device}")
    return {"width": width, "height": height, "budget": budget, **figures}


def main() -> None:
    """One row for each size, and one for their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    name = "large_images" if options.device == "cpu" else "large_images_gpu"
    results = ResultFile(
        name,
        about=f"Photographs x2 with {MODEL} under --budget {options.budget}, JPEG to PNG.",
        fresh=options.fresh,
    )
    for row, size in SIZES.items():
        if not results.has(row):
            results.add(row, **measure(*size, options.device, options.budget))
    if not results.has("ratio"):
        results.add_growth("ratio", *SIZES)


if __name__ == "__main__":
    main()
