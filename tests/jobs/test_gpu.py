"""The same job on a CUDA device; skipped, visibly, where there is none."""

import numpy as np
import pytest
import torch

import lowtide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("options", [dict(strategy="whole"), dict(tile=128)], ids=str)
def test_equals_the_cpu_within_a_level(tmp_path, photo, save, read, options):
    source = save(tmp_path / "in.png", photo)
    for device in ("cpu", "cuda:0"):
        lowtide.upscale(
            source, tmp_path / f"{device[:3]}.png", device=device, precision="fp32", **options
        )
    difference = read(tmp_path / "cpu.png").astype(int) - read(tmp_path / "cud.png")
    assert np.abs(difference).max() <= 1


def test_stays_within_its_budget_and_prediction(tmp_path, photo, save):
    source = save(tmp_path / "in.png", np.tile(photo, (5, 5, 1)))
    report = lowtide.upscale(source, tmp_path / "out.png", device="cuda:0", budget="2GiB")
    memory = report.images[0].memory
    assert memory.peak_bytes <= 2 << 30
    assert memory.peak_bytes <= memory.upper_bytes


def test_bands_take_what_was_said_of_them(tmp_path, photo, save, read):
    source = save(tmp_path / "in.png", np.tile(photo, (5, 5, 1)))
    found = {
        strategy: lowtide.upscale(
            source,
            tmp_path / f"{strategy}.png",
            device="cuda:0",
            precision="fp32",
            strategy=strategy,
        ).images[0]
        for strategy in ("whole", "streamed")
    }
    whole, streamed = found["whole"], found["streamed"]
    assert streamed.memory.peak_bytes <= streamed.memory.upper_bytes
    assert streamed.memory.peak_bytes < whole.memory.peak_bytes
    difference = read(tmp_path / "whole.png").astype(int) - read(tmp_path / "streamed.png")
    assert np.abs(difference).max() <= 1


def test_low_precision_is_chosen_and_measured(tmp_path, photo, save):
    source = save(tmp_path / "in.png", photo)
    report = lowtide.upscale(source, tmp_path / "out.png", device="cuda:0")
    accuracy = report.images[0].accuracy
    assert accuracy.precision in ("bf16", "fp16")
    assert accuracy.precision_error.psnr_db > 40


def test_a_real_out_of_memory_is_survived(tmp_path, photo, save, read):
    source = save(tmp_path / "in.png", np.tile(photo, (2, 2, 1)))
    lowtide.upscale(source, tmp_path / "calm.png", device="cuda:0", precision="fp32")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (300 << 20) / total))
    try:
        report = lowtide.upscale(
            source, tmp_path / "tight.png", device="cuda:0", precision="fp32", strategy="whole"
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert report.images[0].events
    difference = read(tmp_path / "calm.png").astype(int) - read(tmp_path / "tight.png")
    assert np.abs(difference).max() <= 1
