"""What a job changes of its process and leaves so: nothing, whatever its libraries do."""

import locale
import os
import resource
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import lowtide
from lowtide.jobs.export.command import export_onnx
from lowtide.jobs.upscale.train import train_sr
from lowtide.media.video.video_encoder import thread_scheduling
from support.denoiser_files import denoiser_file
from support.nifti_files import brain, nifti


def state():
    """All that a job shares with the rest of its process, by name.

    Threads: those that began before, since a library's pool may outlive the job, but none may be
    scheduled unlike the rest.
    """
    mask = os.umask(0o77)
    os.umask(mask)
    return {
        "scheduling": set(thread_scheduling().values()),
        "niceness": {os.getpriority(os.PRIO_PROCESS, one) for one in thread_scheduling()},
        "affinity": os.sched_getaffinity(0),
        "signals": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "umask": mask,
        "folder": Path.cwd(),
        "environment": dict(os.environ),
        "limits": [resource.getrlimit(one) for one in range(resource.RLIMIT_NICE + 1)],
        "locale": locale.setlocale(locale.LC_ALL),
        "warnings": list(warnings.filters),
        "numpy": np.geterr(),
        "torch": (
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "hooks": (threading.excepthook, torch.nn.modules.module._global_forward_hooks.copy()),
    }


@pytest.fixture
def files(tmp_path, save, crop):
    """Inputs of every job, made when one asks for them."""

    class Files:
        photo = save(tmp_path / "photo.png", crop)
        out = tmp_path / "out"

        def folder(self):
            for index in range(3):
                save(tmp_path / "in" / f"{index}.png", crop[: 40 + 10 * index])
            return tmp_path / "in"

        def denoiser(self):
            return denoiser_file(tmp_path / "denoiser.safetensors")

        def clip(self):
            pytest.importorskip("av")
            from support.video_clips import Clip, Sound

            clip = Clip(frames=4, width=64, height=48, codec="ffv1", sounds=(Sound(seconds=0.2),))
            return clip.write(tmp_path / "clip.mkv")

        def table(self):
            pd = pytest.importorskip("pandas")
            stamps = pd.date_range("2026-01-01", periods=200, freq="h")
            values = np.sin(np.arange(200) * np.pi / 12)
            path = tmp_path / "table.csv"
            pd.DataFrame({"date": stamps, "load": values}).to_csv(path, index=False)
            return path

        def volume(self):
            return nifti(tmp_path / "volume.nii", brain((24, 20, 3, 4)).astype(np.float32))

        def autoencoder(self):
            from support.tiny_video_vae import tiny_video_vae

            folder = tmp_path / "vae"
            tiny_video_vae(block_out_channels=(8, 8, 8, 8)).save(folder)
            return folder

    return Files()


def upscale(files):
    lowtide.upscale(files.photo, files.out / "o.png")


def upscale_tiled(files):
    lowtide.upscale(files.photo, files.out / "o.png", tile=32)


def upscale_streamed(files):
    lowtide.upscale(files.photo, files.out / "o.jpg", strategy="streamed")


def upscale_folder(files):
    lowtide.upscale(files.folder(), files.out)


def upscale_refused(files):
    with pytest.raises(lowtide.BudgetError):
        lowtide.upscale(files.photo, files.out / "o.png", budget="1MiB")


def plan(files):
    lowtide.plan(files.photo, files.out / "o.png")


def denoise(files):
    lowtide.denoise(files.photo, files.out / "o.png", model=files.denoiser())


def denoise_volume(files):
    lowtide.denoise(files.volume(), files.out / "o.nii.gz", model=files.denoiser())


def video(files):
    lowtide.video(files.clip(), files.out / "o.mp4")


def video_by_svtav1(files):
    lowtide.video(files.clip(), files.out / "o.webm", codec="svtav1")


def latents_and_back(files):
    from lowtide.jobs.vae.command import decode, encode

    files.out.mkdir()
    model, latents = files.autoencoder(), files.out / "latents.safetensors"
    encode(files.clip(), latents, model=model, budget="512MiB")
    decode(latents, files.out / "o.mkv", model=model, budget="512MiB", codec="svtav1")


def forecast(files):
    lowtide.forecast(files.table(), horizon=4)


def backtest(files):
    lowtide.backtest(files.table(), horizons=[4], stride=24)


def training(files):
    pytest.importorskip("accelerate")
    config = {
        "name": "small",
        "scale": 2,
        "datasets": {
            "train": {
                "dataroot_gt": [str(files.folder())],
                "degradation": "bicubic",
                "lq_size": 8,
                "batch_size_per_gpu": 2,
            }
        },
        "network_g": {"type": "paragonconv", "features": 8, "blocks": 1},
        "train": {"total_iter": 2},
    }
    import yaml

    path = files.photo.with_name("small.yml")
    path.write_text(yaml.safe_dump(config))
    train_sr(path, files.out, device="cpu")


def export(files):
    pytest.importorskip("onnx")
    files.out.mkdir()
    export_onnx("lowtide-x2", files.out / "m.onnx")


def stream(files):
    model = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).eval()
    with torch.no_grad():
        lowtide.stream(model, budget="64MiB")(torch.ones(1, 3, 80, 70))


def estimate(files):
    model = torch.nn.Conv2d(3, 3, 3, padding=1)
    lowtide.estimate(model, lowtide.InferenceStep((torch.ones(1, 3, 32, 32),)))


def doctor(files):
    from lowtide.jobs.doctor import examine_machine

    examine_machine()


JOBS = (
    upscale,
    upscale_tiled,
    upscale_streamed,
    upscale_folder,
    upscale_refused,
    plan,
    denoise,
    denoise_volume,
    video,
    video_by_svtav1,
    latents_and_back,
    forecast,
    backtest,
    training,
    export,
    stream,
    estimate,
    doctor,
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_process_is_as_it_was(job, files):
    before = state()
    job(files)
    after = state()
    assert {name for name in before if before[name] != after[name]} == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's threads could be made real-time")
def test_no_encoder_is_real_time(files):
    """SVT-AV1 would be: other processes of the machine would wait for its threads."""
    before, seen, done = set(thread_scheduling().values()), set(), threading.Event()

    def sample():
        while not done.wait(0.02):
            seen.update(thread_scheduling().values())

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        video_by_svtav1(files)
    finally:
        done.set()
        sampling.join()
    assert seen == before
