"""Files of torch.save: their tensors are read, whatever else they contain, and nothing more."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from spandrel.architectures.ESRGAN import ESRGAN
from torch import nn

from lowtide import ModelError
from lowtide.memory.oom import is_out_of_memory
from lowtide.models import load
from support.process_limit import process_limit

Networks = Callable[[str], nn.Module]
MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
HARMLESS = {
    "numpy scalar": np.float64(0.5),
    "numpy array": np.ones(3),
    "numpy dtype": np.dtype("f4"),
    "size": torch.Size([1, 2]),
    "dtype": torch.float16,
    "device": torch.device("cuda:0"),
    "defaultdict": defaultdict(list, a=[1]),
    "namespace": argparse.Namespace(lr=1e-4),
    "parameter": nn.Parameter(torch.ones(2)),
    "path": Path("a"),
    "set": {1},
    "bytes": b"abc",
    "complex": 1j,
    "generator": torch.get_rng_state(),
    "layout": torch.strided,
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    "sparse": torch.eye(2).to_sparse(),
    "milestones": Counter({5: 1}),
    "class of it": OrderedDict,
}


def pickled(path: Path, data: bytes, records: dict[str, bytes] | None = None, **options) -> Path:
    """A zip of torch.save's kind with this pickle in it."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("model/data.pkl", data)
        for name, content in {"version": b"3\n", **(records or {})}.items():
            archive.writestr(f"model/{name}", content)
    return path


def tensor(size: tuple[int, ...], stride: tuple[int, ...], count: int = 1) -> bytes:
    """The pickle of {"a": a tensor of this shape in a storage of this many floats}."""

    class Made:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Stored(), 0, size, stride, False, {})

    class Stored:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            kept = isinstance(obj, Stored)
            return ("storage", torch.FloatStorage, "0", "cpu", count) if kept else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"a": Made(), "b": torch.strided})
    return buffer.getvalue()


