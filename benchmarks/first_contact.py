"""One picture from command to file, with nothing known about the model and with all of it.

    LOWTIDE_DATA=... python benchmarks/first_contact.py [--only TEXT] [--pairs 3] [--fresh]

Processor seconds of whole processes on one thread, imports included, in the order A B C C B A. The
first run has an empty cache folder, and the later one that of the first. The plain script is
``plain_script.py``. Rows of model files that LOWTIDE_DATA does not hold are left out.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ResultFile, in_turns, ratio_of, row_parser
from photographs import as_array, photograph

PLAIN = Path(__file__).parent / "plain_script.py"


@dataclass(frozen=True)
class Row:
    """A picture's size and a model; ``plain`` is how the plain script runs it, if it can."""

    width: int
    height: int
    model: str
    plain: str | None = None


ROWS = {
    "lowtide-x2, 300×200": Row(300, 200, "lowtide-x2"),
    "Compact ×4, 512×384": Row(512, 384, "realesr_animevideov3_x4.pth", "tiles"),
    "CRAFT ×4, 300×200": Row(300, 200, "craft_x4.pth", "whole"),
}


def cpu_seconds(command: list[str], cache: Path) -> float:
    """Processor seconds of a process and its children."""
    before = os.times()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOWTIDE_CACHE": str(cache)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = os.times()
    spent = after.children_user + after.children_system
    return round(spent - before.children_user - before.children_system, 2)


def measure(row: Row, model: str, pairs: int) -> dict[str, Any]:
    """Medians and ratios of one row."""
    runs: dict[str, list[float]] = {"first": [], "later": []}
    if row.plain:
        runs["plain"] = []
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        source = photograph(at / "photo.png", row.width, row.height)
        targets = {way: at / f"{way}.png" for way in runs}
        known = at / "known"

        def command(way: str) -> list[str]:
            files = [str(source), str(targets[way])]
            if way == "plain":
                return [sys.executable, str(PLAIN), *files, model, str(row.plain)]
            upscale = [sys.executable, "-m", "lowtide", "upscale", files[0], "-o", files[1]]
            return [*upscale, "-m", model, "--force"]

        for way in runs:  # files are read from disk once, and later runs know the costs
            cpu_seconds(command(way), known)
        for number, way in in_turns(runs, pairs):
            cache = at / f"empty {number}" if way == "first" else known
            runs[way].append(cpu_seconds(command(way), cache))
        figures: dict[str, Any] = {
            f"{way}_cpu_s": statistics.median(seconds) for way, seconds in runs.items()
        }
        if row.plain:
            for way in ("first", "later"):
                figures[f"{way}_ratio"] = ratio_of(runs[way], runs["plain"])
            pictures = [as_array(targets[way]).astype(int) for way in ("later", "plain")]
            figures["largest_difference_of_255"] = int(np.abs(pictures[0] - pictures[1]).max())
    return {"pairs": pairs, **figures}


def main() -> None:
    """Measure the rows that are missing."""
    options = row_parser(__doc__, pairs=3).parse_args()
    about = "One picture from command to file: processor seconds of the whole process, one thread."
    results = ResultFile("first_contact", about=about, fresh=options.fresh)
    models = Path(os.environ.get("LOWTIDE_DATA", "")) / "models"
    for name, row in ROWS.items():
        file = models / row.model
        if options.only not in name or results.has(name):
            continue
        if row.plain and not file.is_file():
            print(f"{name}: no {row.model} in LOWTIDE_DATA", file=sys.stderr)
            continue
        results.add(name, **measure(row, str(file) if row.plain else row.model, options.pairs))


if __name__ == "__main__":
    main()
