"""Jobs in a Python process that sets nothing about its heap, and what jobs leave of its settings.

Each runs in processes of its own: the heap is that of a whole process.
"""

import json
import os
import platform
import subprocess
import sys

import pytest

from support.small_plans import MIB

GLIBC = platform.libc_ver()[0] == "glibc"
pytestmark = pytest.mark.skipif(not GLIBC, reason="only glibc's heap is known as it comes")

# Upscales a folder; prints what became of each picture, by which plan, and the budget for all.
FOLDER = """
import json, sys
import lowtide
from lowtide.core.heap import tune_heap
source, target, budget, *before = sys.argv[1:]
if "tuned" in before:
    tune_heap()
if "torch in use" in before:
    import torch
    torch.nn.functional.conv2d(torch.rand(1, 32, 512, 512), torch.rand(32, 32, 3, 3))
report = lowtide.upscale(source, target, model="lowtide-x2", budget=budget, force=True)
try:
    report.raise_for_failures()
except lowtide.BudgetError as error:
    print(json.dumps({"needed": error.smallest}))
else:
    print(json.dumps({
        "titles": [image.plan.title for image in report.images],
        "uppers": [image.plan.upper_bytes for image in report.images],
        "kept": [image.memory.within_budget for image in report.images],
    }))
"""
# Upscales a picture in one mode of the heap, and tells which one is in effect after it.
ONE_PICTURE = """
import sys
import lowtide
from lowtide.core.heap import set_heap_mode, tune_heap
from lowtide.memory.process_memory import anonymous_bytes
source, target, found, used = sys.argv[1:]
tune_heap(); set_heap_mode(found)
options = {"model": "lowtide-x2", "strategy": "whole", "budget": "1GiB"}
if used == "trim":  # the smallest plan
    plan = lowtide.plan(source, target, **options).images[0].plan
    options["budget"] = plan.pareto_front[0].upper_bytes
report = lowtide.upscale(source, target, **options)
start = anonymous_bytes()
pieces = [bytearray(8 << 20) for _ in range(8)]
for piece in pieces:
    piece[::4096] = bytes([1]) * 2048
del pieces, piece
kept = anonymous_bytes() - start > 40 << 20
print(report.images[0].plan.heap, "cache" if kept else "trim")
"""
# All of different sizes, (height, width).
SIZES = [(100, 97), (81, 64), (72, 119)]


@pytest.fixture
def folder(tmp_path, save, photo):
    for index, (height, width) in enumerate(SIZES):
        save(tmp_path / "in" / f"{index}.png", photo[: 2 * height, : 2 * width])
    return tmp_path / "in"


@pytest.fixture
def run(tmp_path):
    """Run a program with an empty cache of the test's own, on some threads."""

    def program(code, *words, threads=1):
        kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
        settings = {"LOWTIDE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            capture_output=True,
            text=True,
            env=kept | settings,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return program


def test_a_folder_is_planned_equally_whatever_ran_before(folder, tmp_path, run):
    """Else the same call is refused on one day and works on another."""
    first = json.loads(run(FOLDER, folder, tmp_path / "first", "48MiB"))
    assert all(first["kept"])
    assert len(first["kept"]) == len(SIZES)
    again = json.loads(run(FOLDER, folder, tmp_path / "first", "48MiB", threads=2))
    elsewhere = json.loads(run(FOLDER, folder, tmp_path / "other", "48MiB", "torch in use"))
    # The command line's heap has other plans, which an equal folder of files does not pass on.
    tuned = json.loads(run(FOLDER, folder, tmp_path / "tuned", "48MiB", "tuned"))
    after = json.loads(run(FOLDER, folder, tmp_path / "tuned", "48MiB"))
    assert all(tuned["kept"])
    for other in (again, elsewhere, after):
        assert (other["titles"], other["kept"]) == (first["titles"], first["kept"])


@pytest.mark.slow  # plans bands, then with an empty cache and with a full one
def test_the_budget_that_a_refused_folder_names_works_at_once_and_later(folder, tmp_path, run):
    refused = json.loads(run(FOLDER, folder, tmp_path / "out", "2MiB"))
    assert json.loads(run(FOLDER, folder, tmp_path / "out", "2MiB")) == refused
    needed = refused["needed"]
    assert needed < 40 * MIB
    for _ in range(2):
        done = json.loads(run(FOLDER, folder, tmp_path / "out", needed))
        assert all(done["kept"])
        assert len(done["kept"]) == len(SIZES)


@pytest.mark.parametrize("found", ["cache", "trim"])
@pytest.mark.parametrize("used", ["cache", "trim"])
def test_a_job_leaves_the_heap_as_it_found_it(source, tmp_path, run, found, used):
    """So what a training plans for holds after a validation."""
    assert run(ONE_PICTURE, source, tmp_path / "a.png", found, used).split() == [used, found]
