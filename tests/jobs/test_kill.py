"""A folder job killed with SIGKILL at random moments ends as an undisturbed one."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import lowtide
from lowtide.jobs.engine.journal import JOURNAL_NAME
from support.image_folders import files_of

BUDGET, TILE = "256MiB", 64


def command(source: Path, target: Path) -> list[str]:
    options = ["--budget", BUDGET, "--tile", str(TILE)]
    return [sys.executable, "-m", "lowtide", "upscale", str(source), "-o", str(target), *options]


def make_folder(folder: Path, photo: np.ndarray, count: int, save) -> None:
    """Crops of a photograph in several sizes and formats, some in subfolders."""
    generator = random.Random(0)
    for index in range(count):
        height, width = generator.randint(70, 380), generator.randint(70, 580)
        top, left = generator.randint(0, 400 - height), generator.randint(0, 600 - width)
        name = f"{'deep/' * (index % 3)}photo{index:02}.{('png', 'jpg', 'tif')[index % 3]}"
        save(folder / name, photo[top : top + height, left : left + width])


def finished(folder: Path) -> dict[str, int]:
    """Files that the journal calls done, with the time they got their content."""
    journal = folder / JOURNAL_NAME
    lines = journal.read_text().splitlines() if journal.exists() else []
    names = []
    for line in lines:
        try:
            names.append(json.loads(line).get("done"))
        except json.JSONDecodeError:
            continue
    return {name: (folder / name).stat().st_mtime_ns for name in names if name}


def kill_while_running(words: list[str], delay: float) -> bool:
    """Start the job, wait until it works on an image and ``delay`` longer, then kill it."""
    job = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert job.stderr is not None
    for line in job.stderr:
        if line.startswith("["):
            break
    time.sleep(delay)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    return job.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("images", "kills"), [(6, 2), pytest.param(40, 20, marks=pytest.mark.slow)]
)
def test_killed_and_restarted_equals_undisturbed(tmp_path, photo, save, images, kills):
    source, calm, disturbed = tmp_path / "in", tmp_path / "calm", tmp_path / "disturbed"
    make_folder(source, photo, images, save)
    lowtide.upscale(source, calm, budget=BUDGET, tile=TILE).raise_for_failures()

    generator = random.Random(images)
    landed, before = 0, {}
    for _ in range(kills):
        landed += kill_while_running(command(source, disturbed), generator.uniform(0, 0.5))
        now = finished(disturbed)
        assert before.items() <= now.items(), "finished work was done again"
        before = now
    done = subprocess.run(command(source, disturbed), check=True, capture_output=True, text=True)

    assert landed >= kills * 0.7, "most kills must hit a running job"
    assert before.items() <= finished(disturbed).items()
    assert done.stdout.count("already finished, skipped") >= len(before)
    assert files_of(disturbed) == files_of(calm)
    assert len(files_of(calm)) == images


# Ends itself like `kill -9` at the so-manieth time that a file of the output folder is opened,
# renamed or removed, or in the middle of the so-manieth line of the journal.
FALLING = """
import os, signal, sys
from lowtide.cli.main import main
at, folder = int(sys.argv[1]), sys.argv[2]
count, write = 0, os.write

def due():
    global count
    count += 1
    return count == at

def heard(event, args):
    if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(folder) and due():
        os.kill(os.getpid(), signal.SIGKILL)

def torn(descriptor, data):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("journal.jsonl") and due():
        write(descriptor, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, data)

sys.addaudithook(heard)
os.write = torn
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sees descriptors as Linux has them")
@pytest.mark.parametrize(
    ("images", "kills"), [(2, 2), pytest.param(12, 20, marks=pytest.mark.slow)]
)
def test_killed_while_a_journal_is_written_or_a_result_gets_its_name(
    tmp_path, photo, save, images, kills
):
    source, calm, disturbed = tmp_path / "in", tmp_path / "calm", tmp_path / "disturbed"
    for number in range(images):
        save(source / f"{number:02}.png", photo[number : number + 30, :40])
    subprocess.run(command(source, calm), check=True, capture_output=True)
    theirs = {
        ".00.png.lowtide.part": b"theirs",
        ".0123456789abcdef.00.png.lowtide.part": b"also theirs",
    }
    for name, data in theirs.items():
        (disturbed / name).parent.mkdir(exist_ok=True)
        (disturbed / name).write_bytes(data)

    generator, landed = random.Random(kills), 0
    words = [sys.executable, "-c", FALLING]
    for _ in range(kills):
        moment = str(generator.randint(1, 8))
        job = subprocess.run(
            [*words, moment, str(disturbed), *command(source, disturbed)[3:]], capture_output=True
        )
        assert job.returncode in (0, -signal.SIGKILL), job.stderr
        landed += job.returncode != 0
    assert landed >= kills * 0.7, "most kills must hit a running job"
    subprocess.run(command(source, disturbed), check=True, capture_output=True)

    assert files_of(disturbed) == {**files_of(calm), **theirs}
    lines = (disturbed / JOURNAL_NAME).read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["pin"] + ["done"] * images