def refused(path: Path, words: str, limit: int) -> None:
    """The file is refused before it takes that memory, not for lack of it."""
    with process_limit(limit), pytest.raises(ModelError, match=words) as caught:
        load(path)
    assert not is_out_of_memory(caught.value.__cause__)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_training_programs_store_besides_weights(
    network: Networks, tmp_path: Path, zipped: bool, protocol: int
) -> None:
    module, path = network("compact"), tmp_path / "model.pth"
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.rand(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    content = {"params": module.state_dict(), "optimizer": optimizer.state_dict(), **HARMLESS}
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    image = torch.rand(1, 3, 9, 7)
    assert torch.equal(load(path).module(image), module.eval()(image))


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_objects_load(network: Networks, tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": network("compact").state_dict(), name: HARMLESS[name]}, path)
    assert load(path).descriptor.architecture == "Compact"


def test_parameters_views_and_half_precision(network: Networks, tmp_path: Path) -> None:
    module, path = network("compact").half(), tmp_path / "model.pth"
    state = {name: nn.Parameter(value) for name, value in module.state_dict().items()}
    state["body.2.weight"] = torch.stack([state["body.2.weight"]] * 2, -1)[..., 1]  # strided
    torch.save(defaultdict(list, params=state), path)
    found = load(path).module.state_dict()
    assert all(torch.equal(found[name], value.float()) for name, value in state.items())


def test_dictionaries_of_pairs_as_python_2_wrote_them(network: Networks, tmp_path: Path) -> None:
    class Old:
        def __init__(self, items: Any) -> None:
            self.pairs = [list(pair) for pair in items]

        def __reduce__(self) -> Any:
            return OrderedDict, (self.pairs,)

    module, path = network("compact"), tmp_path / "model.pth"
    torch.save({"params": Old(module.state_dict().items())}, path)
    image = torch.rand(1, 3, 9, 7)
    assert torch.equal(load(path).module(image), module.eval()(image))


def test_order_of_bytes_and_sums_that_were_not_written(network: Networks, tmp_path: Path) -> None:
    module, path, other = network("compact"), tmp_path / "model.pth", tmp_path / "big.pth"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(module.state_dict(), path)
    torch.serialization.set_crc32_options(before)
    image = torch.rand(1, 3, 9, 7)
    assert torch.equal(load(path).module(image), module.eval()(image))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w") as swapped:
        for info in archive.infolist():
            info.CRC = None  # type: ignore[assignment]
            data = archive.read(info)
            if "/data/" in info.filename:
                data = np.frombuffer(data, "<f4").astype(">f4").tobytes()
            data = b"big" if info.filename.endswith("byteorder") else data
            swapped.writestr(info.filename, data)
    assert torch.equal(load(other).module(image), module.eval()(image))


def test_a_changed_bit_is_noticed(network: Networks, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(network("compact").state_dict(), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        load(path)


@pytest.mark.parametrize("kind", ["hard link", "link to a FIFO"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_archive_is_not_unpacked(tmp_path: Path, kind: str, format: int) -> None:
    target, path = tmp_path / "mine", tmp_path / "model.pth"
    if kind == "hard link":
        target.write_bytes(b"mine")
        target.chmod(0o600)
    else:
        os.mkfifo(target)
    before = target.stat()
    with tarfile.open(path, "w", format=format, encoding="latin-1") as archive:
        first = tarfile.TarInfo("\x80pickle")
        archive.addfile(first, io.BytesIO())
        member = tarfile.TarInfo("storages")
        member.type = tarfile.LNKTYPE if kind == "hard link" else tarfile.SYMTYPE
        member.linkname, member.mode, member.mtime = str(target), 0o4777, 0
        archive.addfile(member)
    if format != tarfile.PAX_FORMAT:  # whose first block is of the archive itself
        assert path.read_bytes()[:1] == b"\x80"
    with pytest.raises(ModelError, match=r"tar archive|damaged"):
        load(path)
    assert target.stat() == before


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    zeros = {"data/0": bytes(64 << 20)}
    path = pickled(tmp_path / "a.pth", tensor((1 << 24,), (1,), 1 << 24), zeros, compression=8)
    refused(path, "compressed", 32 << 20)


@pytest.mark.parametrize(
    ("size", "stride", "count"),
    [
        ((4,), (1,), 2),
        ((2, 2), (1, 9), 4),
        ((1 << 30, 4), (0, 0), 1),
        ((-1,), (1,), 1),
        ((1,), (-1,), 1),
        ((2,), (1,), 1 << 40),
        ((1 << 62, 0), (1, 1), 1),
    ],
)
def test_tensors_larger_than_what_is_stored(
    tmp_path: Path, size: tuple[int, ...], stride: tuple[int, ...], count: int
) -> None:
    record = {"data/0": bytes(4 * min(count, 4))}
    path = pickled(tmp_path / "a.pth", tensor(size, stride, count), record)
    refused(path, "damaged", 32 << 20)


def _memo() -> bytes:
    """A number remembered at an index for which Python's machine makes gigabytes of room."""
    return b"\x80\x02K\x01r" + struct.pack("<I", (1 << 32) - 1) + b"."


def _copies() -> bytes:
    """One list of pairs, made into an ordered dictionary by every five bytes."""
    pairs = b"]q\x00(" + b"".join(b"]q\x01(M" + struct.pack("<H", i) + b"Ne" for i in range(5000))
    made = b"\x80\x02" + pairs + b"eccollections\nOrderedDict\nq\x020"
    return made + b"h\x02h\x00\x85R" * 5000 + b"."


def _claim() -> bytes:
    """Bytes of which all but a few are missing."""
    return b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc."


def _doubled() -> bytes:
    """Tuples of two, doubled a hundred times, as a key: the hash of it takes for ever."""
    return b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 100 + b"Ns."


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("data", [_memo, _copies, _claim, _doubled])
def test_pickles_that_grow(tmp_path: Path, data: Callable[[], bytes], zipped: bool) -> None:
    path = tmp_path / "a.pth"
    pickled(path, data()) if zipped else path.write_bytes(MAGIC + data())
    refused(path, "damaged|no model", 128 << 20)


def test_a_network_far_larger_than_its_tensors(tmp_path: Path) -> None:
    """Sides of 30,000 in a file of kilobytes: the layer between would have 900 million weights."""
    path = tmp_path / "a.pth"
    state = {
        "body.0.weight": torch.zeros(1, 1, 1, 1).expand(30_000, 3, 1, 1),
        **{f"body.{index}.weight": torch.zeros(1) for index in range(1, 5)},
        "body.4.bias": torch.zeros(12),
    }
    torch.save(state, path)
    refused(path, "do not fit.*far larger", 512 << 20)


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "net_g.", "model.", "module.", "model._orig_mod.", "net_g.module."]
)
@pytest.mark.parametrize("name", ["compact", "esrgan", "swinir"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_prefixes(network: Networks, tmp_path: Path, prefix: str, name: str, suffix: str) -> None:
    module, path = network(name), tmp_path / f"model{suffix}"
    state = {prefix + key: value for key, value in module.state_dict().items()}
    state["loss.weight"] = torch.ones(3)
    if suffix == ".pth":
        torch.save({"state_dict": state, "epoch": 3, "hyper_parameters": {}}, path)
    else:
        save_file(state, path)
    plain = tmp_path / "plain.pth"
    torch.save(module.state_dict(), plain)
    image = torch.rand(1, 3, 16, 8)
    assert torch.equal(load(path).module(image), load(plain).module(image))


def test_prefixes_that_belong_to_the_names_are_kept(network: Networks, tmp_path: Path) -> None:
    """Old names of ESRGAN start with "model." of their own."""
    module = ESRGAN(num_filters=8, num_blocks=1, scale=2)
    path = tmp_path / "model.pth"
    torch.save(module.state_dict(), path)
    assert next(iter(module.state_dict())).startswith("model.")
    image = torch.rand(1, 3, 8, 8)
    assert torch.equal(load(path).module(image), module.eval()(image))
