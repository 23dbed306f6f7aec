"""A family of models from outside runs and is trained like one of Lowtide's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import lowtide
from lowtide import ModelError, UsageError
from lowtide.models import ModelFamily, register_family
from lowtide.models.families import network_builders
from lowtide.models.ldm4ts import LDM4TSModel
from lowtide.training.setup import make_generator, save_weights
from lowtide.training.tasks.sr_config import SrConfig
from support import toy_family


@pytest.fixture
def photo(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
    Image.fromarray(values).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def toy(scale=2):
    torch.manual_seed(0)
    return toy_family.Toy(toy_family.ToyConfig(scale))


def enlarged(photo, network):
    image = torch.from_numpy(np.array(Image.open(photo))).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        result = network(image).clamp(0, 1)
    return (result[0].permute(1, 2, 0) * 255).round().byte().numpy()


def test_its_files_are_known_by_their_tensors(photo, tmp_path):
    register_family(toy_family.FAMILY)
    register_family(toy_family.FAMILY)  # the same again is no other
    network, file, output = toy(), tmp_path / "toy.safetensors", tmp_path / "large.png"
    # As GAN trainings save them: with a prefix, and a discriminator beside it.
    state = {f"net_g.{name}": one for name, one in network.state_dict().items()}
    save_file({**state, "net_d.weight": torch.zeros(3)}, file)
    report = lowtide.upscale(photo, output, model=file, budget="1GiB")
    assert (report.images[0].status, report.model["architecture"]) == ("done", "Toy")
    assert np.abs(np.array(Image.open(output), int) - enlarged(photo, network)).max() <= 1

    save_file({"toy_in.weight": torch.zeros(4, 3, 3, 3), "toy_out.weight": torch.zeros(7, 4)}, file)
    with pytest.raises(ModelError, match="looks like a toy, but its scale is not an integer"):
        lowtide.load(file)
    save_file({"toy_in.weight": torch.zeros(4, 3), "toy_out.weight": torch.zeros(12, 4)}, file)
    with pytest.raises(ModelError, match="looks like Toys, but its tensors do not fit together"):
        lowtide.load(file)


def test_it_is_trained_by_name_and_written_with_its_configuration(tmp_path):
    register_family(toy_family.FAMILY)
    config = SrConfig.from_values(
        {
            "name": "mine",
            "scale": 3,
            "datasets": {"train": {"dataroot_gt": ["none"]}},
            "network_g": {"type": "toy", "width": 5},
            "train": {"total_iter": 1},
        }
    )
    network = make_generator(config.network_g, 3, seed=0)
    model = lowtide.load(save_weights(tmp_path / "mine.safetensors", network, config))
    assert (model.descriptor.architecture, model.descriptor.scale) == ("Toy", 3)
    image = torch.rand(1, 3, 8, 9)
    assert torch.equal(model(image), network.eval()(image).clamp(0, 1))
    with pytest.raises(UsageError, match=r"network_g \(toy\): .*depth"):
        make_generator({"type": "toy", "depth": 3}, 3, seed=0)


def test_a_name_is_given_once():
    for other in (
        ModelFamily(name="denoiser"),
        ModelFamily(name="Mine", generators={"ParagonConv": toy}),
    ):
        with pytest.raises(UsageError, match="which is in"):
            register_family(other)


def command(where: Path, *words: object):
    """Run the command with an installed package that has the entry point `toys`."""
    tests = Path(__file__).parent.parent
    paths = [where, tests, *sys.path]
    return subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )


def install(where: Path, target: str):
    info = where / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lowtide.families]\ntoys = {target}\n")


def test_the_command_line_knows_the_families_of_installed_packages(photo, tmp_path):
    install(tmp_path, "support.toy_family:FAMILY")
    network, file, output = toy(), tmp_path / "toy.safetensors", tmp_path / "large.png"
    save_file(network.state_dict(), file)
    run = command(tmp_path, "upscale", photo, "-o", output, "-m", file)
    assert run.returncode == 0, run.stderr
    assert np.abs(np.array(Image.open(output), int) - enlarged(photo, network)).max() <= 1


def test_a_damaged_package_is_named(tmp_path):
    install(tmp_path, "support.no_family:FAMILY")
    save_file(toy().state_dict(), tmp_path / "toy.safetensors")
    run = command(tmp_path, "models", tmp_path / "toy.safetensors")
    assert run.returncode != 0
    assert "the family toys of an installed package cannot be imported" in run.stderr


def test_a_file_of_a_family_without_images_says_what_takes_it(tmp_path):
    sizes = {"image_size": (16, 16), "horizons": (4,), "look_back": 8, "width": 8}
    LDM4TSModel(**sizes).save(tmp_path / "mine.safetensors")
    with pytest.raises(ModelError, match="is of LDM4TS, which maps no image") as caught:
        lowtide.load(tmp_path / "mine.safetensors")
    assert "lowtide forecast" in (caught.value.hint or "")


def test_no_network_of_trainings_is_named_outside_of_its_family():
    """Help, examples and messages have the names from the registry, or say where they stand."""
    package = Path(lowtide.__file__).parent
    for name in {*network_builders("generators"), *network_builders("discriminators")}:
        family = re.compile(rf"\b{name.partition('_')[0]}", re.IGNORECASE)
        naming = {path for path in package.rglob("*.py") if family.search(path.read_text())}
        homes = {path.parent for path in naming - {package / "models" / "families.py"}}
        assert len(homes) <= 1, sorted(map(str, naming))
