"""Model files made by seed, each damaged or hostile in its own way."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from safetensors.torch import save
from spandrel.architectures.Compact import Compact
from spandrel.architectures.ESRGAN import ESRGAN
from spandrel.architectures.SPAN import SPAN
from spandrel.architectures.SwinIR import SwinIR
from torch import nn

from support.onnx_files import conv_file

KINDS = ("zip.pth", "legacy.pth", "model.safetensors", "model.onnx")
WEIGHTS = Path(__file__).parents[2] / "src" / "lowtide" / "models" / "weights"
_HUGE = [0, 1, 0x7F, 0xFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1]
_WORDS = [b"[" * 3000, b"\xff\xfe\x00", b"9" * 500, b"NaN", b"\n", b"../../x", b"constants.pkl"]
Random = random.Random


def networks() -> list[nn.Module]:
    """Small networks of several families."""
    torch.manual_seed(1)
    return [
        Compact(num_feat=8, num_conv=2, upscale=2),
        ESRGAN(num_filters=8, num_blocks=1, scale=2),
        SPAN(num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=3),
        SwinIR(
            img_size=16,
            embed_dim=12,
            depths=[2],
            num_heads=[2],
            window_size=8,
            mlp_ratio=2,
            upscale=2,
            upsampler="pixelshuffledirect",
        ),
    ]


def write(folder: Path, count: int, seed: int) -> list[Path]:
    """So many files, of all kinds in turn: half of those of tensors hold others than a sound one,
    and all the rest is changed in its bytes or its parts."""
    dice, found = Random(seed), []
    sources, plain = sound(folder), networks()
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        if kind != "model.onnx" and dice.random() < 0.5:
            content = saved(kind, _other_tensors(dice, dice.choice(plain).state_dict()))
        else:
            content = dice.choice(sources[kind])
            for _ in range(dice.choice([1, 1, 1, 2, 3])):
                own = dice.random() < 0.7
                content = dice.choice(_OWN[kind] if own else _ANY)(dice, content)
        found.append(folder / f"{index}-{kind}")
        found[-1].write_bytes(content)
    return found


def saved(kind: str, state: dict[str, torch.Tensor]) -> bytes:
    """A file of a kind that holds these tensors."""
    if kind == "model.safetensors":
        return save({name: value.contiguous().clone() for name, value in state.items()})
    buffer = io.BytesIO()
    zipped = kind == "zip.pth"
    torch.save({"params": state}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def sound(folder: Path) -> dict[str, list[bytes]]:
    """Files that load, by kind."""
    found: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    for network in networks():
        for kind in KINDS[:3]:
            found[kind].append(saved(kind, network.state_dict()))
    found["model.safetensors"].append((WEIGHTS / "lowtide-x2.safetensors").read_bytes())
    sizes = {"lowtide.size": '{"multiple_of": 4}', "lowtide.scale": "1", "license": "MIT"}
    for place, options in enumerate(({}, {"metadata": sizes}, {"channels": 1})):
        path = conv_file(folder / f"{place}.onnx", **options)
        found["model.onnx"].append(path.read_bytes())
    return found


def _other_tensors(dice: Random, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some are missing, have other names, sides or types, or are much larger than what they
    repeat."""
    for _ in range(dice.choice([1, 1, 2, 4])):
        name = dice.choice(list(state))
        value = state.pop(name)
        which = dice.randrange(8)
        if which == 1:
            name = name.replace(f".{dice.randrange(3)}.", f".{10 ** dice.randint(1, 12)}.")
        elif which == 2:
            value = value.transpose(0, -1) if value.ndim else value
        elif which == 3:
            sides = [dice.choice([0, 1, side, 2 * side, 3, 1000]) for side in value.shape]
            value = torch.zeros(1).expand(sides) if sum(sides) < 5000 else torch.zeros(sides[:1])
        elif which == 4:
            value = value.to(dice.choice([torch.int64, torch.float16, torch.bool, torch.float64]))
        elif which == 5:
            value = value.reshape(-1) if dice.random() < 0.5 else value[None]
        elif which == 6:
            value = value * dice.choice([float("nan"), float("inf"), -1.0, 1e30])
        elif which == 7:
            name = dice.choice(["model.", "net_g.", "params.", "body.0.", "layers.1.", ""]) + name
        if which:
            state[name] = value
    return state


