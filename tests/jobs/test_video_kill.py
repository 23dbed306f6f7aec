"""A video job killed with SIGKILL goes on, and makes the packets of an undisturbed run."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

av = pytest.importorskip("av")

import lowtide  # noqa: E402
from lowtide.jobs.clips.work import segments_folder  # noqa: E402
from support.video_clips import Clip, Sound  # noqa: E402

SEGMENT, BUDGET = 10, "256MiB"


def command(source: Path, target: Path) -> list[str]:
    options = ["--segment", str(SEGMENT), "--json", "--budget", BUDGET]
    return [sys.executable, "-m", "lowtide", "video", str(source), "-o", str(target), *options]


def packets(path: Path) -> list[tuple[int, int | None, int | None, bytes]]:
    with av.open(str(path)) as container:
        found = [one for one in container.demux() if one.size]
        return [(one.stream.index, one.pts, one.dts, bytes(one)) for one in found]


def content(target: Path) -> list[tuple[int, int | None, int | None, bytes]] | dict[str, bytes]:
    """Packets of a file, or the files of a sequence."""
    if target.suffix != ".png":
        return packets(target)
    return {one.name: one.read_bytes() for one in target.parent.iterdir()}


def finished(target: Path) -> int:
    """Segments that are complete."""
    folder = segments_folder(target)
    return len(list(folder.glob("0????????.*"))) if folder.exists() else 0


@pytest.mark.parametrize(
    ("frames", "kills", "output"),
    [
        (40, 1, "out.mkv"),
        (40, 1, "%d.png"),
        pytest.param(240, 5, "out.mkv", marks=pytest.mark.slow),
    ],
)
def test_killed_and_restarted_equals_undisturbed(tmp_path, frames, kills, output):
    source = Clip(frames=frames, width=96, height=64, sounds=(Sound(),)).write(tmp_path / "in.mkv")
    calm, disturbed = tmp_path / "calm" / output, tmp_path / "disturbed" / output
    for target in (calm, disturbed):
        target.parent.mkdir()
    lowtide.video(source, calm, segment=SEGMENT, budget=BUDGET).raise_for_failures()

    generator, before = random.Random(kills), 0
    for _ in range(kills):
        job = subprocess.Popen(
            command(source, disturbed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while finished(disturbed) == before and job.poll() is None:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        job.send_signal(signal.SIGKILL)
        job.communicate()
        assert job.returncode == -signal.SIGKILL, "the kill must hit a running job"
        assert all(one.name.startswith(".") for one in disturbed.parent.iterdir())
        assert finished(disturbed) > before
        before = finished(disturbed)
    done = subprocess.run(command(source, disturbed), check=True, capture_output=True, text=True)
    assert f'"frames_resumed": {before * SEGMENT}' in done.stdout
    assert content(disturbed) == content(calm)
    assert not segments_folder(disturbed).exists()
