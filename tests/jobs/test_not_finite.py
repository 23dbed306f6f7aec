"""Values beyond the range of half precision."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lowtide
from lowtide import NotFiniteError, UsageError
from lowtide.media import open_image
from lowtide.models import bundled
from support.measured_costs import remember_also

# Noise reaches 9.5 in the model's maps, stripes 13.5, and fp16 holds 65504.
FACTOR = 5600.0


@pytest.fixture
def striped(tmp_path, save):
    """Red and blue columns in turn."""
    pixels = np.zeros((48, 40, 3), np.uint8)
    pixels[:, ::2, 0] = pixels[:, 1::2, 2] = 255
    return save(tmp_path / "striped.png", pixels)


@pytest.fixture(scope="module")
def steep(tmp_path_factory):
    """The bundled model with maps that fp16 holds for noise, but not for `striped`, and the same
    result: as large as the range of that type, and not too large for the certificate."""
    path = bundled.find_bundled("lowtide-x2").path
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    for name, value in tensors.items():
        # Leaky rectifiers in between keep a factor; what is added on the way must have it too.
        if name == "conv_in.weight" or (name.endswith("bias") and name != "conv_up.bias"):
            tensors[name] = value * FACTOR
        elif name == "conv_up.weight":
            tensors[name] = value / FACTOR
    made = tmp_path_factory.mktemp("models") / "steep.safetensors"
    save_file(tensors, made, facts)
    remember_also(made, "fp32", "fp16")
    return made


def pixels(path):
    with open_image(path) as image:
        return image.read(0, image.info.height).astype(int)


@pytest.mark.parametrize("strategy", ["streamed", "whole"])
def test_tiles_are_computed_again_in_fp32(tmp_path, striped, steep, strategy):
    plain = lowtide.upscale(striped, tmp_path / "plain.png", budget="1GiB")
    report = lowtide.upscale(
        striped,
        tmp_path / "half.png",
        model=steep,
        precision="fp16",
        strategy=strategy,
        budget="1GiB",
    )
    assert any("fp32" in event for event in report.images[0].events)
    assert report.images[0].memory.within_budget
    difference = np.abs(pixels(tmp_path / "half.png") - pixels(tmp_path / "plain.png"))
    assert difference.max() <= 1
    assert plain.images[0].events == []


def test_in_fp32_there_is_nothing_to_go_to(tmp_path, striped, steep):
    tensors = load_file(steep)
    with safe_open(steep, "pt") as file:
        facts = file.metadata()
    broken = tmp_path / "broken.safetensors"
    tensors["conv_in.weight"] = torch.full_like(tensors["conv_in.weight"], 3e38)
    save_file(tensors, broken, facts)
    remember_also(broken, "fp32")
    with pytest.raises(NotFiniteError, match="not finite"):
        lowtide.upscale(
            striped, tmp_path / "out.png", model=broken, strategy="whole", budget="1GiB"
        )
    # Its certificate is of random numbers, of which the model makes none that are finite either.
    with pytest.raises(UsageError, match="NaN or infinity for random input"):
        lowtide.upscale(
            striped, tmp_path / "out.png", model=broken, strategy="streamed", budget="1GiB"
        )
    assert not (tmp_path / "out.png").exists()
