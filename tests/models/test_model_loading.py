"""Files of known families load, and run as spandrel runs them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import spandrel
import torch
from torch import nn

from lowtide import UsageError
from lowtide.models import Model, load, spandrel_files

Writer = Callable[[nn.Module, str], Path]
Networks = Callable[[str], nn.Module]
NAMES = ("compact", "span", "swinir", "esrgan", "dncnn")
# Attention in windows is computed in another way than spandrel's, the rest in the same.
ROUNDING = {"swinir": 2e-6, "craft": 4e-6}


def _spandrel(path: Path) -> spandrel.ImageModelDescriptor[nn.Module]:
    found = spandrel.ModelLoader().load_from_file(path)
    assert isinstance(found, spandrel.ImageModelDescriptor)
    return found.eval()


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", [".pth", ".ckpt", ".safetensors"])
def test_equals_spandrel(network: Networks, write: Writer, name: str, suffix: str) -> None:
    path = write(network(name), name + suffix)
    theirs, ours = _spandrel(path), load(path)
    facts = ours.descriptor
    assert (facts.scale, facts.in_channels, facts.out_channels) == (
        theirs.scale,
        theirs.input_channels,
        theirs.output_channels,
    )
    for height, width in ((1, 1), (7, 5), (16, 16), (23, 34)):
        image = torch.rand(1, facts.in_channels, height, width)
        before = image.clone()
        result = ours(image)
        assert result.shape[-2:] == (height * facts.scale, width * facts.scale)
        assert (result - theirs(image)).abs().max() <= ROUNDING.get(name, 0)
        assert torch.equal(image, before)


@pytest.mark.parametrize("name", NAMES)
def test_module_contract(network: Networks, write: Writer, name: str) -> None:
    model = load(write(network(name), f"{name}.pth"))
    facts = model.descriptor
    image = torch.rand(2, facts.in_channels, 16, 24)
    whole = model(image)
    with torch.no_grad():
        raw = model.module(image)
    assert raw.shape == (2, facts.out_channels, 16 * facts.scale, 24 * facts.scale)
    assert torch.equal(raw.clamp(0, 1), whole)
    # Only a family with a call of its own is wrapped.
    assert isinstance(model.module, spandrel_files.SpandrelNetwork) == (name == "dncnn")
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


def test_descriptor(network: Networks, write: Writer) -> None:
    module = network("esrgan")
    path = write(module, "my model.pth")
    facts = load(path).descriptor
    values = sum(parameter.numel() for parameter in module.parameters())
    assert facts.name == "my model"
    assert facts.architecture == "ESRGAN"
    assert (facts.purpose, facts.scale, facts.size.multiple_of) == ("SR", 2, 4)
    assert facts.parameters == values
    assert facts.weight_bytes == 4 * values
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts.license is None
    assert facts.path == str(path)


def test_legacy_format(network: Networks, tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    state = network("compact").state_dict()
    torch.save(state, path, _use_new_zipfile_serialization=False)
    image = torch.rand(1, 3, 9, 8)
    assert torch.equal(load(path)(image), _spandrel(path)(image))


def test_unsupported_type_is_refused(network: Networks, write: Writer) -> None:
    model = load(write(network("swinir"), "swinir.pth"))
    with pytest.raises(UsageError, match=r"not support float16; it supports .*bfloat16"):
        model.to(dtype=torch.float16)
    with pytest.raises(UsageError, match="int8"):
        model.to(dtype=torch.int8)
    assert model.dtype == torch.float32


def test_cast_and_layout(network: Networks, write: Writer) -> None:
    model = load(write(network("compact"), "compact.pth"))
    image = torch.rand(1, 3, 12, 13)
    before, size = model(image), model.descriptor.weight_bytes
    assert model.to(memory_format=torch.channels_last) is model
    weight = next(p for p in model.module.parameters() if p.ndim == 4)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(model(image), before, atol=1e-5)
    model.to("cpu", torch.bfloat16)
    assert model.descriptor.weight_bytes * 2 == size
    assert (model(image.bfloat16()).float() - before).abs().max() < 0.05


def test_wrong_images_and_devices(network: Networks, write: Writer) -> None:
    path = write(network("compact"), "compact.pth")
    model = load(path)
    assert isinstance(model, Model)
    for shape in ((3, 8, 8), (1, 1, 8, 8), (1, 3, 0, 8)):
        with pytest.raises(UsageError, match="shape"):
            model(torch.rand(shape))
    with pytest.raises(UsageError, match="float64"):
        model(torch.rand(1, 3, 8, 8, dtype=torch.float64))
    with pytest.raises(UsageError, match="does not know the device"):
        load(path, device="abacus")
    with pytest.raises(UsageError, match="no device 'cuda:99'"):
        load(path, device="cuda:99")


def test_real_model(data: Path) -> None:
    path = data / "models" / "craft_x4.pth"
    ours, theirs = load(path), _spandrel(path)
    image = torch.rand(1, 3, 17, 23)
    assert (ours(image) - theirs(image)).abs().max() <= ROUNDING["craft"]
    assert ours.descriptor.architecture == "CRAFT"


def test_importing_models_is_light() -> None:
    code = (
        "import sys, lowtide.models as m; m.bundled_names(); m.describe_bundled('lowtide-x2'); "
        "m.SizeRule();"
        "sys.exit(any(x in sys.modules for x in ('torch', 'spandrel', 'torchvision')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
