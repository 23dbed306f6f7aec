"""Jobs of a video autoencoder that are stopped go on, and make the bytes of undisturbed ones."""

import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("av")

from lowtide.core.errors import Cancelled
from lowtide.jobs.clips.work import segments_folder
from lowtide.jobs.vae.command import decode, encode, roundtrip
from support.tiny_video_vae import tiny_video_vae
from support.video_clips import Clip, Sound

SEGMENT, BUDGET = 4, "256MiB"
RUNS = {"encode": encode, "decode": decode, "roundtrip": roundtrip}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One whose chunks are finished one by one, with 12 frames of state between them."""
    path = tmp_path_factory.mktemp("model")
    tiny_video_vae(block_out_channels=(8, 8, 8, 8)).save(path)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "in.mkv"
    sounds = (Sound(seconds=0.4),)
    return Clip(frames=27, width=46, height=36, codec="ffv1", sounds=sounds).write(path)


@pytest.fixture(scope="module")
def latents(video, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("latents") / "l.safetensors"
    encode(video, path, model=model, budget=BUDGET, frames="3:26")
    return path


def settings(operation, model):
    cut = {} if operation == "decode" else {"frames": "3:26"}
    return {"model": model, "budget": BUDGET, "segment": SEGMENT, **cut}


def name(operation):
    return "out.safetensors" if operation == "encode" else "out.mp4"


def stop_after(run, count, unit):
    """Return what runs, stopped after so many frames or latents."""
    seen = []

    def watch(event):
        if event.unit == unit and event.phase == "run":
            seen.append(event.done)

    with pytest.raises(Cancelled):
        run(progress=watch, cancel=lambda: bool(seen) and seen[-1] >= count)


def test_a_round_trip_goes_on_where_it_was_stopped(video, model, tmp_path):
    how = settings("roundtrip", model)
    calm, target = (tmp_path / part / "out.mp4" for part in ("calm", "stopped"))
    due = roundtrip(video, calm, **how).clips[0]
    assert due.frames_resumed == 0 and not segments_folder(calm).exists()
    stop_after(lambda **more: roundtrip(video, target, **how, **more), 10, "frames")
    assert not target.exists()
    assert len(list(segments_folder(target).glob("*.state"))) == 1  # the decoder's
    done = roundtrip(video, target, **how).clips[0]
    assert 0 < done.frames_resumed < 23
    assert target.read_bytes() == calm.read_bytes()
    assert [one.name for one in target.parent.iterdir()] == [target.name]
    for figure in ("psnr_db", "worst_psnr_db", "ssim"):
        assert getattr(done, figure) == getattr(due, figure)
    assert not any("started over" in note for note in done.notes)


def test_what_was_made_with_other_settings_is_not_used(video, model, tmp_path):
    how, target = settings("encode", model), tmp_path / "out.safetensors"
    stop_after(lambda **more: encode(video, target, **how, **more), 3, "latents")
    done = encode(video, target, **how | {"frames": "3:25"}).clips[0]
    assert done.frames_resumed == 0
    assert any("started over" in note for note in done.notes)
    encode(video, tmp_path / "calm.safetensors", **how | {"frames": "3:25"})
    assert target.read_bytes() == (tmp_path / "calm.safetensors").read_bytes()
    assert not segments_folder(target).exists()


def heed_ctrl_c():
    """Not to ignore what the tests were told to ignore, as in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("how_stopped", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("operation", ["encode", "decode"])
def test_stopped_and_restarted_equals_undisturbed(
    operation, how_stopped, video, latents, model, tmp_path
):
    """By Ctrl-C, after which all that is left is the folder of segments, whole, or by a kill."""
    how, source = settings(operation, model), latents if operation == "decode" else video
    calm, target = (tmp_path / part / name(operation) for part in ("calm", "stopped"))
    RUNS[operation](source, calm, **how)
    work = segments_folder(target)
    options = [f"--{key}={value}" for key, value in how.items()]
    command = [sys.executable, "-m", "lowtide", "vae", operation, source, "-o", target, *options]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, preexec_fn=heed_ctrl_c, **pipes)
    while not list(work.glob("*.state")) and job.poll() is None:
        time.sleep(0.01)
    job.send_signal(how_stopped)
    _, said = job.communicate()
    if how_stopped == signal.SIGKILL:
        assert job.returncode == -signal.SIGKILL, "the kill must hit a running job"
    else:
        assert job.returncode == 130, said
        assert "interrupted" in said and "Traceback" not in said
        assert [one.name for one in work.parent.iterdir()] == [work.name]
        assert not [one.name for one in work.rglob("*") if ".part" in one.name]
    assert all(one.name.startswith(".") for one in target.parent.iterdir())
    done = RUNS[operation](source, target, **how).clips[0]
    assert done.frames_resumed > 0
    assert target.read_bytes() == calm.read_bytes()
    assert [one.name for one in target.parent.iterdir()] == [target.name]
