"""A 64-megapixel image streamed to disk, twice as large, in 1 GiB, beside one of 4 megapixels.

    python benchmarks/large_streamed.py [--budget 1GiB] [--fresh]

A Compact model (64 channels, 16 convolutions, x2, fixed random weights), uncompressed TIFF to TIFF,
by ``--strategy streamed``. A fresh process for each size; what the model costs was learned before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import ResultFile
from photographs import photograph
from tile_loop import run

SIDES = (2048, 8192)


def compact(path: Path) -> str:
    """The model as a file."""
    from safetensors.torch import save_file
    from streaming_models import made

    state = made("Compact").state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return str(path)


def main() -> None:
    """One row for each size, and one for their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="1GiB")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "large_streamed", fresh=options.fresh,
        about=f"Compact x2 streamed under --budget {options.budget}, TIFF to TIFF.",
    )  # fmt: skip
    names = [f"{side}×{side}" for side in SIDES]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model, wanted = compact(place / "compact.safetensors"), f"budget={options.budget}"
        small = photograph(place / "small.tif", 512, 512)
        run("lowtide", small, place / "out.tif", wanted, "strategy=streamed", model=model)
        for name, side in zip(names, SIDES, strict=True):
            if not results.has(name):
                source = photograph(place / "photo.tif", side, side)
                figures = run(
                    "lowtide", source, place / "result.tif", wanted, "strategy=streamed",
                    model=model,
                )  # fmt: skip
                results.add(name, width=side, height=side, budget=options.budget, **figures)
    if not results.has("ratio"):
        results.add_growth("ratio", *names)


if __name__ == "__main__":
    main()
