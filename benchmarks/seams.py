"""Seams of tiles of a window transformer, blended and not, compared with bands.

    LOWTIDE_DATA=... python benchmarks/seams.py [--fresh]

`lowtide bench upscale --seams` with a trained CRAFT on the middle of the example photograph.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common import ResultFile
from photographs import EXAMPLE

from lowtide.jobs.bench_seams import compare_seams

TILE = 128


def main() -> None:
    """Measure all rows, or none where they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "seams",
        fresh=options.fresh,
        about=f"CRAFT ×4 in tiles of {TILE} against the whole: blending and overlap.",
    )
    if results.data["rows"]:
        return
    model = Path(os.environ["LOWTIDE_DATA"]) / "models" / "craft_x4.pth"
    report = compare_seams(EXAMPLE, model=str(model), device="cpu", tile=TILE)
    for row in report.rows:
        results.add(
            f"{row.blend}, {row.overlap}",
            width=report.width,
            height=report.height,
            tile=report.tile,
            **row.model_dump(),
        )


if __name__ == "__main__":
    main()
