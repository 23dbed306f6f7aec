"""A 64-megapixel image streamed to disk, twice as large, in 1 GiB, and one of 4 megapixels.

    python benchmarks/large_streamed.py [--budget 1GiB] [--fresh]

A Compact model (64 channels, 16 convolutions, x2, fixed random weights), uncompressed TIFF to TIFF,
in bands and in tiles. A fresh process for each size; what the model costs was learned before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import ResultFile
from photographs import photograph
from tile_loop import run

SIDES = (2048, 8192)
WAYS = {"streamed": "streamed", "in tiles": "tiled"}


def compact(path: Path) -> str:
    """The model as a file."""
    from safetensors.torch import save_file
    from streaming_models import made

    state = made("Compact").state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return str(path)


def main() -> None:
    """One row for each way and size, and one for their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "large_streamed",
        fresh=options.fresh,
        about=f"Compact x2 streamed under --budget {options.budget}, TIFF to TIFF.",
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model, wanted = compact(place / "compact.safetensors"), f"budget={options.budget}"
        small = photograph(place / "small.tif", 512, 512)
        for way, strategy in WAYS.items():
            run(
                "lowtide",
                small,
                place / f"{strategy}.tif",
                wanted,
                f"strategy={strategy}",
                model=model,
            )
            for side in SIDES:
                name = f"{side}×{side}, {way}"
                if results.has(name):
                    continue
                source = photograph(place / "photo.tif", side, side)
                figures = run(
                    "lowtide",
                    source,
                    place / "result.tif",
                    wanted,
                    f"strategy={strategy}",
                    model=model,
                )
                results.add(
                    name, way=way, width=side, height=side, budget=options.budget, **figures
                )
            if not results.has(f"ratio, {way}"):
                results.add_growth(f"ratio, {way}", *(f"{side}×{side}, {way}" for side in SIDES))


if __name__ == "__main__":
    main()
