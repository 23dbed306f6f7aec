"""A limit of the system on a run's memory: it goes on smaller, or ends with Lowtide's error."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lowtide.core.units import MIB

pytestmark = pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="wants Linux, which can limit a running process"
)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("limit") / "picture.png"
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    Image.fromarray(noise).resize((900, 700)).save(path)
    return path


def upscale(picture: Path, target: Path, more_bytes: int) -> tuple[int, str]:
    """Exit code and stderr of a run that may have so many bytes more once it has begun."""
    command = [sys.executable, "-m", "lowtide", "upscale", picture, "-o", target]
    with subprocess.Popen(
        [*map(str, command), "--budget", "2GiB"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "starting" in line:
                status = Path(f"/proc/{process.pid}/status").read_text()
                used = int(status.split("VmData:")[1].split()[0]) * 1024
                limit = used + more_bytes, resource.RLIM_INFINITY
                resource.prlimit(process.pid, resource.RLIMIT_DATA, limit)
    return process.returncode, "".join(lines)


# PyTorch 2.8's oneDNN goes on with a kernel that it had no memory to generate.
LEAST = pytest.param(
    25, marks=pytest.mark.skipif(torch.__version__ < "2.11", reason="ends PyTorch 2.8's process")
)


@pytest.mark.parametrize("more", [LEAST, 50, 75])
def test_a_limit_while_it_runs(picture, tmp_path, more):
    target = tmp_path / "large.png"
    code, text = upscale(picture, target, more * MIB)
    if code:
        assert code == 1, text  # not killed by a signal
        assert "error: " in text
        assert not list(tmp_path.iterdir())
    else:
        with Image.open(target) as image:
            assert image.size == (1800, 1400)
            image.load()
    assert not code or more < 75, text


def test_an_encoder_without_room_for_its_threads(tmp_path):
    """libvips would end the process."""
    code = """
import resource, sys
from lowtide import OutOfMemoryError
from lowtide.media.image_info import ImageInfo
from lowtide.media.image_sink import open_sink
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + (12 << 20), resource.RLIM_INFINITY))
try:
    open_sink(sys.argv[1], ImageInfo(64, 64, 3, "uint8"))
except OutOfMemoryError as error:
    print(error, error.hint)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.png"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "there is no memory for its encoder" in run.stdout
    assert "ulimit -d" in run.stdout
    assert not list(tmp_path.iterdir())
