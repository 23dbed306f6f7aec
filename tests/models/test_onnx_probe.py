"""ONNX files that harm or mislead: tried in a process of its own, and in their own values."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lowtide
from lowtide import ModelError
from lowtide.memory.oom import is_out_of_memory
from lowtide.models import SizeRule, onnx_probe
from support.process_limit import process_limit

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper  # noqa: E402

from support.onnx_files import conv_file, graph_file  # noqa: E402


def loop(count):
    """A loop of ``count`` iterations that adds nothing."""
    value = helper.make_tensor_value_info
    inside = helper.make_graph(
        [
            helper.make_node("Identity", ["goes_on"], ["goes_on_too"]),
            helper.make_node("Add", ["state", "nothing"], ["result"]),
        ],
        "inside",
        [
            value("turn", TensorProto.INT64, []),
            value("goes_on", TensorProto.BOOL, []),
            value("state", TensorProto.FLOAT, None),
        ],
        [value("goes_on_too", TensorProto.BOOL, []), value("result", TensorProto.FLOAT, None)],
    )
    weights = {"count": np.array(count), "true": np.array(True), "nothing": np.zeros(1, np.float32)}
    return [helper.make_node("Loop", ["count", "true", "x"], ["y"], body=inside)], weights


def test_a_loop_without_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_probe, "_TIMEOUT_SECONDS", 5)
    path = graph_file(tmp_path / "a.onnx", *loop(1 << 62))
    with pytest.raises(ModelError, match="rejected: running an image of 64×64 takes more than 5 s"):
        lowtide.load(path)


def test_a_loop_with_an_end_runs(tmp_path):
    image = torch.rand(1, 3, 9, 8)
    assert torch.equal(lowtide.load(graph_file(tmp_path / "a.onnx", *loop(3)))(image), image)


def test_a_graph_that_wants_all_memory(tmp_path):
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["large"]),
        helper.make_node("ReduceMean", ["large", "axis"], ["y"]),
    ]
    weights = {"shape": np.array([1 << 22, 1, 1, 1]), "axis": np.array([0])}
    path = graph_file(tmp_path / "a.onnx", nodes, weights)
    with process_limit(256 << 20), pytest.raises(ModelError, match="memory") as caught:
        lowtide.load(path)
    assert not is_out_of_memory(caught.value.__cause__)


def test_a_crash_is_an_error_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_probe, "_MAIN", "os:abort")
    with pytest.raises(
        ModelError, match="ONNX Runtime was terminated by SIGABRT, while reading it"
    ):
        lowtide.load(conv_file(tmp_path / "a.onnx"))


@pytest.mark.parametrize("place", ["name", "input", "initializer", "metadata"])
def test_names_that_are_no_utf_8(tmp_path, place):
    path = conv_file(tmp_path / "a.onnx", metadata={"license": "a license"})
    model = onnx.load(path)
    if place == "name":
        model.graph.node[0].name = "a license"
    if place == "input":
        model.graph.node[0].input[1] = model.graph.initializer[0].name = "a license"
    if place == "initializer":
        model.graph.initializer[0].name = "a license"
    content = model.SerializeToString().replace(b"a license", b"a lic\xff\xfese")
    path.write_bytes(content)
    with pytest.raises(ModelError):
        lowtide.load(path)


@pytest.mark.parametrize(
    "size",
    [
        '{"multiple_of": 100000}',
        '{"minimum": NaN}',
        '{"square": 1}',
        '{"multiple_of": 0}',
        "[]",
        "[" * 60_000,
        "[" * 100_000,
        '{"minimum": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:20],
)
def test_rules_for_sizes_that_make_no_sense(tmp_path, size):
    path = conv_file(tmp_path / "a.onnx", metadata={"lowtide.size": size})
    with pytest.raises(ModelError, match=r"metadata of .* is damaged"):
        lowtide.load(path)


@pytest.mark.parametrize(
    "config",
    [
        "[" * 100_000,
        "[" * 60_000,
        "9" * 5000,
        '{"scale": 2, "features": 100000, "blocks": 1000000}',
        '{"scale": 2, "features": 1' + "0" * 4000 + ', "blocks": 1}',
    ],
    ids=lambda text: text[:50],
)
def test_configurations_that_make_no_sense(tmp_path, config):
    path = tmp_path / "a.safetensors"
    entries = {"lowtide.architecture": "ParagonConv", "lowtide.config": config}
    save_file({"a": torch.zeros(1)}, path, entries)
    with pytest.raises(ModelError):
        lowtide.load(path)


def test_safetensors_whose_words_are_no_utf_8(tmp_path):
    header = json.dumps({"__metadata__": {"a": "bc"}}).encode().replace(b"bc", b"\xff\xfe")
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="damaged"):
        lowtide.load(path)


def in_values(source, path, given, made):
    """A file's graph, given 0..``given`` and giving 0..``made``."""
    model = onnx.load(source)
    del model.metadata_props[:]
    graph = model.graph
    first, last = graph.input[0].name, graph.output[0].name
    for one in graph.node:
        one.input[:] = ["divided" if name == first else name for name in one.input]
        one.output[:] = ["before" if name == last else name for name in one.output]
        one.input[:] = ["before" if name == last else name for name in one.input]
    white = [np.array(value, np.float32) for value in (given, made)]
    graph.initializer.extend(map(onnx.numpy_helper.from_array, white, ("given", "made")))
    graph.node.insert(0, helper.make_node("Div", [first, "given"], ["divided"]))
    graph.node.append(helper.make_node("Mul", ["before", "made"], [last]))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("given", [1, 255])