def _flip(dice: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 4, 40])):
        # As a rule near the beginning or the end, where headers and directories are.
        place = dice.choice([dice.randrange(3000), -dice.randrange(1, 3000), dice.getrandbits(40)])
        changed[place % len(changed)] = dice.randrange(256)
    return bytes(changed)


def _cut(dice: Random, content: bytes) -> bytes:
    return content[: dice.randrange(1, len(content) + 1)]


def _drop(dice: Random, content: bytes) -> bytes:
    start = dice.randrange(len(content))
    return content[:start] + content[start + dice.choice([1, 8, 200]) :] or b"\x80"


def _insert(dice: Random, content: bytes) -> bytes:
    start = dice.choice([dice.randrange(len(content)), dice.randrange(min(2000, len(content)))])
    word = dice.choice([*_WORDS, dice.randbytes(9), content[start : start + 300]])
    return content[:start] + word + content[start:]


def _number(dice: Random, content: bytes) -> bytes:
    """A length, a side or an offset becomes another one."""
    start = dice.choice([dice.randrange(len(content)), dice.randrange(min(2000, len(content)))])
    value = dice.choice(_HUGE).to_bytes(8, "little")[: dice.choice([2, 4, 8])]
    return content[:start] + value + content[start + len(value) :]


def _records(content: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError):
        return {}  # changed before


