"""Signals that ask a command to end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals as Unix has them")

CONFIG = """\
name: run
scale: 2
datasets: {train: {dataroot_gt: [photos], lq_size: 8, batch_size_per_gpu: 2}}
network_g: {type: paragonconv, features: 8, blocks: 1}
train: {total_iter: 1000000}
logger: {print_freq: 1, save_checkpoint_freq: 1000000}
"""


def heed_signals() -> None:
    """Not to ignore what the tests were told to ignore, as by nohup."""
    for one in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """Start `lowtide WORDS` as a process of its own, which ends with the test."""
    started = []

    def begin(*words, before=()):
        command = [*before, sys.executable, "-m", "lowtide", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        made = subprocess.Popen(command, cwd=tmp_path, preexec_fn=heed_signals, **pipes)
        started.append(made)
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


@pytest.fixture
def photos(tmp_path, save):
    save(tmp_path / "photos" / "a.png", np.full((48, 48, 3), 99, np.uint8))
    (tmp_path / "run.yml").write_text(CONFIG)
    return tmp_path


def wait_for(process, done) -> None:
    end = time.monotonic() + 120
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_command_that_imports_its_libraries_ends_with_an_error(start, photos, name, code):
    process = start("upscale", "photos/a.png", "-o", "out.png")
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        pytest.skip("sees libraries as Linux has them")
    # PyTorch's libraries are loaded long before all of it is imported.
    wait_for(process, lambda: "libtorch" in maps.read_text())
    process.send_signal(getattr(signal, name))
    said, _ = process.communicate()
    assert process.returncode == code
    assert said.startswith("error: interrupted")
    assert "Traceback" not in said


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_training_saves_its_step_and_resumes(start, photos, name, code):
    process = start("train", "sr", "run.yml", "-o", "runs", "-q")
    log = photos / "runs" / "run" / "log.jsonl"
    wait_for(process, lambda: log.exists() and len(log.read_bytes().splitlines()) > 2)
    process.send_signal(getattr(signal, name))
    process.send_signal(getattr(signal, name))  # as of a system that asks a group and each process
    said, _ = process.communicate()
    assert (process.returncode, "Traceback" in said) == (code, False), said
    (state,) = (photos / "runs" / "run" / "training_states").iterdir()
    assert int(state.stem) >= 2
    assert not list(photos.rglob("*.part")) and not list(photos.rglob(".lowtide-lock"))


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cpu,cpu", marks=pytest.mark.slow)])
def test_a_folder_is_left_clean_and_resumes(start, tmp_path, save, devices):
    for number in range(4):
        save(tmp_path / "in" / f"{number}.png", np.full((200, 300, 3), number, np.uint8))
    words = "upscale", "in", "-o", "out", "-q", "--devices", devices
    process = start(*words)
    wait_for(process, lambda: list(tmp_path.glob("out/.*.part")))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert not list(tmp_path.glob("out/.*.part"))
    again = start(*words)
    said, _ = again.communicate()
    assert again.returncode == 0, said
    assert len(list(tmp_path.glob("out/*.png"))) == 4


def test_a_signal_that_is_ignored_stays_ignored(start, photos):
    pytest.importorskip("pandas")
    rows = [f"2026-01-{day + 1:02} {hour:02}:00,{hour}" for day in range(9) for hour in range(24)]
    (photos / "table.csv").write_text("\n".join(["date,y", *rows, ""]))
    trap = ["sh", "-c", "trap '' INT TERM HUP; exec \"$@\"", "sh"]
    process = start("forecast", "table.csv", "--horizon", "4", "-o", "out.csv", before=trap)
    time.sleep(1)
    for one in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        process.send_signal(one)
    assert "written: out.csv" in process.communicate()[0]
    assert process.returncode == 0