@pytest.mark.parametrize("made", [1, 255])
def test_values_of_0_to_255(given, made, onnx_x2, tmp_path, photo):
    plain = lowtide.load("lowtide-x2")
    model = lowtide.load(in_values(onnx_x2, tmp_path / "a.onnx", given, made))
    image = torch.from_numpy(photo[100:140, 200:250].copy()).permute(2, 0, 1)[None] / 255
    before = image.clone()
    assert (model(image) - plain(image)).abs().max() < 1e-4
    assert torch.equal(image, before)
    tags = model.descriptor.tags
    assert ((f"values 0..{given} to 0..{made}") in tags) == ((given, made) != (1, 1))


def test_values_of_0_to_255_that_are_clipped(tmp_path):
    """With its last operator, a model of 0..255 whose weights say nothing of it."""
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Add", ["b", "mean"], ["c"]),
        helper.make_node("Clip", ["c", "zero", "white"], ["y"]),
    ]
    weights = {
        "mean": np.float32(20),
        "zero": np.float32(0),
        "white": np.float32(255),
    }
    weights = {key: np.array(value) for key, value in weights.items()}
    model = lowtide.load(graph_file(tmp_path / "a.onnx", nodes, weights))
    image = torch.rand(1, 3, 16, 16) / 2 + 0.3
    assert (model(image) - image).abs().max() < 1e-5


def test_values_of_no_known_kind_are_refused(tmp_path):
    nodes = [helper.make_node("Mul", ["x", "large"], ["y"])]
    path = graph_file(tmp_path / "a.onnx", nodes, {"large": np.array(1023, np.float32)})
    with pytest.raises(ModelError, match=r"maps grays of .* to values of 256 and 767"):
        lowtide.load(path)


def test_changes_of_light_are_no_change_of_values(tmp_path):
    nodes = [helper.make_node("Add", ["x", "light"], ["y"])]
    path = graph_file(tmp_path / "a.onnx", nodes, {"light": np.array(0.01, np.float32)})
    model = lowtide.load(path)
    assert (model.descriptor.tags, model.descriptor.size) == (("ONNX", "opset 20"), SizeRule())
    assert torch.allclose(model(torch.full((1, 3, 8, 8), 0.5)), torch.tensor(0.51))
