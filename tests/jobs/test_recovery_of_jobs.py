"""Memory that runs out in the middle of a job: the same picture, and a report of it."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import lowtide
from lowtide import OutOfMemoryError
from lowtide.jobs.images import job as image_job
from lowtide.jobs.images import prepare


class Cramped(torch.nn.Module):
    """The real network on a machine where more than ``limit`` pixels at once do not fit."""

    def __init__(self, body, limit):
        super().__init__()
        self.body, self.limit = body, limit

    def forward(self, x):
        if x.shape[0] * x.shape[2] * x.shape[3] > self.limit:
            torch.empty(1 << 60, dtype=torch.uint8)  # a real allocation that really fails
        return self.body(x)


@pytest.fixture
def cramp(monkeypatch):
    """Let jobs load the bundled model into a machine with too little memory."""

    def with_limit(limit):
        def load(name):
            model = lowtide.load(name)
            model.module = Cramped(model.module, limit)
            return model

        monkeypatch.setattr(prepare, "load", load)

    return with_limit


def test_the_image_is_the_same(source, tmp_path, read, crop, expected, cramp):
    cramp(70 * 70)
    report = lowtide.upscale(source, tmp_path / "out.png", budget="256MiB", strategy="whole")
    image = report.images[0]
    assert any("divided from here" in event for event in image.events)
    result = read(image.output).astype(int)
    assert np.abs(result - expected(crop)).max() <= 1


def test_batches_shrink_first(source, tmp_path, read, crop, expected, cramp):
    cramp(32 * 32 * 3)  # and a row of this picture has 6 tiles
    options = {"budget": "256MiB", "tile": 32, "tile_batch_size": 8}
    image = lowtide.upscale(source, tmp_path / "out.png", **options).images[0]
    assert image.events == ["out of memory: batch size 3 from here on"]
    assert np.abs(read(image.output).astype(int) - expected(crop)).max() <= 1


def test_where_nothing_helps_it_is_said(source, tmp_path, cramp):
    cramp(10)
    with pytest.raises(OutOfMemoryError, match="cannot be divided further") as caught:
        lowtide.upscale(source, tmp_path / "out.png", budget="256MiB")
    assert "--budget" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_each_new_plan_is_smaller(source, tmp_path, cramp, monkeypatch):
    """Each try takes less memory than the one that failed, down to the smallest plan."""
    tried = []

    def noted(network, adapter, source, sink, plan, **more):
        tried.append(plan.upper_bytes)
        raise MemoryError

    monkeypatch.setattr(image_job, "execute_plan", noted)
    with pytest.raises(OutOfMemoryError, match="memory ran out outside the network"):
        lowtide.upscale(source, tmp_path / "out.png", budget="256MiB")
    assert len(tried) > 1
    assert tried == sorted(set(tried), reverse=True)


def test_memory_that_runs_out_while_measuring(source, tmp_path, monkeypatch, cramp, unmeasured):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    cramp(10)
    # With a small budget another process would measure, which has the memory.
    options = {"model": unmeasured, "budget": "512MiB", "tile": 32}
    with pytest.raises(OutOfMemoryError, match=r"while .*compact.pth was loaded and measured"):
        lowtide.upscale(source, tmp_path / "out.png", **options)


LIMITED = """
import resource, sys
from lowtide.cli.main import main
import lowtide.jobs.upscale.command, torch, pyvips, spandrel
for line in open("/proc/self/status"):
    if line.startswith("VmData"):
        used = int(line.split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[1]) * 2**20,) * 2)
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits data as Linux does")
@pytest.mark.parametrize(("extra", "code"), [(20, 3), (60, 3), (500, 0)])
def test_a_process_that_gets_no_more_memory(tmp_path, save, photo, extra, code):
    """A real limit of the kernel: the job is done, or refused by what the limit leaves."""
    save(tmp_path / "in.png", photo)
    words = ["upscale", tmp_path / "in.png", "-o", tmp_path / "out.png", "--budget", "2GiB"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(extra), *map(str, words), "--strategy", "whole"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr
    assert (tmp_path / "out.png").exists() == (code == 0)
    assert ("by ulimit -d" in done.stderr and "raise that limit" in done.stderr) == (code == 3)
