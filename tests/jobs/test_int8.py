"""Upscaling with linear layers in 8 bits."""

import pytest
import torch
from measured import remember_also

import lowtide
from lowtide.core.errors import UsageError


@pytest.fixture(scope="module")
def swin(tmp_path_factory):
    from spandrel.architectures.SwinIR import SwinIR

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("models") / "swinir.pth"
    torch.save(SwinIR(
        img_size=16, embed_dim=32, depths=[2], num_heads=[2], window_size=8, mlp_ratio=2,
        upscale=2, upsampler="pixelshuffledirect",
    ).state_dict(), path)  # fmt: skip
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
    assert error.against == "fp32"
    assert [refusal.reason for refusal in image.plan.refused if refusal.what == "streamed"] == [
        "layers in 8 bits do not run by bands"
    ]


def test_a_model_without_linear_layers_is_refused(tmp_path, source):
    with pytest.raises(UsageError, match="no linear layers"):
        lowtide.upscale(source, tmp_path / "out.png", precision="int8")


def test_nothing_is_told_of_cards_that_are_not_here(tmp_path, source, swin):
    with pytest.raises(UsageError, match="measured where they run"):
        lowtide.plan(
            source, tmp_path / "out.png", model=swin, precision="int8", device="rtx3060-12gb"
        )
