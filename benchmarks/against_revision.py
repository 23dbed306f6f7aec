"""Time, memory and results of this checkout and of an earlier revision, in the same minutes.

    LOWTIDE_DATA=... python benchmarks/against_revision.py REVISION [--only TEXT] [--pairs 1]

Each case is run by either revision in a process of its own, by what both offer publicly, one after
the other and in reverse order the next time. Streamed cases get the same budget; their capture and
planning are not in the times. Times are processor seconds, peaks those of anonymous memory above
the loaded libraries and model, in a heap that gives large blocks back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import HEAP_KEEPS_SMALL, ResultFile

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
# Name, model, height, width, and the budget of a streamed case in bytes; None is a whole run.
CASES = (
    ("HAT 384×512, streamed", "HAT", 384, 512, 1420 * MIB),
    ("DRCT 384×512, streamed", "DRCT", 384, 512, 855 * MIB),
    ("SwinIR 384×512, streamed", "SwinIR", 384, 512, 573 * MIB),
    ("CRAFT 384×512, streamed", "CRAFT", 384, 512, 295 * MIB),
    ("VAE decode 1024×1024, streamed", "VAE decode", 1024, 1024, 2498 * MIB),
    ("DRCT 128×128, whole", "DRCT", 128, 128, None),
    ("HAT 128×128, whole", "HAT", 128, 128, None),
    ("SwinIR 128×128, whole", "SwinIR", 128, 128, None),
)

# What either revision runs: nothing but public calls, which both have.
CHILD = """
import json, os, sys, tempfile, time
import torch
sys.path.insert(0, sys.argv[1])
import lowtide
from streaming_models import made, given

name, height, width, budget, result = sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]
model, image = made(name), given(name, height, width)
smallest = 0
if budget:
    try:
        lowtide.stream(model, budget=MIB).prepare(image)
    except lowtide.BudgetError as error:
        smallest = error.smallest or 0
    run = lowtide.stream(model, budget=budget)
    run.prepare(image)
else:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pth")
        torch.save(model.state_dict(), path)
        run = lowtide.load(path)
    run(image[..., :32, :32])

def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) << 10

with torch.inference_mode():
    open("/proc/self/clear_refs", "w").write("5")
    before, start = status("VmRSS"), time.process_time()
    made_image = run(image)
    seconds, peak = time.process_time() - start, status("VmHWM") - before
torch.save(made_image, result)
print(json.dumps({"cpu_s": seconds, "peak_bytes": peak, "smallest_bytes": smallest}))
""".replace("MIB", str(MIB))


def run(source: Path, case: tuple, result: Path, cache: Path) -> dict[str, float]:
    """One run of a case by the package in ``source``."""
    _, model, height, width, budget = case
    words = [str(ROOT / "benchmarks"), model, height, width, budget or 0, result]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            **HEAP_KEEPS_SMALL,
            "PYTHONPATH": str(source),
            "LOWTIDE_CACHE": str(cache),
        },
    )
    if done.returncode:
        raise SystemExit(f"{case[0]}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: tuple, pairs: int, sources: dict[str, Path], folder: Path) -> dict:
    """The row of a case: figures of both, their ratios, and how far the results are apart."""
    import torch

    runs: dict[str, list] = {name: [] for name in sources}
    for number in range(pairs):
        for name in list(sources)[:: -1 if number % 2 else 1]:
            result = folder / f"{name}.pt"
            runs[name].append(run(sources[name], case, result, folder / f"cache-{name}"))
    now, before = (torch.load(folder / f"{name}.pt").double() for name in ("now", "before"))
    best = {
        name: {key: min(one[key] for one in done) for key in done[0]} for name, done in runs.items()
    }
    ratios = {
        f"{key}_ratio": round(best["now"][key] / best["before"][key], 3)
        for key in best["now"]
        if best["before"][key]
    }
    apart = float((now - before).abs().max() / before.abs().max())
    return {**runs, **ratios, "max_relative_difference": apart}


def main() -> None:
    """Compare what has no row yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("--only", default="")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="drop earlier rows")
    options = parser.parse_args()
    results = ResultFile(
        "against_revision",
        fresh=options.fresh,
        packages=("diffusers",),
        about=f"This checkout against {options.revision}: processor seconds, memory and results.",
        environments="any",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = folder / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), options.revision], check=True)
        try:
            sources = {"before": tree / "src", "now": ROOT / "src"}
            for case in CASES:
                if options.only in case[0] and not results.has(case[0]):
                    results.add(case[0], **compare(case, options.pairs, sources, folder))
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


if __name__ == "__main__":
    main()
