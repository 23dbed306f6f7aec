"""Spatial modules as ONNX files, run by ONNX Runtime at sizes that were not exported."""

import itertools
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.attention.spatial import (
    ChannelAttention,
    HierarchicalAttention,
    LinearAttention,
    LocalWindowAttention,
    TransposedAttention,
    export_onnx,
)

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SIZES = (1, 3), (33, 50), (70, 64), (5, 61)
LOCAL = list(
    itertools.product(
        ("halo", "blended"),
        ("mask", "shift", "zero", "reflect"),
        ("rope", "table", "decomposed", "none"),
    )
)


def largest_difference(module, path, opset, sizes=SIZES, **limits):
    """Between the file's results and the module's, over sizes and batches."""
    export_onnx(module, path, channels=8, opset=opset, **limits)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    worst = 0.0
    with torch.no_grad():
        for (height, width), batch in itertools.product(sizes, (1, 3)):
            image = torch.randn(batch, 8, height, width)
            (found,) = session.run(["result"], {"image": image.numpy()})
            worst = max(worst, float((module(image) - torch.from_numpy(found)).abs().max()))
    return worst


def operators(path):
    return {node.op_type for node in onnx.load(str(path)).graph.node}


def local(form, boundary, position):
    return LocalWindowAttention(
        8,
        heads=2,
        window=8,
        shared=4,
        form=form,
        boundary=boundary,
        position=position,
        phase=(1, 3),
    )


@pytest.mark.grid(3)
@pytest.mark.parametrize("opset", [pytest.param(20, marks=pytest.mark.slow), 23])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearAttention(8, heads=2),
        lambda: ChannelAttention(8),
        lambda: TransposedAttention(8, heads=2),
        lambda: local("halo", "mask", "rope"),
        lambda: local("blended", "reflect", "table"),
    ],
    ids=["linear", "channel", "transposed", "halo", "blended"],
)
def test_files_give_the_same(make, opset, tmp_path):
    assert largest_difference(make(), tmp_path / "module.onnx", opset) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("kind", LOCAL, ids=" ".join)
def test_files_of_every_kind_of_window_give_the_same(kind, opset, tmp_path):
    assert largest_difference(local(*kind), tmp_path / "module.onnx", opset) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("opset", [20, 23])
def test_files_of_each_stage_give_the_same(opset, tmp_path):
    module = HierarchicalAttention(8, heads=2, window=16, shared=4)
    small, large = (1, 128), (129, 1024)
    for limits, sizes in ((small, ((1, 1), (60, 128))), (large, ((129, 130), (150, 200)))):
        path = tmp_path / f"{limits[0]}.onnx"
        found = largest_difference(module, path, opset, sizes, height=limits, width=limits)
        assert found <= 1e-5


@pytest.mark.slow
def test_attention_is_one_operator_from_opset_23_on(tmp_path):
    module = local("halo", "mask", "none")
    export_onnx(module, tmp_path / "fused.onnx", channels=8)
    export_onnx(module, tmp_path / "plain.onnx", channels=8, opset=20)
    assert "Attention" in operators(tmp_path / "fused.onnx")
    assert {"MatMul", "Softmax"} <= operators(tmp_path / "plain.onnx")


def test_nothing_of_the_machine_is_in_the_file(tmp_path):
    export_onnx(local("halo", "mask", "rope"), tmp_path / "layer.onnx", channels=8)
    assert str(Path(lowtide.__file__).parent).encode() not in (tmp_path / "layer.onnx").read_bytes()


def test_exporting_leaves_the_module_as_it_was(tmp_path):
    module = ChannelAttention(8).train()
    export_onnx(module, tmp_path / "module.onnx", channels=8)
    assert module.training
