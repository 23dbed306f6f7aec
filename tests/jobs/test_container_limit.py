"""A real container: the job is done, or refused by name, and the kernel never ends it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.core.units import MIB

pytestmark = pytest.mark.slow
COFFEE = Path(__file__).parents[2] / "examples/coffee.jpg"


def own_group() -> tuple[Path, str]:
    """Folder of this process's group of memory, and the name of its limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    base = Path("/sys/fs/cgroup")
    for _number, controllers, path in lines:
        if "memory" in controllers.split(","):
            return base / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return base / lines[0][2].lstrip("/"), "memory.max"


@pytest.fixture
def container():
    """Run a command in a container of some bytes."""
    if not sys.platform.startswith("linux"):
        pytest.skip("wants control groups of Linux")
    parent, limit = own_group()
    group = parent / f"lowtide-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"may not make control groups: {error}")

    def run(most_bytes, command, **more):
        (group / limit).write_text(str(most_bytes))
        enter = f"echo $$ > {group}/cgroup.procs && exec "
        words = ["sh", "-c", enter + '"$@"', "sh", sys.executable, "-m", "lowtide", *command]
        return subprocess.run(list(map(str, words)), capture_output=True, text=True, **more)

    yield run
    for _ in range(50):
        with contextlib.suppress(OSError):
            group.rmdir()
            break
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("mebibytes", "done"), [(250, False), (340, False), (400, True), (500, True), (700, True)]
)
def test_a_bundled_model(container, tmp_path, monkeypatch, mebibytes, done):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    for _use in ("first", "later"):
        target = tmp_path / "x2.png"
        run = container(mebibytes * MIB, ["upscale", COFFEE, "-o", target, "--force"])
        assert run.returncode == (0 if done else 3), run.stderr
        assert target.exists() == done
        assert done or ("error: " in run.stderr and "hint: " in run.stderr)


@pytest.mark.parametrize(
    ("mebibytes", "done"), [(350, False), (450, False), (550, True), (700, True)]
)
def test_a_model_that_is_not_known(container, unmeasured, tmp_path, monkeypatch, mebibytes, done):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    for _use in ("first", "later"):
        target = tmp_path / "x2.png"
        command = ["upscale", COFFEE, "-o", target, "-m", unmeasured, "--force"]
        run = container(mebibytes * MIB, command)
        assert run.returncode == (0 if done else 3), run.stderr
        assert target.exists() == done
        assert done or ("libraries" in run.stderr and "raise that limit" in run.stderr)


def test_a_larger_budget_than_the_container_leaves(container, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    words = ["upscale", COFFEE, "-o", tmp_path / "x.png", "--budget", "2GiB"]
    run = container(420 * MIB, words)
    assert run.returncode == 0, run.stderr
    assert "is left of 420 MiB by the memory limit of the container" in " ".join(run.stdout.split())


@pytest.mark.parametrize(("mebibytes", "code"), [(400, 3), (650, 3), (900, 3), (1300, 0)])
def test_a_process_for_each_device(container, tmp_path, monkeypatch, mebibytes, code):
    """Each has its own libraries."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / f"in/{name}.jpg").write_bytes(COFFEE.read_bytes())
    words = ["upscale", tmp_path / "in", "-o", tmp_path / "out", "--devices", "cpu,cpu"]
    run = container(mebibytes * MIB, words)
    assert run.returncode == code, run.stderr
    assert code == 0 or "hint: " in run.stderr
