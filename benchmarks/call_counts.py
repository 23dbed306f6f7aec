"""Files of Lowtide entered, and calls made in them, by one warm upscale of a small image.

python benchmarks/call_counts.py [--top N] [--fresh]

A call is what `sys.setprofile` reports as one: a function, a comprehension where it has a frame,
and each time that a generator goes on. The thread that samples memory is left out: it follows
the clock.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyvips
from common import ResultFile

import lowtide

MODEL, WIDTH, HEIGHT = "lowtide-x2", 256, 192
_ROOT = Path(lowtide.__file__).parent


def count_calls(folder: Path) -> Counter[tuple[str, str]]:
    """Calls by file and function in the second upscale of a process."""
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    pyvips.Image.new_from_array(pixels).write_to_file(str(folder / "image.png"))
    calls: Counter[tuple[str, str]] = Counter()

    def profile(frame: Any, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{_ROOT}/"):
            calls[code.co_filename, code.co_qualname] += 1

    lowtide.upscale(folder / "image.png", folder / "cold.png", model=MODEL)
    sys.setprofile(profile)
    try:
        lowtide.upscale(folder / "image.png", folder / "warm.png", model=MODEL)
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    """Count once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", type=int, default=0, metavar="N", help="print N most called")
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE"] = f"{folder}/cache"  # past runs would add calls
        calls = count_calls(Path(folder))
    for (file, name), count in calls.most_common(given.top):
        print(f"{count:5}  {Path(file).relative_to(_ROOT)}  {name}")
    files = len({file for file, _ in calls})
    results = ResultFile("call_counts", about="Size of one warm upscale.", fresh=given.fresh)
    row = f"{MODEL}, {WIDTH}×{HEIGHT}, warm"
    if not results.has(row):
        results.add(row, files=files, calls=calls.total())


if __name__ == "__main__":
    main()
