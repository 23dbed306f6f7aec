"""ONNX files as models: what PyTorch gives, found rules for sizes, and files that are refused."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide import ModelError, UsageError
from lowtide.jobs.train.user_models import load_user_model
from lowtide.memory.oom import is_out_of_memory
from lowtide.memory.process_memory import anonymous_bytes
from lowtide.models import Model, SizeRule
from lowtide.models.export import write_onnx
from lowtide.models.onnx_model import OnnxModel
from lowtide.streaming.probe.receptive_field import measure_receptive_field
from support.process_limit import process_limit

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper  # noqa: E402

from support.onnx_files import conv_file, exported, graph_file  # noqa: E402

SIZES = (1, 1), (7, 5), (33, 50), (64, 67)


def node(kind, *inputs, **attributes):
    return helper.make_node(kind, inputs, ["y"], **attributes)


@pytest.fixture(scope="module")
def bundled(onnx_x2):
    return onnx_x2


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A network on a grid of 4 pixels, and its file."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.PixelUnshuffle(4), nn.Conv2d(48, 192, 3, padding=1), nn.GELU(), nn.PixelShuffle(8)
    )
    facts = lowtide.load("lowtide-x2").descriptor
    model = Model(network, replace(facts, size=SizeRule(multiple_of=4)))
    return model, exported(model, tmp_path_factory.mktemp("blocks") / "model.onnx")


def assert_same(found, expected, sizes=SIZES):
    for size in sizes:
        image = torch.rand(2, expected.descriptor.in_channels, *size)
        before = image.clone()
        result = found(image)
        assert result.shape == expected(image).shape
        assert (result - expected(image)).abs().max() < 1e-5
        assert torch.equal(image, before)


def test_gives_what_pytorch_gives(bundled):
    model, facts = lowtide.load(bundled), lowtide.load("lowtide-x2").descriptor
    assert_same(model, lowtide.load("lowtide-x2"))
    assert isinstance(model, OnnxModel)
    found = model.descriptor
    assert (found.name, found.architecture, found.scale) == ("x2", facts.architecture, 2)
    assert (found.license, found.size, found.path) == ("MIT", SizeRule(), str(bundled))
    assert found.tags == ("ONNX", "opset 23")
    assert found.parameters >= facts.parameters
    assert found.weight_bytes >= facts.weight_bytes
    assert found.sha256 != facts.sha256
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.to("cpu", torch.float32) is model


@pytest.mark.parametrize("labeled", [True, False])
def test_sizes_off_the_grid_are_padded(labeled, blocks, tmp_path):
    plain, path = blocks
    if not labeled:
        graph, path = onnx.load(path), tmp_path / "model.onnx"
        del graph.metadata_props[:]
        onnx.save(graph, path)
    model = lowtide.load(path)
    assert (model.descriptor.scale, model.descriptor.size) == (2, SizeRule(multiple_of=4))
    assert_same(model, plain)


def test_a_least_size_is_found(tmp_path):
    pads = {"pads": np.array([0, 0, 5, 5, 0, 0, 5, 5], np.int64)}
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["p"], mode="reflect"),
        helper.make_node("AveragePool", ["p"], ["y"], kernel_shape=[11, 11]),
    ]
    model = lowtide.load(graph_file(tmp_path / "model.onnx", nodes, pads))
    assert (model.descriptor.scale, model.descriptor.size) == (1, SizeRule(minimum=8))
    assert model.descriptor.purpose == "Restoration"
    assert model(torch.rand(1, 3, 2, 30)).shape == (1, 3, 2, 30)


def test_gray(tmp_path):
    path = conv_file(tmp_path / "model.onnx", 1, metadata={"license": "CC0-1.0"})
    model, image = lowtide.load(path), torch.rand(1, 1, 9, 12)
    assert (model.descriptor.in_channels, model.descriptor.license) == (1, "CC0-1.0")
    weight = torch.tensor(onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0]))
    expected = torch.nn.functional.conv2d(image, weight, padding=1).clamp(0, 1)
    assert torch.allclose(model(image), expected, atol=1e-6)


def test_half_precision_at_both_ends_is_cast(tmp_path):
    half = lowtide.load(conv_file(tmp_path / "half.onnx", kind=np.float16))
    full = lowtide.load(conv_file(tmp_path / "full.onnx"))
    image = torch.rand(1, 3, 20, 31)
    assert half.descriptor.tags == ("ONNX", "opset 20", "fp16")
    assert half(image).dtype == half.dtype == torch.float32
    assert 0 < (half(image) - full(image)).abs().max() < 2e-3


@pytest.mark.slow
@pytest.mark.own_process
def test_copies_share_the_session_and_a_call_leaves_nothing(bundled):
    model, image = lowtide.load(bundled), torch.rand(1, 3, 300, 300)
    assert copy.deepcopy(nn.Sequential(model.module))[0].session is model.module.session
    before = anonymous_bytes()
    model(image)
    assert anonymous_bytes() - before < 4 << 20


def test_a_lack_of_memory_is_one_and_leaves_nothing_behind(bundled):
    model, image = lowtide.load(bundled), torch.rand(1, 3, 600, 600)
    expected = model(image)
    with process_limit(50 << 20):
        with pytest.raises(MemoryError) as caught:
            model.module(image)
        assert is_out_of_memory(caught.value)
        assert model.module(image[..., :100, :100]).shape == (1, 3, 200, 200)
    assert torch.equal(model(image), expected)


def test_the_number_of_threads_is_pytorchs(bundled):
    model, before = lowtide.load(bundled), torch.get_num_threads()
    image = torch.rand(1, 3, 40, 30)
    expected = model(image)
    try:
        torch.set_num_threads(before % 2 + 1)
        assert torch.allclose(model(image), expected, atol=1e-6)
        assert model.module.session._threads == before % 2 + 1
    finally:
        torch.set_num_threads(before)


def test_unsupported_requests_to_a_file(bundled):
    with pytest.raises(UsageError, match="on the CPU only: 'cuda:0' has not been verified"):
        lowtide.load(bundled, device="cuda:0")
    model = lowtide.load(bundled)
    for call in (model.to_low_precision, lambda dtype: model.to(dtype=dtype)):
        with pytest.raises(UsageError, match="not support bfloat16"):
            call(torch.bfloat16)
    with pytest.raises(UsageError, match="float64"):
        model(torch.rand(1, 3, 8, 8, dtype=torch.float64))
    with pytest.raises(ModelError, match="is an ONNX file already"):
        write_onnx(model, bundled.with_name("again.onnx"))
    with pytest.raises(ModelError, match="cannot be trained"):
        load_user_model(bundled)


def test_a_mean_over_the_whole_that_drops_nan_is_found_all_the_same(tmp_path):
    """It is within rounding of that of a tile, so that comparing the two shows nothing."""
    nodes = [
        helper.make_node("IsNaN", ["x"], ["lost"]),
        helper.make_node("Where", ["lost", "little", "x"], ["kept"]),
        helper.make_node("ReduceMean", ["kept"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "little"], ["gain"]),
        helper.make_node("Add", ["x", "gain"], ["y"]),
    ]
    little = {"little": np.array(1e-4, np.float32)}
    model = lowtide.load(graph_file(tmp_path / "model.onnx", nodes, little))

    def reach(**options):
        return measure_receptive_field(
            model.module, channels=3, scale=1, align=1, minimum=0, **options
        ).radius

    assert reach() == 0
    assert reach(propagates_nan=False) is None


def test_reach_is_that_of_the_network(tmp_path):
    model = lowtide.load(conv_file(tmp_path / "model.onnx", side=5))
    found = measure_receptive_field(
        model.module, channels=3, scale=1, align=1, minimum=0, propagates_nan=False
    )
    assert found.radius == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"given": (1, 3, 64, 48)}, r"takes images of 48×64 pixels and no others"),
        ({"given": (1, 3, "h", 48)}, r"takes images of 48×any pixels"),
        ({"given": (2, 3, "h", "w")}, "takes 2 images at a time"),
        ({"given": (1, "c", "h", "w")}, "any number of channels"),
        ({"given": (1, "h", "w", 4)}, r"takes 1×\?×\?×4"),
        ({"given": (1, 3, "t")}, r"takes 1×3×\?; Lowtide runs image models"),
        ({"kind": TensorProto.UINT8, "made": TensorProto.UINT8}, "takes uint8"),
        ({"inputs": ("x", "z")}, r"takes 2 tensors \(x, z\) and returns 1"),
        ({"outputs": ("y", "x")}, r"returns 2 tensors"),
        ({"opset": 99}, "cannot be run by ONNX Runtime: ONNX Runtime only .* Opset 99"),
        ({"metadata": {"lowtide.scale": "4"}}, "upscales by 1, but its metadata says 4"),
        ({"metadata": {"lowtide.size": '{"large": 3}'}}, "metadata of .* is damaged"),
        ({"metadata": {"lowtide.scale": "big"}}, "metadata of .* is damaged"),
    ],
    ids=str,
)
def test_no_model_from_image_to_image(options, words, tmp_path):
    path = graph_file(tmp_path / "model.onnx", [node("Identity", "x")], **options)
    with pytest.raises(ModelError, match=words) as caught:
        lowtide.load(path)
    assert str(path) in caught.value.message


def test_a_fixed_size_names_a_way_out(tmp_path):
    with pytest.raises(ModelError) as caught:
        lowtide.load(conv_file(tmp_path / "model.onnx", given=(1, 3, 64, 64)))
    assert "lowtide export onnx" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("Reshape", [[1, 3, 2, 16, 48], [1, 3, 32, 48]]), ("Resize", [[1, 3, 96, 96]])],
)
def test_sizes_that_were_fixed_behind_dynamic_names_are_told(name, sizes, tmp_path):
    weights = {f"s{at}": np.array(one) for at, one in enumerate(sizes)}
    names = ["x", *(f"h{at}" for at in range(1, len(sizes))), "y"]
    nodes = [
        helper.make_node(name, [given, *([] if name == "Reshape" else ["", ""]), size], [made])
        for given, size, made in zip(names, weights, names[1:], strict=False)
    ]
    with pytest.raises(ModelError) as caught:
        lowtide.load(graph_file(tmp_path / "model.onnx", nodes, weights))
    assert "export it again with dynamic shapes" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (node("Frobnicate", "x"), "No Op registered for Frobnicate"),
        (node("Foo", "x", domain="my.ops"), "my.ops"),
        (node("Relu", "z"), "'z' is not a graph input"),
        (node("ReduceMean", "x"), r"maps 1×3×64×64 to 1×1×1×1, which is not an image"),
        (node("ReduceMean", "x", "one"), r"takes 3 channels and returns 1"),
        (node("AveragePool", "x", kernel_shape=[2, 2]), r"which is not an image upscaled"),
    ],
)
def test_limits_of_the_runtime_and_the_graph(made, words, tmp_path):
    weights = {"one": np.array([1], np.int64)} if "one" in made.input else {}
    with pytest.raises(ModelError, match=words) as caught:
        lowtide.load(graph_file(tmp_path / "model.onnx", [made], weights))
    assert "onnxruntime_src" not in caught.value.message


def test_damage(bundled, tmp_path):
    content, path = bundled.read_bytes(), tmp_path / "model.onnx"
    for length in (1, 100, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="is not an ONNX file, or is damaged"):
            lowtide.load(path)
    for other, words in ((b"", "is empty"), (b"<!DOCTYPE html>", "web page")):
        path.write_bytes(other)
        with pytest.raises(ModelError, match=words):
            lowtide.load(path)


def test_weights_in_another_file_are_refused(tmp_path):
    path = conv_file(tmp_path / "whole.onnx")
    onnx.save(
        onnx.load(path),
        tmp_path / "parts.onnx",
        save_as_external_data=True,
        size_threshold=0,
        location="parts.data",
    )
    with pytest.raises(ModelError, match=r"in another file, parts\.data"):
        lowtide.load(tmp_path / "parts.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_packages(package, bundled, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else find(name)
    )
    with pytest.raises(UsageError, match=f"running ONNX files needs {package}$") as caught:
        lowtide.load(bundled)
    assert caught.value.hint.endswith("pip install '.[export]'")
