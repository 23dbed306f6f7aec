"""Files that are hostile, damaged, or something else: refused, with a reason."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lowtide import ModelError
from lowtide.models import bundled, load, lowtide_files, spandrel_files

Networks = Callable[[str], nn.Module]


class Hostile:
    """Runs a command when it is unpickled by anything careless."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch {marker}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", ["top", "value", "nested", "optimizer"])
def test_hostile_pickle_does_not_run(
    network: Networks, tmp_path: Path, zipped: bool, place: str
) -> None:
    marker, path = tmp_path / "ran", tmp_path / "model.pth"
    evil, state = Hostile(marker), dict(network("compact").state_dict())
    content: Any = {
        "top": evil,
        "value": {**state, "extra": evil},
        "nested": {"params": {**state, "extra": [{"deep": evil}]}},
        "optimizer": {"params": state, "optimizer": evil},
    }[place]
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match=r"posix\.system.*run code.*refused") as caught:
        load(path)
    assert not marker.exists()
    assert ".safetensors" in (caught.value.hint or "")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_bare_hostile_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    marker, path = tmp_path / "ran", tmp_path / "model.ckpt"
    path.write_bytes(pickle.dumps(Hostile(marker), protocol))
    with pytest.raises(ModelError):
        load(path)
    assert not marker.exists()
    # The file is a working attack: read carelessly, it does run.
    pickle.loads(path.read_bytes())
    assert marker.exists()


def test_unknown_objects_are_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"params": {"a": torch.zeros(1)}, "share": Fraction(1, 3)}, path)
    with pytest.raises(ModelError, match=r"fractions\.Fraction"):
        load(path)


def test_torchscript_under_another_name(network: Networks, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(network("compact").state_dict(), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/constants.pkl", b"")
    with pytest.raises(ModelError, match="TorchScript"):
        load(path)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".gguf", ".zip", ".txt", ""])
def test_other_kinds_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"anything")
    with pytest.raises(ModelError, match="not a kind of file") as caught:
        load(path)
    assert caught.value.hint


@pytest.mark.parametrize("suffix", [".pth", ".ckpt", ".safetensors"])
def test_damage(network: Networks, tmp_path: Path, suffix: str) -> None:
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"model{suffix}"
    state = network("compact").state_dict()
    save_file(state, whole) if suffix == ".safetensors" else torch.save(state, whole)
    content = whole.read_bytes()
    for length in (1, 9, 40, 400, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"damaged|is no model|not a file"):
            load(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        load(path)


def test_damaged_legacy_file(network: Networks, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(network("compact").state_dict(), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    for length in (2, 20, 300, 1500, len(content) - 10):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="damaged"):
            load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><title>404</title>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"GIF89a", "damaged"),
    ],
)
def test_broken_downloads_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    for suffix in (".pth", ".safetensors"):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            load(path)


def test_absent_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "none.pth")
    with pytest.raises(ModelError, match="is a folder"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "x" * 5000 + ".pth", "a\0b.pth", "~nobody-here/a.pth", "", "/dev/null"]
)
def test_odd_paths(name: str) -> None:
    with pytest.raises(ModelError):
        load(name)


def test_unknown_family(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"strange.weight": torch.zeros(3), "strange.bias": torch.zeros(3)}, path)
    with pytest.raises(
        ModelError, match=r"no known family; its 2 tensors .*strange\.bias"
    ) as caught:
        load(path)
    assert "DRCT" in (caught.value.hint or "")
    assert "SwinIR" in (caught.value.hint or "")


def _with_metadata(path: Path, entries: Any) -> Path:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = {**json.loads(content[8 : 8 + size]), "__metadata__": entries}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    return path


@pytest.mark.parametrize("entries", [{"epoch": 3, "name": "a"}, {"loss": None}, [1, 2], "text"])
def test_metadata_that_are_not_all_text_are_read(
    network: Networks, tmp_path: Path, entries: Any
) -> None:
    state, image = network("compact").state_dict(), torch.rand(1, 3, 9, 8)
    paths = [tmp_path / f"{name}.safetensors" for name in ("sound", "odd")]
    for path in paths:
        save_file(state, path)
    _with_metadata(paths[1], entries)
    assert torch.equal(load(paths[1])(image), load(paths[0])(image))


def test_our_own_metadata_beside_a_number(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    shutil.copy(bundled.find_bundled("lowtide-x2").path, path)
    _with_metadata(path, {**lowtide_files.read_metadata(path), "epoch": 3})
    model, image = load(path), torch.rand(1, 3, 9, 8)
    assert model.descriptor.architecture == "ParagonConv"
    assert torch.equal(model(image), load("lowtide-x2")(image))


def test_known_family_with_a_tensor_missing(network: Networks, tmp_path: Path) -> None:
    state = network("compact").state_dict()
    del state["body.1.weight"]
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    with pytest.raises(ModelError, match=r"do not fit together|no known family"):
        load(path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {}, torch.zeros(2), {3: torch.zeros(1)}])
def test_no_table_of_tensors(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "model.pth"
    torch.save(content, path)
    with pytest.raises(ModelError):
        load(path)


@pytest.mark.parametrize(
    ("purpose", "channels", "words"),
    [
        ("FaceSR", (3, 3), "a model for FaceSR"),
        ("Inpainting", (3, 3), "a model for Inpainting"),
        ("SR", (4, 4), "4 channels"),
        ("SR", (3, 2), "returns 2"),
    ],
)
def test_no_image_to_image_model(purpose: str, channels: tuple[int, int], words: str) -> None:
    found: Any = SimpleNamespace(
        purpose=purpose,
        input_channels=channels[0],
        output_channels=channels[1],
        architecture=SimpleNamespace(name="Some"),
    )
    with pytest.raises(ModelError, match=words):
        spandrel_files._require_image_model(Path("file.pth"), found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, suffix: str, value: float) -> None:
    tensors = load("lowtide-x2").module.state_dict()
    name = next(name for name, one in tensors.items() if one.ndim == 4)
    tensors[name] = tensors[name].clone().index_fill_(0, torch.tensor([0]), value)
    path = tmp_path / f"broken{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(tensors, path)
    with pytest.raises(ModelError, match=f"NaN or infinite, such as {name!r}"):
        load(path)
