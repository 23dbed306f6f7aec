"""Upscaling with linear layers in 8 bits."""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.core.errors import UsageError
from lowtide.jobs import devices
from lowtide.jobs.devices import resolve_precision
from support.measured_costs import remember_also


@pytest.fixture(scope="module")
def swin(tmp_path_factory):
    from spandrel.architectures.SwinIR import SwinIR

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("models") / "swinir.pth"
    torch.save(
        SwinIR(
            img_size=16,
            embed_dim=32,
            depths=[2],
            num_heads=[2],
            window_size=8,
            mlp_ratio=2,
            upscale=2,
            upsampler="pixelshuffledirect",
        ).state_dict(),
        path,
    )
    remember_also(path, "int8")
    return path


def test_a_file_is_run_and_its_error_measured(tmp_path, save, photo, swin):
    source = save(tmp_path / "in.png", photo[:24, :40])
    target = tmp_path / "out.png"
    image = lowtide.upscale(source, target, model=swin, precision="int8").images[0]
    assert image.plan.precision == image.accuracy.precision == "int8"
    error = image.accuracy.precision_error
    assert error.psnr_db > 40
    assert error.max_error > 1e-6
    assert error.reference == "fp32"
    assert [refusal.reason for refusal in image.plan.refused if refusal.title == "streamed"] == [
        "8-bit layers do not run in bands"
    ]


def test_fp8_needs_a_gpu_with_fp8_products(tmp_path, source, swin, model, monkeypatch):
    with pytest.raises(UsageError, match="cpu cannot multiply in fp8") as caught:
        lowtide.upscale(source, tmp_path / "out.png", model=swin, precision="fp8")
    assert "bf16" in caught.value.hint
    facts = model.descriptor
    for capability, able in (((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        if able:
            assert resolve_precision("fp8", facts, "cuda:0") == "fp8"
        else:
            with pytest.raises(UsageError, match=r"8\.9"):
                resolve_precision("fp8", facts, "cuda:0")
    with pytest.raises(UsageError, match="does not run in fp8"):
        resolve_precision("fp8", replace(facts, supports_bfloat16=False), "cuda:0")


@pytest.mark.slow
def test_a_file_is_run_in_fp8(tmp_path, save, photo, swin, monkeypatch):
    # PyTorch has these products for the CPU too; only the two checks for a GPU are replaced.
    monkeypatch.setattr(devices, "_check_fp8", lambda device: None)
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda _: None)
    source = save(tmp_path / "in.png", photo[:24, :40])
    image = lowtide.upscale(source, tmp_path / "out.png", model=swin, precision="fp8").images[0]
    assert image.plan.precision == image.accuracy.precision == "fp8"
    assert image.plan.strategy.name == "whole"
    assert 25 < image.accuracy.precision_error.psnr_db < 60
    low = lowtide.upscale(source, tmp_path / "low.png", model=swin, precision="bf16").images[0]
    assert image.accuracy.precision_error.psnr_db < low.accuracy.precision_error.psnr_db


def test_a_model_without_linear_layers_is_refused(tmp_path, source):
    with pytest.raises(UsageError, match="no linear layers"):
        lowtide.upscale(source, tmp_path / "out.png", precision="int8")


def test_int8_on_an_absent_gpu_is_refused(tmp_path, source, swin):
    with pytest.raises(UsageError, match="measured on the device itself"):
        lowtide.plan(
            source, tmp_path / "out.png", model=swin, precision="int8", device="rtx3060-12gb"
        )