def _in_zip(change: Callable[[Random, bytes], bytes]) -> Callable[[Random, bytes], bytes]:
    """The same in the pickle or the directory, under sums that are right."""

    def changed(dice: Random, content: bytes) -> bytes:
        records = _records(content)
        if not records:
            return content
        name = next(iter(records)) if dice.random() < 0.8 else dice.choice(list(records))
        records[name] = change(dice, records[name] or b"\x80")
        buffer = io.BytesIO()
        method = dice.choice([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for other, data in records.items():
                archive.writestr(other, data)
        return buffer.getvalue()

    return changed


def _pickle(dice: Random, content: bytes) -> bytes:
    """Instructions of a pickle among the others."""
    start = dice.randrange(min(2000, len(content)))
    instructions = b"".join(
        dice.choice(
            [
                b"(",
                b"0",
                b"2",
                b"R",
                b"b",
                b"t",
                b"u",
                b"a",
                b"e",
                b"}",
                b"]",
                b")",
                b"\x81",
                b".",
                b"Q",
                b"h\x00",
                b"j\xff\xff\xff\xff",
                b"r\xff\xff\xff\xff",
                b"\x8a\xffabc",
                b"K\x05",
                b"\x8b\xff\xff\xff\x7f",
                b"\x8e" + b"\xff" * 8,
                b"X\xff\xff\xff\xffab",
                b"I1\n",
                b"cos\nsystem\n",
                b"ctorch\nFloatStorage\n",
                b"cbuiltins\ngetattr\n",
                b"\x93",
            ]
        )
        for _ in range(dice.randint(1, 6))
    )
    return content[:start] + instructions + content[start:]


def _header(dice: Random, content: bytes) -> bytes:
    """A tensor of a safetensors file is of other sides or another type, or lies elsewhere; or
    the file says something else of itself."""
    length = int.from_bytes(content[:8], "little")
    try:
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        name = dice.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        which = dice.choice(["shape", "dtype", "data_offsets", "name", "metadata", "index"])
        if which == "shape":
            entry["shape"] = dice.choice(
                [[], [0, 10**9], [1 << 60, 16], [-1], entry["shape"][::-1]]
            )
        elif which == "dtype":
            entry["dtype"] = dice.choice(["F16", "BF16", "I64", "F8_E4M3", "BOOL", "X"])
        elif which == "data_offsets":
            entry["data_offsets"] = [0, dice.choice(_HUGE)]
        elif which == "index":
            header[name.replace(".0.", f".{10 ** dice.randint(1, 12)}.", 1)] = header.pop(name)
        elif which == "name":
            header[dice.choice(["", "params", "a" * 1000, "\x00"])] = header.pop(name)
        else:
            _config(dice, header)
        written = json.dumps(header).encode()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return content  # changed before
    return len(written).to_bytes(8, "little") + written + content[8 + length :]


def _config(dice: Random, header: dict[str, Any]) -> None:
    own = header.setdefault("__metadata__", {"lowtide.architecture": "ParagonConv"})
    shape = {"scale": 2, "features": dice.choice(_HUGE), "blocks": dice.choice(_HUGE)}
    own["lowtide.config"] = dice.choice(
        [
            "[" * 100_000,
            "null",
            "{}",
            json.dumps(shape),
            json.dumps({**shape, "x": [1]}),
            "9" * 9999,
        ]
    )


def _graph(dice: Random, content: bytes) -> bytes:
    """Another operator, attribute, weight or word in a graph."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
        graph, node = model.graph, dice.choice(model.graph.node)
        which = dice.choice(["operator", "pads", "weight", "words", "end", "more", "loop"])
        if which == "operator":
            node.op_type = dice.choice(["Identity", "Softmax", "Expand", "NonZero", "Loop", "no"])
        elif which == "pads":
            del node.attribute[:]
            pads = [dice.choice([-1, 0, 1, 7, 1 << 20, 1 << 40]) for _ in range(4)]
            node.attribute.append(helper.make_attribute("pads", pads))
        elif which == "weight":
            graph.initializer[0].dims[0] = dice.choice([-1, 0, 1, *_HUGE[:-1]])
        elif which == "words":
            values = [
                '{"multiple_of": 100000}',
                "[" * 100_000,
                '{"minimum": 1e999}',
                "3",
                "2" * 9999,
            ]
            key = dice.choice(["lowtide.size", "lowtide.scale"])
            model.metadata_props.add(key=key, value=dice.choice(values))
        elif which == "end":
            graph.input[0].type.tensor_type.elem_type = dice.choice([0, 2, 7, 10, 16, 99])
        elif which == "more":
            large = np.array(dice.choice([[1 << 40, 1, 1, 1], [1, 1, 1 << 15, 1 << 15], [0]]))
            graph.initializer.append(onnx.numpy_helper.from_array(large, "large"))
            graph.node.append(helper.make_node("Expand", [node.output[0], "large"], ["expanded"]))
            graph.output[0].name = dice.choice(["expanded", "y"])
        else:
            _loop(graph, node)
        return model.SerializeToString()
    except (onnx.onnx_cpp2py_export.checker.ValidationError, ValueError, IndexError, TypeError):
        return content  # changed before
    except Exception as error:
        if type(error).__name__ != "DecodeError":
            raise
        return content


def _loop(graph: Any, node: Any) -> None:
    kinds = onnx.TensorProto
    inside = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["on_too"]),
            helper.make_node("Identity", ["state"], ["after"]),
        ],
        "inside",
        [
            helper.make_tensor_value_info("turn", kinds.INT64, []),
            helper.make_tensor_value_info("on", kinds.BOOL, []),
            helper.make_tensor_value_info("state", kinds.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on_too", kinds.BOOL, []),
            helper.make_tensor_value_info("after", kinds.FLOAT, None),
        ],
    )
    for name, value in {"turns": np.array(1 << 62), "always": np.array(True)}.items():
        graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    graph.node.append(
        helper.make_node("Loop", ["turns", "always", node.output[0]], ["looped"], body=inside)
    )
    graph.output[0].name = "looped"


_ANY = (_flip, _cut, _drop, _insert, _number)
_OWN: dict[str, list[Callable[[Random, bytes], bytes]]] = {
    "zip.pth": [*map(_in_zip, (_flip, _insert, _number, _pickle)), _in_zip(_pickle)] * 2,
    "legacy.pth": [_pickle] * 5,
    "model.safetensors": [_header] * 8,
    "model.onnx": [_graph] * 12,
}
